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
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.symbolic.strides import ranges_of, variables
from dcompile.ir.gemm import TENSOR_CORE_DTYPES
from dcompile.ir.index import flatten
from dcompile.ir.nodes import Store, View

MAX_ROWS = 16
"""Rows up to which a loop is used, as many as one tile has."""
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of one row; several need tensor cores."""
MIN_MATRIX_ELEMENTS = 1 << 16
"""Elements of a matrix from which a loop is used: smaller ones take almost no time, and cuBLAS has kernels for them."""
MIN_TILED_ELEMENTS = 1 << 18
"""The same for several rows, whose kernels take longer to compile."""
MIN_ROW_ELEMENTS = 256
"""Elements of its rows: a program that sums fewer has too few loads in flight."""
ALIGNED_ELEMENTS = 8
"""Elements of 16 bytes: tiles of several rows are copied to shared memory in such pieces."""


def is_by_few_rows(low: Lowering, left: LazyTensor, right: LazyTensor) -> bool:
    """Is it few rows times a column-major matrix, such as a transposed weight, of static size on a GPU?"""
    if not low.own_rows or not low.traits.has_row_matmul or right.view is None or left.dtype not in DTYPES:
        return False
    sizes = (*left.shape, *right.shape, *right.view.strides)
    if not all(isinstance(size, int) for size in sizes) or left.dtype != right.dtype or right.view.strides[0] != 1:
        return False
    rows, (depth, columns) = left.shape[0], right.shape
    assert isinstance(rows, int) and isinstance(depth, int) and isinstance(columns, int), "static sizes"
    if depth < MIN_ROW_ELEMENTS or depth * columns < (MIN_MATRIX_ELEMENTS if rows == 1 else MIN_TILED_ELEMENTS):
        return False
    return rows == 1 or (
        2 <= rows <= MAX_ROWS < columns
        and left.dtype in TENSOR_CORE_DTYPES
        and _is_aligned(right.view, 0)
        and (depth % ALIGNED_ELEMENTS == 0 if left.view is None else _is_aligned(left.view, 1))
    )


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
    factors = [body.cast(body.trace(tensor, at), compute) for tensor, at in ((left, (m, k)), (right, (k, n)))]
    total = body.reduce("sum", body.apply("mul", *factors))
    if added is not None:
        start = broadcast(low.memory(added), (rows, columns))
        total = body.apply("add", total, body.cast(body.trace(start, (m, n)), compute))
    view = low.buffer(shape_of(value), dtype)
    place = flatten((m, n), view.strides)
    low.loop((rows, columns), (depth,), body, [Store(view.buffer, place, to_dtype(body, total, dtype))])
    return from_view(view, dtype)


def _mm(low: Lowering, value: torch.Tensor, /, left: LazyTensor, right: LazyTensor, *_: Any, **more: Any) -> Result:
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
    if beta != 1 or alpha != 1 or added.dtype != left.dtype or not is_by_few_rows(low, left, right):
        return NotImplemented
    return _by_rows(low, value, left, right, added)


RULES: dict[str, Rule] = {
    "aten.mm.default": Rule(_mm, "memory"),
    "aten.addmm.default": Rule(_addmm, "memory"),
}
