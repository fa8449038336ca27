"""Rules for vector-matrix products (GEMV) on GPUs: each element of the result is a sum over a row of memory.

Decoding one sequence multiplies a row by every weight of a model. Such a matmul does one multiplication for each
element read, so memory bandwidth decides, and a row reduction reaches it. As a loop it fuses with its neighbours:
matmuls of the same row, activations, sums.
"""

from __future__ import annotations

from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, from_view
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.symbolic.strides import ranges_of, variables
from dcompile.ir.index import as_index, flatten
from dcompile.ir.nodes import Store

DTYPES = ("bfloat16", "float16", "float32")
MIN_MATRIX_ELEMENTS = 1 << 16
"""Elements of a matrix from which a loop is used: smaller ones take almost no time, and cuBLAS has kernels for them."""
MIN_ROW_ELEMENTS = 256
"""Elements of its rows: a program that sums fewer has too few loads in flight."""


def is_by_rows(low: Lowering, left: LazyTensor, right: LazyTensor) -> bool:
    """Is it one row times a column-major matrix, such as a transposed weight, of static size on a GPU?"""
    if not low.own_rows or not low.traits.has_row_matmul or right.view is None or left.dtype not in DTYPES:
        return False
    sizes = (*left.shape, *right.shape, *right.view.strides)
    if not all(isinstance(size, int) for size in sizes) or left.dtype != right.dtype:
        return False
    depth, columns = right.shape
    return (
        left.shape[0] == 1
        and right.view.strides[0] == 1
        and depth >= MIN_ROW_ELEMENTS  # type: ignore[operator]
        and depth * columns >= MIN_MATRIX_ELEMENTS  # type: ignore[operator]
    )


def _row(
    low: Lowering, value: torch.Tensor, left: LazyTensor, right: LazyTensor, added: LazyTensor | None
) -> LazyTensor:
    """Return `left @ right` (+ `added`), summed in float32 and rounded once, as by cuBLAS."""
    left, dtype, zero = low.memory(left), dtype_name(value.dtype), as_index(0)
    depth, columns = right.shape
    compute = opmath(dtype)
    body = low.body({**ranges_of("i", (columns,)), **ranges_of("j", (depth,))})
    (i,), (j,) = variables("i", (columns,)), variables("j", (depth,))
    factors = [body.cast(body.trace(tensor, at), compute) for tensor, at in ((left, (zero, j)), (right, (j, i)))]
    total = body.reduce("sum", body.apply("mul", *factors))
    if added is not None:
        start = broadcast(low.memory(added), (1, columns))
        total = body.apply("add", total, body.cast(body.trace(start, (zero, i)), compute))
    view = low.buffer(shape_of(value), dtype)
    place = flatten((zero, i), view.strides)
    low.loop((columns,), (depth,), body, [Store(view.buffer, place, to_dtype(body, total, dtype))])
    return from_view(view, dtype)


def _mm(low: Lowering, value: torch.Tensor, /, left: LazyTensor, right: LazyTensor, *_: Any, **more: Any) -> Result:
    if more or not is_by_rows(low, left, right):
        return NotImplemented
    return _row(low, value, left, right, None)


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
    if beta != 1 or alpha != 1 or added.dtype != left.dtype or not is_by_rows(low, left, right):
        return NotImplemented
    return _row(low, value, left, right, added)


RULES: dict[str, Rule] = {
    "aten.mm.default": Rule(_mm, "memory"),
    "aten.addmm.default": Rule(_addmm, "memory"),
}
