"""Gradients of interpolation that read windows of results: those of eager; and what stays as it is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dcompile.capture.passes.dynamo.upsampling import gather_upsampling_gradients, input_gradient, interpolated

MODES = {
    "linear": [(8,)], "bilinear": [(5, 3)], "trilinear": [(4, 1, 6)], "bicubic": [(5, 3), (1, 2)],
    "nearest": [(8,), (5, 3), (4, 1, 6)], "nearest-exact": [(8,), (5, 3), (4, 1, 6)],
}  # fmt: skip
WAYS: tuple[dict[str, Any], ...] = (
    {"scale_factor": 2.0}, {"scale_factor": 4.3}, {"scale_factor": 2.3, "recompute_scale_factor": True}, {"size": 1},
    {"size": 2}, {"size": 7}, {"scale_factor": 8.0},
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_eager(mode: str) -> None:
    aligned = (None,) if mode.startswith("nearest") else (False, True)
    for sizes, way, align in itertools.product(MODES[mode], WAYS, aligned):
        x = torch.randn(2, 3, *sizes, dtype=torch.float64, requires_grad=True)
        found = [call(x, mode=mode, align_corners=align, **way) for call in (interpolated, F.interpolate)]
        grad = torch.randn_like(found[0])
        ours, eagers = (torch.autograd.grad(result, x, grad)[0] for result in found)
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        torch.testing.assert_close(ours, eagers, msg=lambda text, way=(sizes, way, align): f"{way}: {text}")


def test_sixteen_bits_are_summed_in_float32_and_rounded_once() -> None:
    x = torch.randn(1, 2, 6, 6, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(1, 2, 24, 24, dtype=torch.bfloat16)
    (ours,) = torch.autograd.grad(interpolated(x, scale_factor=4.0, mode="bilinear"), x, grad)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.interpolate(wide, scale_factor=4.0, mode="bilinear"), wide, grad.double())
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_blocks_of_copies_are_summed_in_one_pass(mode: str, layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 4, 6, requires_grad=True)
    grad = torch.randn(2, 3, 16, 12).to(memory_format=layout)
    graph = make_fx(lambda grad: input_gradient(grad, x.shape[2:], None, mode, align_corners=False))(grad)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls.count(torch.ops.aten.sum.dim_IntList) == 1
    assert torch.ops.aten._unsafe_index.Tensor not in calls
    assert torch.ops.aten.clone.default not in calls
    (eagers,) = torch.autograd.grad(F.interpolate(x, (16, 12), mode=mode), x, grad)
    torch.testing.assert_close(graph(grad), eagers)
    assert graph(grad).is_contiguous(memory_format=layout), "neighbours are read and written together"


def test_positions_are_rounded_as_in_eager() -> None:
    """A third is not a float32: some products with it are below a whole number, some are not."""
    for size, new in ((41, 123), (97, 679), (1000, 49000), (7, 3)):
        x = torch.randn(1, 1, size, requires_grad=True)
        for mode in ("nearest", "nearest-exact"):
            grad = torch.randn(1, 1, new)
            ours, eagers = (
                torch.autograd.grad(call(x, new, mode=mode), x, grad)[0] for call in (interpolated, F.interpolate)
            )
            torch.testing.assert_close(ours, eagers, rtol=1e-5, atol=1e-5)


def replaced(function: Any, *inputs: torch.Tensor, planned_for: str = "cuda", **keywords: Any) -> int:
    """Return how many calls the pass replaces in the graph that Dynamo captures."""
    counts = []

    def backend(gm: Any, _: Any) -> Any:
        counts.append(gather_upsampling_gradients(gm, planned_for).changes)
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, **keywords)(*inputs)
    return sum(counts)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, None, 2.0, "bilinear")


def test_what_is_replaced() -> None:
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    assert replaced(lambda x: doubled(x).sum(), x) == 1
    assert replaced(lambda x: checkpoint(doubled, x, use_reentrant=False).sum(), x) == 1
    assert replaced(doubled, x, planned_for="cpu") == 0, "adding in memory is faster where it has an order"
    assert replaced(doubled, x, dynamic=True) == 0, "windows have no fixed length"
    assert replaced(doubled, x.detach()) == 0, "there is no gradient"
    assert replaced(lambda x: F.interpolate(x, scale_factor=2), x) == 1, "the mode without a name is nearest"
    for mode, antialias in (("area", False), ("bicubic", True), ("bilinear", True)):
        assert replaced(lambda x, m=mode, a=antialias: F.interpolate(x, (6, 6), mode=m, antialias=a), x) == 0
