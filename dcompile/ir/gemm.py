"""Matrix products as BLAS describes them, and the algorithms that cuBLASLt has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dcompile.ir.nodes import ITEMSIZE, View


@dataclass(frozen=True, slots=True)
class Geometry:
    """out (m x n) = a (m x k) times b (k x n), column by column: the transpose of what torch has row by row.

    `turned_a`: a lies in memory as its transpose; `lead_a`: elements from one column in memory to the next.
    """

    dtype: str
    m: int
    n: int
    k: int
    turned_a: bool
    turned_b: bool
    lead_a: int
    lead_b: int
    lead_out: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


Algorithm: TypeAlias = tuple[int, ...]
"""One of cuBLASLt's: eight numbers that mean something to the version that gave them, on one kind of GPU."""
Chosen: TypeAlias = Mapping[Geometry, Algorithm]
TENSOR_CORE_DTYPES = ("bfloat16", "float16")
"""What is multiplied by the tensor cores, and summed up in float32, whatever the algorithm."""
ALIGNMENT = 16
"""Bytes that a matrix and each of its rows begin at a multiple of."""


def gemm_layout(view: View, dtype: str) -> tuple[bool, int] | None:
    """Whether a matrix lies column by column as torch counts, and its leading dimension."""
    numbers = [number for number in (*view.shape, *view.strides, view.offset) if isinstance(number, int)]
    if len(numbers) != 5 or len(view.shape) != 2:
        return None
    rows, columns, down, right, offset = numbers
    if min(rows, columns) < 2 or offset * ITEMSIZE[dtype] % ALIGNMENT:
        return None
    turned = down == 1
    lead, least = (right, rows) if turned else (down, columns)
    if 1 not in (down, right) or lead < least or lead * ITEMSIZE[dtype] % ALIGNMENT:
        return None
    return turned, lead
