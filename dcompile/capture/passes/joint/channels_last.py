"""Use the channels-last layout for convolutions, and for values between them.

oneDNN's convolutions are 1.1 to 1.5 times as fast channels-last (docs/lab/constants.md, K17). So are cuDNN's in 16
bits, which otherwise convert images and filters before and after each convolution.

A convolution gets its input channels-last, and each value computed from a changed one gets the strides that eager would
give it (layout_plan.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.layout_plan import LayoutPlan, Layouts, Wanted, change_layouts
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

aten = torch.ops.aten

IMAGES = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
"""Operation -> positions of its arguments that are images or their gradients."""
FILTERS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Operation -> position of its filters. cuDNN needs them channels-last, too; oneDNN has its own layouts for them."""
TRANSPOSED = {aten.convolution.default: 6, aten.convolution_backward.default: 7}
"""Operation -> position of the flag for transposed convolutions, which do not change."""
STRIDES = {aten.convolution.default: 3, aten.convolution_backward.default: 4}
"""Operation -> position of the convolution's strides."""
MIN_STRIDED_CHANNELS = 8
"""Minimum number of channels of channels-last 1 x 1 filters with strides above 1.

Below it, oneDNN's gradient writes out of bounds (torch 2.13, AVX2, 3 to 5 channels)."""
GATHERS = {aten.index.Tensor, aten._unsafe_index.Tensor}
"""Operations that gather whole pixels of an image by position, as torch upsamples images."""


def use_channels_last(gm: GraphModule) -> PassReport:
    """Change strides and insert copies in `gm`, in place."""
    if not any(_images(node) for node in gm.graph.nodes):
        return PassReport()
    return change_layouts(gm, _LAYOUTS)


def _images(node: Node) -> list[Node]:
    """Return the images and filters that a convolution reads, if it is faster channels-last; else nothing."""
    target: Any = node.target
    if node.op != "call_function" or target not in IMAGES or node.args[TRANSPOSED[target]]:
        return []
    found = [node.args[position] for position in (*IMAGES[target], FILTERS[target])]
    images = [argument for argument in found if isinstance(argument, Node)]
    values = [argument.meta["val"] for argument in images if "val" in argument.meta]
    fit = bool(values) and all(isinstance(v, torch.Tensor) and v.dim() == 4 and _may_change(v) for v in values)
    if not fit:
        return []
    return images[:-1] if traits_of(values[0].device.type).aten.converts_filters else images


def _has_to_stay(node: Node) -> bool:
    """Is a node a convolution that the CPU's library computes incorrectly channels-last?"""
    target: Any = node.target
    weight: Any = node.args[FILTERS[target]]
    filters, steps = weight.meta.get("val"), node.args[STRIDES[target]]
    if not isinstance(filters, torch.Tensor) or filters.dim() != 4:
        return False
    if not traits_of(filters.device.type).aten.miscomputes_strided_pixels:
        return False
    single = all(isinstance(size, int) and size == 1 for size in filters.shape[2:])
    return single and max(steps) > 1 and filters.shape[1] < MIN_STRIDED_CHANNELS  # type: ignore[arg-type]


def _may_change(value: torch.Tensor) -> bool:
    """Is a value of fixed size, and of a dtype with faster channels-last convolutions on its device?"""
    fixed = compat.sizes.is_fixed(value)
    return fixed and str(value.dtype).removeprefix("torch.") in traits_of(value.device.type).aten.image_dtypes


def _wanted(node: Node, plan: LayoutPlan) -> Wanted:
    """Return the images and filters that a convolution is to read channels-last."""
    del plan
    return dict.fromkeys(_images(node), torch.channels_last)


def _follows(node: Node, plan: LayoutPlan) -> bool | None:
    if node.target in IMAGES:
        return not _has_to_stay(node)
    return _reads_pixels(node, plan) if node.target in GATHERS else None


def _reads_pixels(gather: Node, plan: LayoutPlan) -> bool:
    """Does a gather read whole pixels of a channels-last image, at positions of unchanged strides?"""
    image, places, value = gather.args[0], gather.args[1], gather.meta.get("val")
    inside: Any = plan.value(image) if isinstance(image, Node) else None
    if not (isinstance(inside, torch.Tensor) and isinstance(value, torch.Tensor) and isinstance(places, (list, tuple))):
        return False
    whole = len(places) == inside.dim() == value.dim() == 4 and places[0] is None and places[1] is None
    moved = any(place in plan.values for place in places if place is not None)
    return whole and not moved and inside.is_contiguous(memory_format=torch.channels_last)


_LAYOUTS = Layouts(_wanted, _follows, results=dict.fromkeys(GATHERS, torch.channels_last), joins=(aten.cat.default,))
