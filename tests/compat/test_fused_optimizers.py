"""Optimizers with `fused=True`, which torch keeps Dynamo out of: their steps compiled, against eager's kernels."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import dcompile

MATRIX = 33, 65
HOW = [
    ("AdamW", {"lr": 1e-2}),
    ("AdamW", {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "maximize": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
]
WHOLE = (HOW[0], HOW[4], HOW[6])
"""Of each class, one that is compiled from its first step on; the others' first steps are those in 16 bits."""


def trained(name, how, dtypes, compiles, fused=True, wide=False, steps=3, begun=False):
    """(parameters and state after some steps, receipt); with `wide` all is kept in float32, from the same numbers.

    Of these steps, the first makes the state, the second compiles again, and the third has another learning rate. With
    `begun`, the first is eager's in any case: there is one compilation.
    """
    torch.manual_seed(0)

    def drawn(shape, dtype):
        return torch.randn(shape, dtype=dtype).to(torch.float32 if wide else dtype)

    kinds = [(MATRIX, dtype) for dtype in dtypes] + [((), dtypes[0])]  # a number is a number whatever its bits
    parameters = [nn.Parameter(drawn(*kind)) for kind in kinds]
    lr = how["lr"].clone() if isinstance(how["lr"], torch.Tensor) else how["lr"]
    optimizer = getattr(torch.optim, name)(parameters, fused=fused, **{**how, "lr": lr})
    schedule = ExponentialLR(optimizer, 0.7)
    step = dcompile.compile(optimizer.step, options={"receipt": False}) if compiles else optimizer.step
    for number in range(steps):
        for parameter, kind in zip(parameters, kinds, strict=True):
            parameter.grad = drawn(*kind)
        optimizer.step() if begun and not number else step()
        schedule.step()
    state = [optimizer.state[parameter] for parameter in parameters]
    return parameters, state, dcompile.receipt(step) if compiles else None


@pytest.mark.parametrize(("name", "how"), HOW)
def test_it_is_compiled_whole_and_equals_eagers_kernels(name, how):
    torch._dynamo.reset()
    dtypes = (torch.float32, torch.float64)  # one optimizer has them all: tracing it is what takes time
    steps = {} if (name, how) in WHOLE else {"steps": 2, "begun": True}
    expected, state, _ = trained(name, how, dtypes, compiles=False, **steps)
    found, own_state, receipt = trained(name, how, dtypes, compiles=True, **steps)
    torch.testing.assert_close((found, own_state), (expected, state), rtol=2e-6, atol=2e-6)
    assert receipt.graph_breaks == 0 and receipt.library_calls == 0 and receipt.kernel_calls > 0


@pytest.mark.parametrize(("name", "how"), HOW)
def test_it_rounds_once_in_16_bits(name, how):
    """One step from the same numbers: what float32 gives, rounded. Eager's SGD for CPUs is wrong in 16 bits."""
    torch._dynamo.reset()
    dtypes = (torch.bfloat16, torch.float16)
    expected, state, _ = trained(name, how, dtypes, compiles=False, fused=False, wide=True, steps=1)
    found, own_state, receipt = trained(name, how, dtypes, compiles=True, steps=1)
    assert receipt.graph_breaks == 0 and receipt.library_calls == 0 and receipt.kernel_calls > 0
    for own, other, own_kept, kept in zip(found, expected, own_state, state, strict=True):
        to = torch.finfo(own.dtype).eps / 2 * 1.01
        torch.testing.assert_close(own.float(), other.data, rtol=to, atol=1e-6)
        for key, value in kept.items():
            torch.testing.assert_close(own_kept[key], value, rtol=to, atol=1e-6, check_dtype=False)


def test_a_learning_rate_may_be_a_tensor():
    torch._dynamo.reset()
    how = {"lr": torch.tensor(1e-2)}
    expected, _, _ = trained("AdamW", how, [torch.float32], compiles=False)
    found, _, receipt = trained("AdamW", how, [torch.float32], compiles=True)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    assert receipt.graph_breaks == 0


def test_grad_scalers_factor_and_what_it_found():
    """GradScaler hands both over as attributes: the step unscales gradients, and leaves out infinite ones."""

    def scaled(compiles):
        torch._dynamo.reset()
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(9, 5))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        if compiles:
            optimizer.step = dcompile.compile(optimizer.step, options={"receipt": False})
        for number in range(4):
            optimizer.zero_grad()
            loss = (weight * torch.randn_like(weight)).sum() * (torch.inf if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if compiles:
            assert dcompile.receipt(optimizer.step).kernel_calls > 0
        return weight, weight.grad, optimizer.state[weight]

    torch.testing.assert_close(scaled(True), scaled(False), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("AdamW", {"lr": 0.1}),
        ("AdamW", {"lr": torch.tensor(0.1)}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adagrad", {"lr": 0.1}),
    ],
)
def test_a_group_without_gradients_stays_as_it_is(name, how):
    torch._dynamo.reset()
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = getattr(torch.optim, name)([{"params": [first]}, {"params": [second]}], fused=True, **how)
    step = dcompile.compile(optimizer.step, options={"receipt": False})
    first.grad = torch.ones(3)
    for _ in range(2):
        step()
    assert (first < 0.95).all() and (second == 1).all()


def test_other_compilers_still_leave_it_out():
    """The stand-ins are there while a model of ours is traced, and not for other backends."""
    torch._dynamo.reset()
    trained("AdamW", {"lr": 1e-2}, [torch.float32], compiles=True, steps=1)
    weight, traced = nn.Parameter(torch.randn(3)), []
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.randn(3)
    torch.compile(optimizer.step, backend=lambda graph, _: traced.append(graph) or graph.forward)()
    assert not traced
