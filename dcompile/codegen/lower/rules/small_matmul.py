"""Rules for matmuls on GPUs whose time is that of memory: by a tiny matrix, and of few rows (skinny GEMM).

An element of a matmul by a tiny matrix is a sum of at most `MAX_DEPTH` products, as of a linear layer that mixes heads
or channels. cuBLAS's kernels for such depths load two elements at a time: 70 us for 2.5 million rows of 4 times 4 x 4,
whose bytes take 10 us (H200, CaiT's talking heads). As an expression, the product is fused into its readers.

An element of few rows by a matrix is a sum over a row of memory. Decoding multiplies one row for each sequence of a
batch by every weight of a model. Such a matmul does few multiplications for each element read, and a kernel that
streams the matrix once reaches memory's bandwidth. As a loop it fuses with its neighbours: matmuls of the same rows,
activations, sums. One row is a row reduction like any other; several rows are tiles for tensor cores
(`nest/contraction.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, from_view, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.symbolic.strides import affine_strides, ranges_of, variables
from dcompile.codegen.nest.contraction import ALIGNED_ELEMENTS, MAX_ROWS
from dcompile.ir.gemm import TENSOR_CORE_DTYPES
from dcompile.ir.index import as_index, flatten
from dcompile.ir.nodes import Apply, Load, Ref, Store, View

FACTOR_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of factors."""
MAX_DEPTH = 8
"""Terms of a sum. cuBLAS loads whole 16 bytes from 8 elements of 16 bits on, if rows begin at such."""
MAX_COLUMNS = 16
"""Columns of the matrix: each reads the row again, from a cache."""
MIN_ROWS = 1 << 14
"""Rows from which the product takes longer than starting it."""


def may_be_a_loop(low: Lowering, left: LazyTensor, right: LazyTensor) -> bool:
    """May a matmul be a loop of ours: on a GPU, with factors of one floating-point dtype?"""
    return low.own_rows and low.traits.has_row_matmul and left.dtype in FACTOR_DTYPES and left.dtype == right.dtype


def is_by_tiny_matrix(low: Lowering, left: LazyTensor, right: LazyTensor) -> bool:
    """Is it many rows times a matrix of a few elements, of static size on a GPU? Both may have a batch in front."""
    sizes = [size for size in (*left.shape, right.shape[-1]) if isinstance(size, int)]
    if not may_be_a_loop(low, left, right) or len(sizes) <= len(left.shape):
        return False
    *rows, depth, columns = sizes
    return math.prod(rows) >= MIN_ROWS and 0 < depth <= MAX_DEPTH and 0 < columns <= MAX_COLUMNS


def multiply_by_tiny(
    low: Lowering, value: torch.Tensor, left: LazyTensor, right: LazyTensor, added: LazyTensor | None = None
) -> LazyTensor:
    """Return `left @ right` (+ `added`), summed in float32 in the order of terms, and rounded once."""
    dtype, shape = dtype_name(value.dtype), shape_of(value)
    compute, depth = opmath(dtype), right.shape[-2]
    assert isinstance(depth, int), "a static size"
    rows = left if left.is_cheap else low.memory(left)
    matrix = low.memory(right)
    start = None if added is None else broadcast(low.memory(added), shape)

    def at(body: Body, coords: Coords) -> Ref:
        *batch, row, column = coords
        total: Ref | None = None
        for number in range(depth):
            place = as_index(number)
            factors = body.trace(rows, (*batch, row, place)), body.trace(matrix, (*batch, place, column))
            term = body.apply("mul", *(body.cast(factor, compute) for factor in factors))
            total = term if total is None else body.apply("add", total, term)
        assert total is not None, "a sum of at least one term"
        if start is not None:
            total = body.apply("add", total, body.cast(body.trace(start, coords), compute))
        return to_dtype(body, total, dtype)

    read = (rows, matrix) * depth + (() if start is None else (start,))
    return make_lazy(shape, dtype, at, read, ops=2 * depth)


def _bmm(low: Lowering, value: torch.Tensor, /, left: LazyTensor, right: LazyTensor, *_: Any, **more: Any) -> Result:
    if more or not is_by_tiny_matrix(low, left, right):
        return NotImplemented
    return multiply_by_tiny(low, value, left, right)


MIN_MATRIX_ELEMENTS = 1 << 16
"""Elements of a matrix from which a loop is used: smaller ones take almost no time, and cuBLAS has kernels for them."""
MIN_TILED_ELEMENTS = 1 << 18
"""The same for several rows, whose kernels take longer to compile."""
MIN_ROW_ELEMENTS = 256
"""Elements of its rows: a program that sums fewer has too few loads in flight."""


