"""Gathers read the dtype that lies in memory, and gradients of permutations are gathers."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import dcompile
from dcompile.capture.passes.joint.gathers import gather_permutation_gradients, narrow_gathers

aten = torch.ops.aten
PLACES = torch.arange(8) // 2


def traced(function, *args):
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def enlarged(x):
    wide = x.to(torch.float32)
    return aten._unsafe_index(wide, [None, None, PLACES[:, None], PLACES]).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_enlarged_image_is_not_widened(dtype):
    x = torch.randn(2, 3, 4, 4, dtype=dtype)
    gm = traced(enlarged, x)
    assert narrow_gathers(gm).changes == 1
    assert not [node for node in gm.graph.nodes if node.target is aten._to_copy.default]
    assert torch.equal(gm(x), enlarged(x)) and torch.equal(gm(x), F.interpolate(x, scale_factor=2.0))


@pytest.mark.parametrize("how", ["read wide as well", "was wide", "another dtype"])
def test_what_would_come_out_otherwise_stays(how):
    def function(x):
        found = aten._unsafe_index(x.to(torch.float32), [None, PLACES % 4])
        narrow = found.to(torch.float16 if how == "another dtype" else torch.bfloat16)
        return (narrow, found) if how == "read wide as well" else narrow

    x = torch.randn(4, 4, dtype=torch.float32 if how == "was wide" else torch.bfloat16)
    gm = traced(function, x)
    before = gm.code
    assert narrow_gathers(gm).changes == 0 and gm.code == before


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
