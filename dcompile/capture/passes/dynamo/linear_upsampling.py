"""Give linear, bilinear and trilinear `interpolate` a gradient that reads, in place of one that adds in memory.

torch decomposes these operations into reads at computed positions, so their gradients add values at such positions.
On GPUs that needs atomic additions, in no fixed order. But the readers of a position are known: along each dimension,
an element of the input is read by the results whose source is less than 1 away, a short window. The gradient sums these
windows, one dimension after another. SegFormer's backward spent 369 of 402 ms in ATen's additions (H200, 8 images of
512 x 512).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import argument
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

aten = torch.ops.aten

NAMES = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
"""Arguments of `torch.nn.functional.interpolate`, in order."""
DIMENSIONS = {"linear": 1, "bilinear": 2, "trilinear": 3}
"""mode -> number of the last dimensions that change their size."""


def gather_upsampling_gradients(gm: GraphModule, planned_for: str | None = None) -> PassReport:
    """Replace linear `interpolate` calls whose input has a gradient by `interpolated`, in place.

    Guarantees: the same result. Left unchanged: symbolic sizes, whose windows have no fixed length, antialiasing, and
    bodies of operators that trace their own backward. `planned_for`: type of the device whose kernels count, if not the
    graph's own. Where stores have an order, adding in memory is faster: 4.0 for 7.1 ms (CPU, 4 x 32 x 32 to 128 x 128).
    """
    nest = NestedGraphs(gm)
    graphs = filter(nest.is_inlined, nest.graphs)
    calls = [node for graph in graphs for node in graph.graph.find_nodes(op="call_function", target=F.interpolate)]
    found = [node for node in calls if _has_fixed_windows(node, planned_for)]
    for node in found:
        node.target = interpolated
    if found:
        nest.recompile()
    return PassReport(len(found))


def _has_fixed_windows(node: Node, planned_for: str | None) -> bool:
    given = {name: argument(node, place, name) for place, name in enumerate(NAMES)}
    source = given["input"]
    value = source.meta.get("example_value") if isinstance(source, Node) else None
    result = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not isinstance(result, torch.Tensor) or not value.requires_grad:
        return False
    if given["mode"] not in DIMENSIONS or given["antialias"] or compat.tensors.is_wrapper(value):
        return False
    if traits_of(planned_for or value.device.type).ordered_stores:
        return False
    sizes = (*value.shape, *result.shape)
    return value.is_floating_point() and all(isinstance(size, int) and size > 0 for size in sizes)


def interpolated(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "bilinear",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    """Return `interpolate` of the same arguments, for a linear mode: input (n, c, *sizes), result (n, c, *new sizes).

    The result has the input's dtype. The gradient is summed in at least float32 and rounded once.
    """
    del antialias  # calls with it are left unchanged
    return _Interpolated.apply(input, size, scale_factor, mode, align_corners, recompute_scale_factor)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


class _Interpolated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, size: Any, factor: Any, mode: str, align: bool | None, recompute: bool | None
    ) -> torch.Tensor:
        found = F.interpolate(x, size, factor, mode, align, recompute)
        count = DIMENSIONS[mode]
        ctx.sizes, ctx.dtype = x.shape[-count:], x.dtype
        ctx.steps = steps(ctx.sizes, found.shape[-count:], None if recompute else factor, align_corners=bool(align))
        ctx.align_corners = bool(align)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        found = gradient
        for place, (size, step) in enumerate(zip(ctx.sizes, ctx.steps, strict=True)):
            found = gathered(found, place - len(ctx.sizes), size, step, align_corners=ctx.align_corners)
        return found.to(ctx.dtype), None, None, None, None, None


def steps(before: Sequence[int], after: Sequence[int], factor: Any, *, align_corners: bool) -> list[float]:
    """Return the distance of neighbouring results in the input, for each dimension, as ATen computes it.

    `factor`: the scale factor that the user gave, if ATen uses it; a number, or one for each dimension.
    """
    factors = factor if isinstance(factor, (tuple, list)) else [factor] * len(before)
    found = []
    for old, new, given in zip(before, after, factors, strict=True):
        if align_corners:
            found.append((old - 1) / (new - 1) if new > 1 else 0.0)
        else:
            found.append(1 / given if given else old / new)
    return found


def gathered(gradient: torch.Tensor, dim: int, size: int, step: float, *, align_corners: bool) -> torch.Tensor:
    """Return the gradient along `dim` of an input with `size` elements, from that of the results, in at least float32.

    Element i is read by result o with weight max(0, 1 - |s(o) - i|), where s(o) is the source of o, within the input.
    s(o) is o * step with aligned corners, otherwise (o + 0.5) * step - 0.5. So readers are between the results whose
    sources are i - 1 and i + 1, of which there are less than 2 / step.
    """
    results, device = gradient.shape[dim], gradient.device
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    shift = 0.0 if align_corners else 0.5
    count = min(results, math.ceil(2 / step - 1e-9)) if step else results
    each = torch.arange(size, device=device).to(dtype).unsqueeze(1)
    numbers = torch.arange(count, device=device).expand(size, count)
    if count < results:
        numbers = numbers + (((each - 1 + shift) / step - shift).floor() + 1).to(torch.int64)
    sources = ((numbers.to(dtype) + shift) * step - shift).clamp(0, size - 1)
    weights = (1 - (sources - each).abs()).clamp(min=0)
    weights = torch.where((numbers >= 0) & (numbers < results), weights, 0)
    behind = -1 - dim
    places = [None] * (gradient.dim() + dim) + [numbers.clamp(0, results - 1)]
    read: torch.Tensor = aten._unsafe_index.Tensor(gradient, places)  # inside, so nothing is checked
    return (read.to(dtype) * weights.view(*weights.shape, *[1] * behind)).sum(-1 - behind)
