"""Operations over lists of tensors give what eager gives, without a fallback."""

import pytest
import torch

from dcompile.codegen.lower.decompositions.table import foreach_table

TABLE = foreach_table()


def lists() -> tuple[list[torch.Tensor], ...]:
    torch.manual_seed(0)
    return tuple([torch.rand(3) + 0.5, torch.rand(2, 4) + 0.5, torch.rand(()) + 0.5] for _ in range(3))


@pytest.mark.parametrize("op", TABLE, ids=str)
def test_each_gives_what_eager_gives(op):
    tensors, scalars = list(lists()), [0.5, 2.0, 1.5]
    single = {"Scalar": 2.0, "Scalar[]": scalars, "number": 2.0, "List[number]": scalars, "Tensor": torch.tensor(2.0)}
    args = []
    for argument in op._schema.arguments:
        if str(argument.type) == "List[Tensor]":
            args.append(tensors.pop(0))
        elif not argument.kwarg_only and argument.default_value is None and str(argument.type) in single:
            args.append(single[str(argument.type)])
    kwargs = {"alpha": 3} if any(a.name == "alpha" for a in op._schema.arguments) else {}
    kwargs |= {"value": 3} if any(a.name == "value" for a in op._schema.arguments) else {}
    expected, actual = op(*args, **kwargs), TABLE[op](*args, **kwargs)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-6, equal_nan=True)


@pytest.mark.timeout(120)
def test_adamw_over_lists_is_one_kernel_for_each_size():
    from dcompile import receipt

    def step():
        parameters = [torch.nn.Parameter(torch.ones(n) * n) for n in (40, 40, 7)]
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.5
        return parameters, torch.optim.AdamW(parameters, lr=0.1, foreach=True)

    expected, optimizer = step()
    for _ in range(2):
        optimizer.step()
    actual, optimizer = step()
    compiled = torch.compile(optimizer.step, backend="dcompile", options={"receipt": False})
    for _ in range(2):
        compiled()
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5)
    assert receipt(compiled).fallbacks == {}
