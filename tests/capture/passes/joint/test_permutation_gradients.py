"""Gradients of rows in another order are gathers by the inverse order; other sums where rows fall stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.passes.joint.permutation_gradients import gather_permutation_gradients

aten = torch.ops.aten
ROWS, COPIES, WIDTH = 6, 2, 3


def sorted_rows(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return x[keys.sort()[1]]


def dispatched(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return x[keys.repeat_interleave(COPIES).sort(stable=True)[1] // COPIES]


def combined(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    order = keys.sort()[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return x[inverse]


def both_ways(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    order = keys.sort()[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return (x[order] * 2).tanh()[inverse]


def chosen(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return x[keys]


def wrongly_divided(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return x[keys.sort()[1] // COPIES]


def backwards(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """No inverse: numbers count down, so rows do not return."""
    order = keys.sort()[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0] - 1, -1, -1)
    return x[inverse]


def with_gradient(function):
    def both(x, keys, grad):
        x = x.detach().requires_grad_()
        result = function(x, keys)
        return result, torch.autograd.grad(result, x, grad)[0]

    return both


def operands(function, width=(WIDTH,)):
    x, keys = torch.randn(ROWS, *width), torch.randint(0, 4, (ROWS,))
    return x, keys, torch.randn_like(function(x, keys))


@pytest.mark.parametrize(
    ("function", "count"),
    [(sorted_rows, 1), (dispatched, 1), (combined, 1), (both_ways, 2), (chosen, 0), (wrongly_divided, 0),
     (backwards, 0)],
)  # fmt: skip
@pytest.mark.parametrize("width", [(WIDTH,), ()], ids=["rows", "numbers"])
def test_sums_over_permutations_become_gathers(function, count, width):
    inputs = operands(function, width)
    gm = make_fx(with_gradient(function), tracing_mode="fake")(*inputs)
    for node in gm.graph.nodes:  # as AOTAutograd's joint graphs are, without operators that write
        if node.target is aten.index_put_.default:
            node.target = aten.index_put.default
    assert gather_permutation_gradients(gm).changes == count
    if count:
        assert not [n for n in gm.graph.find_nodes(op="call_function", target=aten.index_put.default) if True in n.args]
    torch.testing.assert_close(gm(*inputs)[1], with_gradient(function)(*inputs)[1])


@pytest.mark.parametrize("function", [sorted_rows, dispatched, combined, both_ways])
def test_compiled_gradients_are_eagers(function):
    call = dcompile.compile(function, fullgraph=True)
    for _ in range(2):
        inputs = operands(function)
        found, wanted = with_gradient(call)(*inputs), with_gradient(function)(*inputs)
        torch.testing.assert_close(found, wanted)
