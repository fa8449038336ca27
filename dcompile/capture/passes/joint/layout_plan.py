"""Change the layout of values inside a joint graph: strides follow from those that some nodes want to read.

Traced values have strides, and lowering follows them, so only strides change. A node that wants another layout reads a
copy, and each value computed from a changed one gets the strides that eager would give it. Inputs and results of the
graph keep their strides. At the graph boundary a copy is inserted, which lowering fuses with its producer.

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


def _insert(copy: _Copy, mode: Any) -> Node:
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
