"""Rules for products of few rows and a matrix on GPUs (skinny GEMM): each element is a sum over a row of memory.

Decoding multiplies one row for each sequence of a batch by every weight of a model. Such a matmul does few
multiplications for each element read, so memory bandwidth decides, and a kernel that streams the matrix once reaches
it. As a loop it fuses with its neighbours: matmuls of the same rows, activations, sums. One row is a row reduction like
any other; several rows are tiles for tensor cores (`nest/contraction.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, from_view
from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.tiny_matmul import is_by_tiny_matrix, may_be_a_loop, multiply_by_tiny
from dcompile.codegen.lower.symbolic.strides import affine_strides, ranges_of, variables
from dcompile.codegen.nest.contraction import ALIGNED_ELEMENTS, MAX_ROWS
from dcompile.ir.gemm import TENSOR_CORE_DTYPES
from dcompile.ir.index import flatten
from dcompile.ir.nodes import Apply, Load, Store, View

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
}
