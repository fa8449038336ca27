"""Change the layout of values inside a joint graph: channels-last for convolutions, contiguous rows for norms.

Traced values have strides, and lowering follows them, so only strides change. A node that wants another layout reads a
copy, and each value computed from a changed one gets the strides that eager would give it. Inputs and results of the
graph keep their strides. At the graph boundary a copy is inserted, which lowering fuses with its producer.

oneDNN's convolutions are 1.1 to 1.5 times as fast channels-last (docs/lab/constants.md, K17). So are cuDNN's in 16
bits, which otherwise convert images and filters before and after each convolution.

Rows stay contiguous between normalizations, where a permuted tensor would spread its layout. Eager gives the sum of a
permuted and a contiguous tensor the strides of the first. In Whisper, the first tensor is the result of a convolution
over time: with its strides, the features of one position are 1500 elements apart in all layers. Norms along features,
and matmuls, then read columns. The permuted tensor is copied where it enters, which lowering fuses with its reader.

Guarantees: the same values, inputs and outputs, strides included. The result depends only on the graph, so it is the
same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dcompile import compat
from dcompile.capture.passes.joint.inserted_calls import ORIGIN, insert_call
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

aten = torch.ops.aten

Wanted: TypeAlias = "Mapping[Node, torch.memory_format]"
"""Values that a node is to read in another layout."""
VIEWS = {aten.view.default, aten._unsafe_view.default}
"""Views that get a copy as input if its new strides do not allow the view."""
NORMS = {aten.native_layer_norm.default, aten.native_layer_norm_backward.default}
"""Operations whose inputs of the result's shape must have equal strides: ATen does not check that."""
REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default}
"""Reductions whose results get the order of dimensions of their input, where ATen would make them row-major."""
BOUND = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
"""Operations that would select other elements if strides changed."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """What a pass decides: `wanted(node, plan)`, the values that a node is to read in another layout.

    `follows(node, plan)`: does a node compute the same from inputs of other strides? None: as others of its kind.
    `results`: operation -> layout of its result, where fake tensors have another one.
    """

    wanted: Callable[[Node, LayoutPlan], Wanted]
    follows: Callable[[Node, LayoutPlan], bool | None] = lambda node, plan: None
    results: Mapping[Any, torch.memory_format] = field(default_factory=dict)
    joins: Collection[Any] = ()
    """Operations on several tensors whose result gets the order of dimensions that most of its elements have."""


def change_layouts(gm: GraphModule, layouts: Layouts) -> PassReport:
    """Change strides and insert copies in `gm`, in place."""
    mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
    if mode is None:
        return PassReport()
    plan = LayoutPlan(mode, layouts)
    for node in gm.graph.nodes:
        plan.visit(node)
    if not plan.values and not plan.copies:
        return PassReport()
    for node, value in plan.values.items():
        node.meta["val"] = value
    made: dict[tuple[Node, tuple[int, ...]], Node] = {}
    for copy in plan.copies:
        key = (copy.source, copy.value.stride())
        if key not in made:
            made[key] = _insert_copy(copy, mode)
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
class LayoutPlan:
    """The new strides of each value, decided before the graph is changed."""

    mode: Any
    layouts: Layouts
    values: dict[Node, Any] = field(default_factory=dict)
    copies: list[_Copy] = field(default_factory=list)

    def visit(self, node: Node) -> None:
        """Decide on one node, after all nodes that it reads."""
        if node.op == "output" or not self._follows(node):
            for source in node.all_input_nodes:
                if source in self.values:
                    self._as_before(source, node)
            return
        wanted = self.layouts.wanted(node, self)
        joins = node.target in self.layouts.joins
        if not wanted and not joins and not any(source in self.values for source in node.all_input_nodes):
            return
        if node.target in VIEWS and not self._allows(node):
            wanted = dict.fromkeys(node.all_input_nodes[:1], torch.contiguous_format)
        given = {source: self.value(source) for source in node.all_input_nodes}
        given |= {source: self._copied(source, node, layout) for source, layout in wanted.items()}
        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: given[source])
        with self.mode:
            value = target(*args, **kwargs)
            if target in self.layouts.results:
                value = value.clone(memory_format=self.layouts.results[target])
            elif target in REDUCTIONS:
                value = _in_input_order(value, *args[:2])
            elif joins:
                value = self._in_order_of_most(node, value)
            elif torch.Tag.pointwise in getattr(target, "tags", ()):
                value = self._in_changed_order(node, value)
        if _strides(value) != _strides(node.meta.get("val")):
            self.values[node] = value

    def _in_changed_order(self, node: Node, value: Any) -> Any:
        """Give a result the strides of the first operand of its size that was changed.

        Eager's strides would be those of the first operand. The gradient of a mean, a row-major image, would then make
        a whole chain of gradients row-major, and each convolution would get a copy.
        """
        changed = (self.values[source] for source in node.all_input_nodes if source in self.values)
        same = (found for found in changed if isinstance(found, torch.Tensor) and isinstance(value, torch.Tensor))
        found = next((found for found in same if found.shape == value.shape and compat.sizes.is_dense(found)), None)
        if found is None or found.stride() == value.stride():
            return value
        return torch.empty_strided(value.shape, found.stride(), dtype=value.dtype, device=value.device)

    def _in_order_of_most(self, node: Node, value: torch.Tensor) -> torch.Tensor:
        """Give a concatenation the order of dimensions that most of its elements have already.

        Eager's is row-major unless all inputs agree. One channel that was summed would then make all others row-major.
        """
        elements: dict[tuple[int, ...], int] = {}
        for source in map(self.value, node.all_input_nodes):
            if source.dim() == value.dim() and compat.sizes.is_dense(source) and compat.sizes.is_fixed(source):
                order = _order(source)
                elements[order] = elements.get(order, 0) + source.numel()
        most = max(elements, key=lambda order: elements[order], default=())
        if not most or 2 * elements[most] <= value.numel() or most == _order(value):
            return value
        return _dense(value, most)

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
        decided = self.layouts.follows(node, self)
        if decided is not None:
            return decided
        if target in NORMS:
            return self._has_equal_strides(node)
        # Operations on several tensors may assume equal strides unchecked, as ATen's gradients of norms do.
        general = {torch.Tag.core, torch.Tag.pointwise} & {*target.tags} or target in VIEWS
        return len(node.all_input_nodes) == 1 or (bool(general) and "norm" not in str(target))

    def value(self, node: Node) -> Any:
        """Return a node's fake value with its new strides."""
        return self.values.get(node, node.meta.get("val"))

    def _copied(self, source: Node, user: Node, layout: torch.memory_format) -> torch.Tensor:
        value: torch.Tensor = self.value(source)
        if value.is_contiguous(memory_format=layout):
            return value
        with self.mode:
            copied = value.clone(memory_format=layout)
        self.copies.append(_Copy(source, user, copied))
        return copied

    def _has_equal_strides(self, norm: Node) -> bool:
        """Are the inputs of the largest shape contiguous?"""
        values = [value for value in map(self.value, norm.all_input_nodes) if isinstance(value, torch.Tensor)]
        rank = max(value.dim() for value in values)
        return all(value.is_contiguous() for value in values if value.dim() == rank)

    def _allows(self, view: Node) -> bool:
        """Do the new strides of its input allow a view?"""
        target: Any = view.target
        try:
            with self.mode:
                target(*map_arg(view.args, self.value))
        except (RuntimeError, ValueError):
            return False
        return True

    def _as_before(self, source: Node, user: Node) -> None:
        """Let `user` read a value with its original strides."""
        old = source.meta["val"]
        if not isinstance(old, torch.Tensor):
            return  # a tuple: each of its tensors is read through getitem
        self.copies.append(_Copy(source, user, old))