def is_by_few_rows(low: Lowering, left: LazyTensor, right: LazyTensor) -> bool:
    """Is it few rows times a column-major matrix, such as a transposed weight, of static size on a GPU?

    Several rows need a dtype of tensor cores.
    """
    if not may_be_a_loop(low, left, right):
        return False
    if not all(isinstance(size, int) for size in (*left.shape, *right.shape)) or 0 in right.shape:
        return False
    matrix = _integers(low, right) or right.view
    if matrix is None or not all(isinstance(step, int) for step in matrix.strides) or matrix.strides[0] != 1:
        return False
    rows, (depth, columns) = left.shape[0], right.shape
    assert isinstance(rows, int) and isinstance(depth, int) and isinstance(columns, int), "static sizes"
    if depth < MIN_ROW_ELEMENTS or depth * columns < (MIN_MATRIX_ELEMENTS if rows == 1 else MIN_TILED_ELEMENTS):
        return False
    return rows == 1 or (
        2 <= rows <= MAX_ROWS < columns
        and left.dtype in TENSOR_CORE_DTYPES
        and _is_aligned(matrix, 0)
        and (depth % ALIGNED_ELEMENTS == 0 if left.view is None else _is_aligned(left.view, 1))
    )


def _integers(low: Lowering, right: LazyTensor) -> View | None:
    """Return the 8-bit integers in memory that a matrix is a cast of, as weights of torchao are; None for others."""
    if right.cast_from is None:
        return None
    body = Body(ranges_of("i", right.shape))
    body.trace(right.cast_from, variables("i", right.shape))
    loads = [value for value in body.values if isinstance(value, Load)]
    casts = all(isinstance(value, Load) or (isinstance(value, Apply) and value.op == "cast") for value in body.values)
    if len(loads) != 1 or loads[0].dtype != "int8" or loads[0].mask is not None or not casts:
        return None
    if loads[0].buffer in low.overwritten:
        return None
    found = affine_strides(loads[0].index, right.shape)
    return None if found is None else View(loads[0].buffer, right.shape, *found)


def _is_aligned(view: View, along: int) -> bool:
    """Is a matrix contiguous along a dimension, and does each of its lines begin at whole 16 bytes?"""
    numbers = (view.strides[1 - along], view.offset)
    whole = all(isinstance(number, int) and number % ALIGNED_ELEMENTS == 0 for number in numbers)
    return whole and view.strides[along] == 1


def _by_rows(
    low: Lowering, value: torch.Tensor, left: LazyTensor, right: LazyTensor, added: LazyTensor | None
) -> LazyTensor:
    """Return `left @ right` (+ `added`), summed in float32 and rounded once, as by cuBLAS."""
    left, dtype = low.memory(left), dtype_name(value.dtype)
    rows, (depth, columns) = left.shape[0], right.shape
    compute = opmath(dtype)
    body = low.body({**ranges_of("i", (rows, columns)), **ranges_of("j", (depth,))})
    (m, n), (k,) = variables("i", (rows, columns)), variables("j", (depth,))
    if right.cast_from is not None and _integers(low, right) is not None:
        with body.without_stored():  # nothing else may read the cast in memory, which is then dropped
            matrix = body.trace(right.cast_from, (k, n))
    else:
        matrix = body.trace(right, (k, n))
    factors = body.cast(body.trace(left, (m, k)), compute), body.cast(matrix, compute)
    total = body.reduce("sum", body.apply("mul", *factors))
    if added is not None:
        start = broadcast(low.memory(added), (rows, columns))
        total = body.apply("add", total, body.cast(body.trace(start, (m, n)), compute))
    view = low.buffer(shape_of(value), dtype)
    place = flatten((m, n), view.strides)
    low.loop((rows, columns), (depth,), body, [Store(view.buffer, place, to_dtype(body, total, dtype))])
    return from_view(view, dtype)


def _mm(low: Lowering, value: torch.Tensor, /, left: LazyTensor, right: LazyTensor, *_: Any, **more: Any) -> Result:
    if not more and is_by_tiny_matrix(low, left, right):
        return multiply_by_tiny(low, value, left, right)
    if more or not is_by_few_rows(low, left, right):
        return NotImplemented
    return _by_rows(low, value, left, right, None)


def _addmm(
    low: Lowering,
    value: torch.Tensor,
    /,
    added: LazyTensor,
    left: LazyTensor,
    right: LazyTensor,
    beta: float = 1,
    alpha: float = 1,
) -> Result:
    if beta != 1 or alpha != 1 or added.dtype != left.dtype:
        return NotImplemented
    if is_by_tiny_matrix(low, left, right):
        return multiply_by_tiny(low, value, left, right, added)
    if not is_by_few_rows(low, left, right):
        return NotImplemented
    return _by_rows(low, value, left, right, added)


RULES: dict[str, Rule] = {
    "aten.mm.default": Rule(_mm, "memory"),
    "aten.addmm.default": Rule(_addmm, "memory"),
    "aten.bmm.default": Rule(_bmm, "memory"),
}
