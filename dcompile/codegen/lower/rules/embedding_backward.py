"""The gradient of an embedding: rows are added at their index.

On the CPU they are combined in memory, in a fixed order. On a GPU, each row of a small table compares itself with all
indices. For larger tables, rows of one index are summed first, as a group (`emit/triton/segment_sum.py`), and each
table row reads its group's sum.
"""

from __future__ import annotations

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant, from_view, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.indexing import every_place
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.scatter import collect, collected_by_rows, few_rows, meets, needs_order
from dcompile.codegen.lower.rules.views import reshape
from dcompile.codegen.lower.symbolic.strides import Shape, contiguous
from dcompile.device_traits import MAX_INT32_ELEMENTS
from dcompile.ir.index import Index, Size, as_index, as_size, size_product
from dcompile.ir.nodes import Ref, View

GROUPED = "dcompile.sum_groups"
"""sum_groups(values, index, chunk) -> sums, keys, order, parts: implemented in `emit/triton/segment_sum.py`."""
CHUNK_ROWS = 8
"""Rows that a program adds up; each chunk has room for two partial sums."""
MAX_COMPARED_ROWS = 1 << 15
"""Rows compared pairwise: about 0.15 ms of a GPU, as long as a sort takes."""


def _embedding_backward(
    low: Lowering,
    value: torch.Tensor,
    /,
    grad: LazyTensor,
    indices: LazyTensor,
    rows: Size,
    padding: int,
    by_frequency: bool,
) -> Result:
    """Sum the gradients of every row. The forward has checked the indices; one outside would add nothing."""
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    if by_frequency:
        return NotImplemented
    if 0 in grad.shape or 0 in shape:
        return constant(0, shape, dtype)
    compute = opmath(dtype)
    rank = len(indices.shape)
    if not needs_order(low) and few_rows(shape, indices):
        return _rounded(collected_by_rows(low, shape, indices, grad, padding), dtype)
    if are_grouped(low, shape, indices):
        return summed_by_group(low, shape, indices, grad, padding)
    if not meets(low, dtype, "sum", shape, grad.shape):
        return NotImplemented

    def row(body: Body, coords: Coords) -> Ref:
        return body.cast(body.trace(indices, coords[:rank]), "int64")

    def place(body: Body, coords: Coords) -> Coords:
        return _clamped(body, row(body, coords), rows), coords[-1]

    def element(body: Body, coords: Coords) -> Ref:
        inside = _is_inside(body, row(body, coords), rows, padding)
        given = body.cast(body.trace(grad, coords), compute)
        return body.apply("where", inside, given, body.const(0, compute))

    return _rounded(collect(low, shape, compute, "sum", every_place(grad.shape, place), element), dtype)


def are_grouped(low: Lowering, shape: Shape, index: LazyTensor) -> bool:
    """Are the rows of each index summed before the table is written? On GPUs, where sizes are static.

    Atomic additions would need a float32 table beside the result, to fill, add to and read again, and would come in any
    order. A sort takes a dozen kernels.
    """
    count, (rows, width) = size_product(index.shape), shape
    if low.traits.ordered_stores or not (isinstance(count, int) and isinstance(rows, int) and isinstance(width, int)):
        return False
    return count <= MAX_COMPARED_ROWS and max(rows, count * width) <= MAX_INT32_ELEMENTS


def summed_by_group(low: Lowering, shape: Shape, index: LazyTensor, values: LazyTensor, padding: int) -> LazyTensor:
    """Return, for each row of a table of `shape`, the sum of the values with its index, or zero."""
    count, (rows, width), dtype = size_product(index.shape), shape, values.dtype
    given = _laid_out(low, reshape(values, (count, width)))
    found = _laid_out(low, reshape(index, (count,)))
    sums = low.buffer((count, width), dtype, name=f"{low.node}_groups")
    keys = low.buffer((count,), "int32", name=f"{low.node}_keys")
    order = low.buffer((count,), "int32", name=f"{low.node}_order")
    runs = -(-int(count) // CHUNK_ROWS)  # type: ignore[arg-type]
    parts = low.buffer((2, runs, width), opmath(dtype), name=f"{low.node}_parts")
    low.extern(GROUPED, [given, found, CHUNK_ROWS], [view.buffer for view in (sums, keys, order, parts)], mode="out")
    last = _last_of_each(low, rows, from_view(found, index.dtype), padding)
    summed = from_view(sums, dtype)

    def at(body: Body, coords: Coords) -> Ref:
        number, zero = body.cast(body.trace(last, coords[:1]), "int64"), body.const(0, "int64")
        hit = body.apply("ge", number, zero)
        where = body.as_index(body.apply("max", number, zero), count)
        with body.masked(hit):
            return body.trace(summed, (where, coords[1]))

    return make_lazy(shape, dtype, at, (last, summed), ops=2)


def _last_of_each(low: Lowering, rows: Size, index: LazyTensor, padding: int) -> LazyTensor:
    """Return, for each row of a table, the last position of its index; negative for none, and for the padding."""

    def row(body: Body, coords: Coords) -> Ref:
        return body.cast(body.trace(index, coords), "int64")

    def place(body: Body, coords: Coords) -> Coords:
        return (_clamped(body, row(body, coords), rows),)

    def number(body: Body, coords: Coords) -> Ref:
        counts = _is_inside(body, row(body, coords), rows, padding)
        return body.apply("where", counts, body.index(as_index(coords[0]), "int32"), body.const(-1, "int32"))

    return collect(low, (rows,), "int32", "max", every_place(index.shape, place), number)


def _laid_out(low: Lowering, tensor: LazyTensor) -> View:
    """Return `tensor` in row-major order at the start of a buffer."""
    view, wanted = low.memory(tensor).view, contiguous(tensor.shape)
    if view is None or view.strides != wanted or view.offset != 0:
        view = low.store(low.memory(tensor), wanted).view
    assert view is not None
    return view


def _clamped(body: Body, row: Ref, rows: Size) -> Index:
    lowest, highest = body.const(0, "int64"), body.const(as_size(as_index(rows) - 1), "int64")
    return body.as_index(body.apply("min", body.apply("max", row, lowest), highest), rows)


def _is_inside(body: Body, row: Ref, rows: Size, padding: int) -> Ref:
    """Is an index a row of the table other than the padding?"""
    above, below = (body.apply(op, row, body.const(end, "int64")) for op, end in (("ge", 0), ("lt", rows)))
    inside = body.apply("and", above, below)
    if padding >= 0:
        inside = body.apply("and", inside, body.apply("ne", row, body.const(padding, "int64")))
    return inside


def _rounded(total: LazyTensor, dtype: str) -> LazyTensor:
    """Round a sum to the dtype of its result."""
    if total.dtype == dtype:
        return total
    return make_lazy(
        total.shape, dtype, lambda body, coords: to_dtype(body, body.trace(total, coords), dtype), (total,)
    )


RULES: dict[str, Rule] = {"aten.embedding_dense_backward.default": Rule(_embedding_backward, recompute=False)}
