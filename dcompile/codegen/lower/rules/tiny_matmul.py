"""Products with a tiny matrix on GPUs: sums of a few terms, as of a linear layer that mixes heads or channels.

Each element is a sum of at most `MAX_DEPTH` products, so memory bandwidth decides. cuBLAS's kernels for such depths
load two elements at a time: 70 us for 2.5 million rows of 4 times 4 x 4, whose bytes take 10 us (H200, CaiT's talking
heads). As an expression, the product is fused into its readers.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.ir.index import as_index
from dcompile.ir.nodes import Ref

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of factors."""
MAX_DEPTH = 8
"""Terms of a sum. cuBLAS loads whole 16 bytes from 8 elements of 16 bits on, if rows begin at such."""
MAX_COLUMNS = 16
"""Columns of the matrix: each reads the row again, from a cache."""
MIN_ROWS = 1 << 14
"""Rows from which the product takes longer than starting it."""


def may_be_a_loop(low: Lowering, left: LazyTensor, right: LazyTensor) -> bool:
    """May a matmul be a loop of ours: on a GPU, with factors of one floating-point dtype?"""
    return low.own_rows and low.traits.has_row_matmul and left.dtype in DTYPES and left.dtype == right.dtype


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


RULES: dict[str, Rule] = {"aten.bmm.default": Rule(_bmm, "memory")}
"""The other products with a matrix are in `skinny_matmul.py`."""
