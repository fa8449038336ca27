"""Pad groups of channels-last convolutions on GPUs with zeros to widths that cuDNN has kernels for.

For other widths cuDNN copies images, filters and results into padded memory itself, with a slow kernel: 19 of 41 ms in
a step of RegNetY-032, whose groups have 24 channels. Here the producer writes padded images, and readers of a result
skip its padding.

Guarantees: equal values up to the order of sums, and the same inputs and outputs, strides included. The result depends
only on the graph, so it is the same on every rank.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.inserted_calls import insert_call
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

aten = torch.ops.aten

FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default
OPERANDS = {FORWARD: ("in", "filters"), BACKWARD: ("out", "in", "filters")}
"""Operation -> what its first arguments are: images of the channels that it reads or writes, and filters."""
TRANSPOSED, GROUPS = -3, -1
"""Positions of the flag for transposed convolutions and of the number of groups, among a convolution's arguments."""
MIN_WIDTH, MAX_WIDTH = 4, 128
"""Powers of two for which cuDNN has kernels. Depthwise convolutions have their own, and wider groups are left alone.

Forward and backward of 384 channels of 28 x 28, batch 64, take 0.24 ms with 24 channels padded to 32. Unpadded they
take 1.45 ms channels-last and 0.66 ms row-major (H200, docs/lab/constants.md, K20)."""


def pad_groups(gm: GraphModule) -> PassReport:
    """Pad the groups of convolutions in `gm` that become faster, in place.

    Relies on: images and filters that are channels-last by now stay so.
    """
    found = [node for node in gm.graph.nodes if _is_padded(node)]
    mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes]) if found else None
    if mode is None:
        return PassReport()
    padding = _GroupPadding(gm.graph, mode)
    for node in found:
        padding.rewrite(node)
    gm.recompile()
    return PassReport(len(found))


def padded_width(width: int) -> int:
    """Return the channels of a padded group."""
    if width in (0, 1) or width >= MAX_WIDTH:
        return width
    return max(1 << (width - 1).bit_length(), MIN_WIDTH)


def _is_padded(node: Node) -> bool:
    """Is a node a convolution in groups of a width that has no kernels?"""
    target: Any = node.target
    if node.op != "call_function" or target not in OPERANDS or node.kwargs:
        return False
    args = node.args if target is FORWARD else node.args[:-1]
    if args[TRANSPOSED] or args[GROUPS] == 1:
        return False
    operands = node.args[: len(OPERANDS[target])]
    values = [operand.meta["val"] for operand in operands if isinstance(operand, Node) and "val" in operand.meta]
    if len(values) < len(operands) or not all(map(_may_grow, values)):
        return False
    if node.args[len(operands)] is not None if target is FORWARD else node.args[-1][2]:  # type: ignore[index]
        return False  # with a bias, which decompositions compute separately where groups are padded
    widths = _widths(values[-1], args[GROUPS])
    return 1 not in widths.values() and widths != _padded_widths(values[-1], args[GROUPS])


def _may_grow(value: Any) -> bool:
    """Is a value of fixed size, channels-last, and of a dtype that is, on a GPU whose library pads groups slowly?"""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 4
        and traits_of(value.device.type).aten.pads_groups
        and value.dtype.itemsize == 2
        and compat.sizes.is_fixed(value)
        and value.is_contiguous(memory_format=torch.channels_last)
    )


