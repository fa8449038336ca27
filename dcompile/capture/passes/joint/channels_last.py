"""Use the channels-last layout for convolutions, and for values between them.

oneDNN's convolutions are 1.1 to 1.5 times as fast channels-last (docs/lab/constants.md, K17). So are cuDNN's in 16
bits, which otherwise convert images and filters before and after each convolution.

Traced values have strides, and lowering follows them, so the pass changes only strides. A convolution gets its input
channels-last, and each value computed from a changed one gets the strides that eager would give it. Inputs and results
of the graph keep their strides. At the graph boundary a copy is inserted, which lowering fuses with its producer.

Guarantees: the same values, inputs and outputs, strides included. The result depends only on the graph, so it is the
same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dcompile import compat
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
VIEWS = {aten.view.default, aten._unsafe_view.default}
"""Views that get a copy as input if its new strides do not allow the view."""
_ORIGIN = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr")
"""Metadata of a node's origin, which its copies share."""
GATHERS = {aten.index.Tensor, aten._unsafe_index.Tensor}
"""Operations that gather whole pixels of an image by position, as torch upsamples images."""
BOUND = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
"""Operations that would select other elements if strides changed."""


def use_channels_last(gm: GraphModule) -> PassReport:
    """Change strides and insert copies in `gm`, in place."""
    if not any(_images(node) for node in gm.graph.nodes):
        return PassReport()
    mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
    if mode is None:
        return PassReport()
    plan = _Plan(mode)
    for node in gm.graph.nodes:
        plan.visit(node)
    for node, value in plan.values.items():
        node.meta["val"] = value
    made: dict[tuple[Node, tuple[int, ...]], Node] = {}
    for copy in plan.copies:
        key = (copy.source, copy.value.stride())
        if key not in made:
            made[key] = _insert(copy, mode)
        copy.user.replace_input_with(copy.source, made[key])
    gm.recompile()
    return PassReport(len(plan.values))


@dataclass(frozen=True)
class _Copy:
    """A copy of `source`, with the strides of `value`, for `user` to read."""

    source: Node
    user: Node
    value: torch.Tensor


@dataclass
class _Plan:
    """The new strides of each value, decided before the graph is changed."""

    mode: Any
    values: dict[Node, Any] = field(default_factory=dict)
    copies: list[_Copy] = field(default_factory=list)

    def visit(self, node: Node) -> None:
        """Decide on one node, after all nodes that it reads."""
        if node.op == "output" or not self._follows(node):
            for source in node.all_input_nodes:
                if source in self.values:
                    self._as_before(source, node)
            return
        images = _images(node)
        if not images and not any(source in self.values for source in node.all_input_nodes):
            return
        given = {source: self._value(source) for source in node.all_input_nodes}
        for source in images:
            given[source] = self._channels_last(source, node)
        if node.target in VIEWS and not self._allows(given, node):
            given = {source: self._contiguous(source, node) for source in given}
        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: given[source])
        with self.mode:
            value = target(*args, **kwargs)
            if target in GATHERS:
                value = value.clone(memory_format=torch.channels_last)
        if _strides(value) != _strides(node.meta.get("val")):
            self.values[node] = value

    def _follows(self, node: Node) -> bool:
        """Does a node compute the same values from inputs of other strides, with correct strides of its result?"""
        if node.op != "call_function":
            return False
        target: Any = node.target
        if getattr(target, "__name__", "") == "getitem" and not hasattr(target, "_schema"):
            return True
        if getattr(target, "namespace", "") not in ("aten", "prims") or not hasattr(target, "_schema"):
            return False
        if target._schema.is_mutable or target in BOUND:
            return False
        if target in IMAGES and _has_to_stay(node):
            return False
        if target in GATHERS:
            return self._reads_pixels(node)
        # Operations on several tensors may assume equal strides unchecked, as ATen's gradients of norms do.
        general = {torch.Tag.core, torch.Tag.pointwise} & {*target.tags} or target in {*IMAGES, *VIEWS}
        return len(node.all_input_nodes) == 1 or (bool(general) and "norm" not in str(target))

    def _reads_pixels(self, gather: Node) -> bool:
        """Does a gather read whole pixels of a channels-last image, at positions of unchanged strides?"""
        image, places, value = gather.args[0], gather.args[1], gather.meta.get("val")
        inside: Any = self._value(image) if isinstance(image, Node) else None
        if not (
            isinstance(inside, torch.Tensor) and isinstance(value, torch.Tensor) and isinstance(places, (list, tuple))
        ):
            return False
        whole = len(places) == inside.dim() == value.dim() == 4 and places[0] is None and places[1] is None
        moved = any(place in self.values for place in places if place is not None)
        return whole and not moved and inside.is_contiguous(memory_format=torch.channels_last)

    def _value(self, node: Node) -> Any:
        return self.values.get(node, node.meta.get("val"))

    def _channels_last(self, source: Node, user: Node) -> torch.Tensor:
        value: torch.Tensor = self._value(source)
        if value.is_contiguous(memory_format=torch.channels_last):
            return value
        with self.mode:
            copied = value.clone(memory_format=torch.channels_last)
        self.copies.append(_Copy(source, user, copied))
        return copied

    def _allows(self, given: dict[Node, Any], view: Node) -> bool:
        """Do the strides of the input allow a view?"""
        (value,), target = given.values(), view.target
        try:
            with self.mode:
                target(value, *view.args[1:])  # type: ignore[operator]
        except (RuntimeError, ValueError):
            return False
        return True

    def _contiguous(self, source: Node, user: Node) -> torch.Tensor:
        with self.mode:
            copied: torch.Tensor = self._value(source).clone(memory_format=torch.contiguous_format)
        self.copies.append(_Copy(source, user, copied))
        return copied

    def _as_before(self, source: Node, user: Node) -> None:
        """Let `user` read a value with its original strides."""
        old = source.meta["val"]
        if not isinstance(old, torch.Tensor):
            return  # a tuple: each of its tensors is read through getitem
        self.copies.append(_Copy(source, user, old))


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


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride()
    return [_strides(item) for item in value] if isinstance(value, (tuple, list)) else None


def _insert(copy: _Copy, mode: Any) -> Node:
    """Insert a copy just before its first user.

    A dense layout is an order of dimensions, so the copy is contiguous in that order.
    """
    graph, wanted = copy.user.graph, copy.value
    strides, shape = wanted.stride(), wanted.shape
    order = sorted(range(wanted.dim()), key=lambda dim: (-strides[dim], -shape[dim], dim))
    back = [order.index(dim) for dim in range(wanted.dim())]
    node, value = copy.source, copy.source.meta["val"]
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, (back,), {}),
    )
    with graph.inserting_before(copy.user), mode:
        for target, args, kwargs in steps:
            node, value = graph.call_function(target, (node, *args), kwargs), target(value, *args, **kwargs)
            node.meta = {name: kept for name, kept in copy.source.meta.items() if name in _ORIGIN}
            node.meta["val"] = value
    node.meta["val"] = wanted  # the same except for strides of dimensions of size 1
    return node
