"""Pad matmuls on GPUs with zeros to sizes that are multiples of 16 bytes; the result is a view of a part.

cuBLAS has no fast kernels for 16-bit matrices whose rows are not aligned to 16 bytes at both ends, such as logits of
50257 classes. On an H200, three such matmuls took 31 of a step's 62 ms (docs/lab/constants.md, K18). Operands are
copied into padded memory; the cast of a weight under autocast writes there directly. That costs little compared to a
matmul whose sides are all `MIN_PADDED_SIDE` or longer.

Guarantees: equal values up to the order of sums, and the same inputs and outputs, strides included. The result depends
only on the graph, so it is the same on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import (
    compat,
    matmul_ops,  # noqa: F401  defines the operators
)
from dcompile.capture.passes.joint.inserted_calls import insert_call
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

aten = torch.ops.aten
wide = torch.ops.dcompile_matmul

MATMULS = (aten.mm.default, aten.addmm.default, wide.mm_float32.default, wide.addmm_float32.default)
"""Matmuls whose last two arguments are the operands. One before them is added."""
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
    if node.op != "call_function" or node.target not in MATMULS or node.kwargs:
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
        """Return a vector with zeros behind it, or all of a sum so far, whose padding is zeros plus zeros."""
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