def _widths(filters: torch.Tensor, groups: Any) -> dict[str, int]:
    """Return the channels of a group that a convolution reads, and those that it writes."""
    return {"in": int(filters.shape[1]), "out": int(filters.shape[0]) // groups}


def _padded_widths(filters: torch.Tensor, groups: Any) -> dict[str, int]:
    return {side: padded_width(width) for side, width in _widths(filters, groups).items()}


class _GroupPadding:
    """Inserts padded operands; an image that several convolutions read is padded once."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.grown: dict[tuple[Node, int, tuple[int, ...]], Node] = {}

    def rewrite(self, node: Node) -> None:
        """Replace a convolution, or its gradient, by one of padded groups and parts of its results."""
        target: Any = node.target
        kinds = OPERANDS[target]
        rest = list(node.args[len(kinds) :])
        groups: Any = rest[GROUPS if target is FORWARD else GROUPS - 1]
        filters: Any = node.args[len(kinds) - 1]
        before, after = (of(filters.meta["val"], groups) for of in (_widths, _padded_widths))
        operands = []
        for source, kind in zip(node.args, kinds, strict=False):
            assert isinstance(source, Node)
            operands.append(self._grow(source, kind, groups, before, after, node))
        made = self._call(target, (*operands, *rest), node, node)
        if target is FORWARD:
            node.replace_all_uses_with(self._part(made, "out", groups, before, after, node, node))
        else:
            self._gradients(node, made, groups, before, after)
        self.graph.erase_node(node)

    def _gradients(self, node: Node, made: Node, groups: int, before: dict[str, int], after: dict[str, int]) -> None:
        """Let users of a gradient's results use parts of the padded ones."""
        for user in [*node.users]:
            assert user.target is operator.getitem, "a convolution's gradients are a tuple"
            number: Any = user.args[1]
            found = self._call(operator.getitem, (made, number), user, user)
            if found.meta["val"] is not None:  # a gradient that is wanted
                found = self._part(found, ("in", "filters")[number], groups, before, after, user, user)
            user.replace_all_uses_with(found)
            self.graph.erase_node(user)

    def _grow(
        self, source: Node, kind: str, groups: int, before: dict[str, int], after: dict[str, int], user: Node
    ) -> Node:
        """Pad the groups of an operand, channels-last."""
        shape, key_sizes = self._split(source, kind, groups, before), tuple(after.values())
        wanted = self._split(source, kind, groups, after)
        if shape == wanted:
            return source
        key = (source, groups, key_sizes)
        if key not in self.grown:
            amounts = [n for a, b in zip(reversed(shape), reversed(wanted), strict=True) for n in (0, b - a)]
            made = self._call(aten.permute.default, (source, [0, 2, 3, 1]), source, user)
            made = self._call(aten.view.default, (made, shape), source, user)
            made = self._call(aten.constant_pad_nd.default, (made, amounts, 0.0), source, user)
            self.grown[key] = self._joined(made, kind, source, user)
        return self.grown[key]

    def _part(
        self, source: Node, kind: str, groups: int, before: dict[str, int], after: dict[str, int], origin: Node,
        user: Node,
    ) -> Node:  # fmt: skip
        """Take the part of a result that is no padding."""
        shape, wanted = (self._split(source, kind, groups, widths) for widths in (after, before))
        if shape == wanted:
            return source
        made = self._call(aten.permute.default, (source, [0, 2, 3, 1]), origin, user)
        made = self._call(aten.view.default, (made, shape), origin, user)
        for dim, (size, part) in enumerate(zip(shape, wanted, strict=True)):
            if size != part:
                made = self._call(aten.slice.Tensor, (made, dim, 0, part), origin, user)
        made = self._call(aten.clone.default, (made,), origin, user, memory_format=torch.contiguous_format)
        return self._joined(made, kind, origin, user)

    def _split(self, source: Node, kind: str, groups: int, widths: dict[str, int]) -> list[int]:
        """Return a channels-last shape with groups of these widths as dimensions of their own."""
        first, _, *space = source.meta["val"].shape
        if kind == "filters":
            return [groups, widths["out"], *space, widths["in"]]
        return [first, *space, groups, widths[kind]]

    def _joined(self, split: Node, kind: str, origin: Node, user: Node) -> Node:
        """Join the dimensions of groups again, as channels of a channels-last tensor."""
        sizes = split.meta["val"].shape
        joined = [sizes[0] * sizes[1], *sizes[2:]] if kind == "filters" else [*sizes[:3], sizes[3] * sizes[4]]
        made = self._call(aten.view.default, (split, joined), origin, user)
        return self._call(aten.permute.default, (made, [0, 3, 1, 2]), origin, user)

    def _call(self, target: Any, args: tuple[Any, ...], origin: Node, user: Node, **kwargs: Any) -> Node:
        """Insert a call before `user`, which is of one part of the model with `origin`."""
        return insert_call(self.graph, self.mode, target, args, origin, before=user, kwargs=kwargs)