def _in_input_order(value: torch.Tensor, source: Any, dims: Any = None) -> torch.Tensor:
    """Give the result of a reduction of `source` over `dims` the order of the dimensions that remain."""
    reduced = {dim % source.dim() for dim in dims or range(source.dim())}
    kept = [dim for dim in range(source.dim()) if dim not in reduced]
    if len(kept) != value.dim():
        return value  # reduced dimensions stay, with size 1
    order = sorted(range(len(kept)), key=lambda place: -source.stride(kept[place]))
    return _dense(value, order)


def _dense(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return a dense tensor of the same shape, with its dimensions in this order from the slowest to the fastest."""
    made = torch.empty([value.shape[dim] for dim in order], dtype=value.dtype, device=value.device)
    return made.permute([order.index(dim) for dim in range(value.dim())])


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest."""
    strides, shape = value.stride(), value.shape
    return tuple(sorted(range(value.dim()), key=lambda dim: (-strides[dim], -shape[dim], dim)))


def _strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride()
    return [_strides(item) for item in value] if isinstance(value, (tuple, list)) else None


def _insert_copy(copy: _Copy, mode: Any) -> Node:
    """Insert a copy just before its first user.

    A dense layout is an order of dimensions, so the copy is contiguous in that order.
    """
    wanted, node = copy.value, copy.source
    order = [*_order(wanted)]
    back = [order.index(dim) for dim in range(wanted.dim())]
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
        (aten.permute.default, (order,), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (aten.permute.default, (back,), {}),
    )
    for target, args, kwargs in steps:
        node = insert_call(
            copy.user.graph, mode, target, (node, *args), copy.source, before=copy.user, kwargs=kwargs, shares=ORIGIN
        )
    node.meta["val"] = wanted  # the same except for strides of dimensions of size 1
    return node


# --- channels-last ----------------------------------------------------------------------------------------------------

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


# --- contiguous rows --------------------------------------------------------------------------------------------------

REDUCED_DIMS = {
    aten.mean.dim: 1, aten.sum.dim_IntList: 1, aten.amax.default: 1, aten.var_mean.correction: 1,
    aten._softmax.default: 1,
}  # fmt: skip
"""Reduction -> position of its dimensions."""
MIN_ROW = 32
"""Elements of a row from which its layout matters: a cache line of 16-bit elements and more."""


def keep_rows_contiguous(gm: GraphModule) -> PassReport:
    """Copy permuted operands of elementwise operations whose result is normalized along its last dimension, in place.

    Guarantees: the same values, inputs and outputs, strides included. Values of symbolic sizes keep their layout.
    """
    permuted = [node for node in gm.graph.nodes if _is_permuted(node) and _is_elementwise(node)]
    normalized = set[Node]()
    for node in reversed(permuted):
        if any(_is_along_rows(user) or user in normalized for user in node.users):
            normalized.add(node)
    if not normalized:
        return PassReport()

    def wanted(node: Node, plan: LayoutPlan) -> Wanted:
        return _permuted_operands(node, plan) if node in normalized else {}

    return change_layouts(gm, Layouts(wanted))


def _is_permuted(node: Node) -> bool:
    """Is a node's value a tensor whose memory is an order of dimensions that has another one last?"""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.is_floating_point():
        return False
    return compat.sizes.is_fixed(value) and value.shape[-1] >= MIN_ROW and value.stride(-1) != 1


def _is_elementwise(node: Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not hasattr(target, "tags"):
        return False
    return torch.Tag.pointwise in target.tags or target is aten._to_copy.default


def _is_along_rows(reader: Node) -> bool:
    """Does a node reduce rows along the last dimension alone?"""
    if reader.target is aten.native_layer_norm.default:
        return len(reader.args[1]) == 1  # type: ignore[arg-type]
    if reader.target not in REDUCED_DIMS or len(reader.args) <= REDUCED_DIMS[reader.target]:
        return False
    source, along = reader.args[0], reader.args[REDUCED_DIMS[reader.target]]
    rank = source.meta["val"].dim() if isinstance(source, Node) else 0
    dims = list(along) if isinstance(along, (list, tuple)) else [along]
    return len(dims) == 1 and dims[0] in (-1, rank - 1)


def _permuted_operands(node: Node, plan: LayoutPlan) -> Mapping[Node, torch.memory_format]:
    shape = node.meta["val"].shape
    values = {source: plan.value(source) for source in node.all_input_nodes}
    spread = [
        source
        for source, value in values.items()
        if isinstance(value, torch.Tensor) and value.shape == shape and not value.is_contiguous()
    ]
    return dict.fromkeys(spread, torch.contiguous_format)
