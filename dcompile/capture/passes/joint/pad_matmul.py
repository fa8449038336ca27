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
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.inserted_calls import CHECKPOINTED_ORIGIN, insert_call
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

aten = torch.ops.aten

MATRICES = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
"""Matmul -> positions of its operands among the arguments."""
DTYPES = (torch.bfloat16, torch.float16)
PAD_MULTIPLE = 8
"""16-bit elements in 16 bytes."""
MIN_PADDED_SIDE = 512
"""Minimum side of a padded matmul: unpadded it takes at least twice as long, and copies of operands take far less."""
VIEWS = (aten.t.default, aten.view.default, aten._unsafe_view.default)


def pad_matmuls(gm: GraphModule) -> PassReport:
    """Pad the matmuls of `gm` that become faster, in place."""
    found = [(node, sizes) for node in gm.graph.nodes if (sizes := _padded_sizes(node)) is not None]
    mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes]) if found else None
    if mode is None:
        return PassReport()
    padding = _Padding(gm.graph, mode)
    for node, sizes in found:
        padding.rewrite(node, *sizes)
    gm.recompile()
    return PassReport(len(found))


def _padded_sizes(node: Node) -> tuple[int, int, int] | None:
    """Return the padded (rows, depth, columns) of a matmul; None if it stays as it is."""
    positions = MATRICES.get(node.target) if node.op == "call_function" else None  # type: ignore[call-overload]
    if positions is None or node.kwargs:
        return None
    operands = [node.args[position] for position in positions]
    values = [operand.meta["val"] for operand in operands if isinstance(operand, Node) and "val" in operand.meta]
    if len(values) < 2 or not all(map(_may_grow, values)):
        return None
    (m, k), n = values[0].shape, values[1].shape[1]
    if min(m, k, n) < MIN_PADDED_SIDE:
        return None
    along_k = _lies_along(values[0], 1) or _lies_along(values[1], 0)
    rows = _whole(m) if _lies_along(values[0], 0) else m
    sizes = rows, _whole(k) if along_k else k, _whole(n)
    if sizes == (m, k, n) or (len(positions) < len(node.args) and not _is_line(node.args[0])):
        return None  # aligned, or with an added matrix, which would need padding as well
    return sizes


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


def _is_line(argument: Any) -> bool:
    """Is an argument a vector, which is added to all rows?"""
    value = argument.meta.get("val") if isinstance(argument, Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _whole(size: int) -> int:
    return -(-size // PAD_MULTIPLE) * PAD_MULTIPLE


class _Padding:
    """Inserts padded operands; a matrix that several matmuls read is padded once."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.grown: dict[tuple[Node, int, int], Node] = {}

    def rewrite(self, node: Node, rows: int, depth: int, columns: int) -> None:
        """Replace a matmul by one of padded operands, and a slice of its result."""
        target: Any = node.target
        first, second = (node.args[position] for position in MATRICES[target])
        assert isinstance(first, Node) and isinstance(second, Node)
        m, n = node.meta["val"].shape
        operands = [self._grow(first, rows, depth, node), self._grow(second, depth, columns, node)]
        if target is aten.addmm.default:
            bias = node.args[0]
            assert isinstance(bias, Node)
            operands.insert(0, self._zeros_behind(bias, [0, columns - n], node) if columns != n else bias)
        made = self._call(target, tuple(operands), node, before=node)
        for dim, (size, wanted) in enumerate(((rows, m), (columns, n))):
            if size != wanted:
                made = self._call(aten.slice.Tensor, (made, dim, 0, wanted), node, before=node)
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
        return insert_call(
            self.graph, self.mode, target, args, origin, before=before, after=after, shares=CHECKPOINTED_ORIGIN
        )
