"""Pad operands of matmuls and grouped convolutions on GPUs with zeros to sizes that libraries have fast kernels for.

cuBLAS has no fast kernels for 16-bit matrices whose rows are not aligned to 16 bytes at both ends, such as logits of
50257 classes. On an H200, three such matmuls took 31 of a step's 62 ms (docs/lab/constants.md, K18). Operands are
copied into padded memory; the cast of a weight under autocast writes there directly, and the result is a view of a
part. That costs little compared to a matmul whose sides are all `MIN_PADDED_SIDE` or longer.

For some widths of groups cuDNN copies images, filters and results of channels-last convolutions into padded memory
itself, with a slow kernel: 19 of 41 ms in a step of RegNetY-032, whose groups have 24 channels. Here the producer
writes padded images, and readers of a result skip its padding.

Guarantees: equal values up to the order of sums, and the same inputs and outputs, strides included. The result depends
only on the graph, so it is the same on every rank.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.inserted_calls import insert_call
from dcompile.device_traits import traits_of
from dcompile.ir.gemm import MATMUL_OPS
from dcompile.operators import matmul_ops  # noqa: F401  defines the operators
from dcompile.passes import PassReport

aten = torch.ops.aten

DTYPES = (torch.bfloat16, torch.float16)
PAD_MULTIPLE = 8
"""16-bit elements in 16 bytes."""
MIN_PADDED_SIDE = 512
"""Minimum side of a padded matmul: unpadded it takes at least twice as long, and copies of operands take far less."""
VIEWS = (aten.t.default, aten.view.default, aten._unsafe_view.default)
_Sizes: TypeAlias = tuple[int, int, int]


def pad_matmuls(gm: GraphModule) -> PassReport:
    """Pad the matmuls of `gm` that become faster, in place."""
    found: dict[Node, _Sizes] = {}
    for node in gm.graph.nodes:
        if (sizes := _padded_sizes(node, found)) is not None:
            found[node] = sizes
    mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes]) if found else None
    if mode is None:
        return PassReport()
    padding = _Padding(gm.graph, mode)
    for node, sizes in found.items():
        padding.rewrite(node, *sizes)
    gm.recompile()
    return PassReport(len(found))


def _padded_sizes(node: Node, earlier: Mapping[Node, _Sizes]) -> _Sizes | None:
    """Return the padded (rows, depth, columns) of a matmul; None if it stays as it is.

    `earlier`: those of the matmuls before it that are padded.
    """
    op = MATMUL_OPS.get(str(node.target))
    if op is None or op.batched or node.kwargs:
        return None
    *added, first, second = node.args
    values = [operand.meta["val"] for operand in (first, second) if isinstance(operand, Node) and "val" in operand.meta]
    if len(values) < 2 or not all(map(_may_grow, values)):
        return None
    (m, k), n = values[0].shape, values[1].shape[1]
    if min(m, k, n) < MIN_PADDED_SIDE:
        return None
    along_k = _lies_along(values[0], 1) or _lies_along(values[1], 0)
    rows = _whole(m) if _lies_along(values[0], 0) else m
    sizes = rows, _whole(k) if along_k else k, _whole(n)
    if sizes == (m, k, n) or not all(_grows_along(one, sizes, earlier) for one in added):
        return None
    return sizes


def _grows_along(added: Any, sizes: _Sizes, earlier: Mapping[Node, _Sizes]) -> bool:
    """Is what a matmul adds a vector, or the sum of matmuls that are padded alike? Copying a matrix costs too much."""
    rows, _, columns = sizes
    value = added.meta.get("val") if isinstance(added, Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    return value.dim() == 1 or tuple(value.shape) == (rows, columns) or earlier.get(added, ())[::2] == (rows, columns)


def _may_grow(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and traits_of(value.device.type).aten.wants_aligned_matmul
        and value.dtype in DTYPES
        and compat.sizes.is_fixed(value)
    )


def _lies_along(value: torch.Tensor, dim: int) -> bool:
    """Are elements along `dim` adjacent in memory?"""
    return value.stride(dim) == 1


def _whole(size: int) -> int:
    return -(-size // PAD_MULTIPLE) * PAD_MULTIPLE


class _Padding:
    """Inserts padded operands; a matrix that several matmuls read is padded once."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.grown: dict[tuple[Node, int, int], Node] = {}
        self.whole: dict[Node, Node] = {}
        """Slice of a padded result -> all of it."""

    def rewrite(self, node: Node, rows: int, depth: int, columns: int) -> None:
        """Replace a matmul by one of padded operands, and a slice of its result."""
        target: Any = node.target
        *added, first, second = node.args
        assert isinstance(first, Node) and isinstance(second, Node)
        m, n = node.meta["val"].shape
        operands = [self._grow_added(one, rows, columns, node) for one in added]
        operands += [self._grow(first, rows, depth, node), self._grow(second, depth, columns, node)]
        made = all_of_it = self._call(target, tuple(operands), node, before=node)
        for dim, (size, wanted) in enumerate(((rows, m), (columns, n))):
            if size != wanted:
                made = self._call(aten.slice.Tensor, (made, dim, 0, wanted), node, before=node)
        self.whole[made] = all_of_it
        node.replace_all_uses_with(made)
        self._follow(made, node.meta["val"])
        self.graph.erase_node(node)

    def _follow(self, node: Node, before: torch.Tensor) -> None:
        """Update the strides of views of a sliced result; results of the graph keep the strides of `before`."""
        if node.meta["val"].stride() == before.stride():
            return
        for user in [*node.users]:
            target: Any = user.target
            if user.op == "output":
                copy = self._call(aten.clone.default, (node,), node, before=user)
                copy.meta["val"] = before
                user.replace_input_with(node, copy)
            elif target in VIEWS:
                old = user.meta["val"]
                with self.mode, contextlib.suppress(RuntimeError):  # otherwise lowering copies, for the traced strides
                    user.meta["val"] = target(node.meta["val"], *user.args[1:])
                self._follow(user, old)

    def _grow_added(self, added: Any, rows: int, columns: int, product: Node) -> Node:
        """Return a vector with zeros after it, or all of a sum so far, whose padding is zeros plus zeros."""
        assert isinstance(added, Node)
        value = added.meta["val"]
        if value.dim() == 1:
            return self._zeros_behind(added, [0, columns - len(value)], product) if columns != len(value) else added
        return added if tuple(value.shape) == (rows, columns) else self.whole[added]

    def _grow(self, matrix: Node, rows: int, columns: int, product: Node) -> Node:
        m, n = matrix.meta["val"].shape
        if (m, n) == (rows, columns):
            return matrix
        if matrix.target is aten.t.default:
            turned = matrix.args[0]
            assert isinstance(turned, Node)
            return self._call(aten.t.default, (self._grow(turned, columns, rows, product),), matrix, before=product)
        key = (matrix, rows, columns)
        if key not in self.grown:
            self.grown[key] = self._zeros_behind(matrix, [0, columns - n, 0, rows - m], product)
        return self.grown[key]

    def _zeros_behind(self, source: Node, amounts: list[int], product: Node) -> Node:
        where = {"after": source} if source.op == "call_function" else {"before": product}
        return self._call(aten.constant_pad_nd.default, (source, amounts, 0.0), source, **where)

    def _call(
        self, target: Any, args: tuple[Any, ...], origin: Node, *, before: Node | None = None, after: Node | None = None
    ) -> Node:
        return insert_call(self.graph, self.mode, target, args, origin, before=before, after=after)


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
    if len(values) < len(operands) or not all(map(_group_may_grow, values)):
        return False
    if node.args[len(operands)] is not None if target is FORWARD else node.args[-1][2]:  # type: ignore[index]
        return False  # with a bias, which decompositions compute separately where groups are padded
    widths = _widths(values[-1], args[GROUPS])
    return 1 not in widths.values() and widths != _padded_widths(values[-1], args[GROUPS])


def _group_may_grow(value: Any) -> bool:
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
