"""References: float64 in place of every smaller dtype, the same random numbers, and memory shared as it was."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.verify.reference import copied, evaluate, in_float64


def test_copies_share_memory_as_the_tensors_do() -> None:
    base = torch.arange(12.0)
    row, column = base.view(3, 4)[1], base.view(3, 4).t()
    one, two, number = copied([row, column, 7])
    assert torch.equal(one, row) and torch.equal(two, column) and number == 7
    assert (one.stride(), two.stride()) == (row.stride(), column.stride())
    one.fill_(-1)
    assert torch.equal(two[:, 1], -torch.ones(4)) and torch.equal(base, torch.arange(12.0))


def test_a_graph_in_float64_is_the_function_of_float64() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.bfloat16) * 3).float().softmax(-1).sum(0)

    x = torch.randn(5, 7)
    gm = make_fx(function)(x)
    (same,), _, _ = evaluate(gm, [x], exact=False)
    (exact,), _, values = evaluate(gm, [x], exact=True)
    assert same.dtype == torch.float32 and torch.equal(same, function(x))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, (x.double() * 3).softmax(-1).sum(0), rtol=1e-14, atol=0)
    assert values["mul"].dtype == torch.float64


def test_a_graph_that_writes_its_input_leaves_the_given_one() -> None:
    gm = make_fx(lambda x: x.mul_(2) + 1)(torch.ones(3))
    x = torch.ones(3)
    (result,), (after,), _ = evaluate(gm, [x], exact=True)
    assert torch.equal(x, torch.ones(3)) and torch.equal(after, 2 * torch.ones(3))
    assert torch.equal(result.float(), 3 * torch.ones(3))


def test_random_numbers_are_those_of_the_own_dtype() -> None:
    gm = make_fx(lambda x: torch.rand_like(x) + x)(torch.zeros(50))
    torch.manual_seed(3)
    (same,), _, _ = evaluate(gm, [torch.zeros(50)], exact=False)
    torch.manual_seed(3)
    (exact,), _, _ = evaluate(gm, [torch.zeros(50)], exact=True)
    assert torch.equal(exact.float(), same)


def test_eager_training_in_float64_gives_gradients_in_the_parameters_dtype() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(8, 4)
    with in_float64(trains=True):
        layer(x).square().sum().backward()
    wide = nn.Linear(4, 3).double()
    wide.load_state_dict(layer.state_dict())
    wide(x.double()).square().sum().backward()
    assert layer.weight.grad is not None and wide.weight.grad is not None
    assert torch.equal(layer.weight.grad, wide.weight.grad.float())
