"""GEMMs as BLAS describes them, and cuBLASLt's algorithms for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.nodes import View


@dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of a GEMM: out (m x n) = a (m x k) times b (k x n), in column-major order.

    It is the transpose of torch's row-major operands. `turned_a`: a is stored as its transpose. `lead_a`: leading
    dimension, in elements from one stored column to the next.
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
"""One of cuBLASLt's algorithms: eight numbers that are valid for one version of the library on one kind of GPU."""
Chosen: TypeAlias = Mapping[Geometry, Algorithm]
TENSOR_CORE_DTYPES = ("bfloat16", "float16")
"""Dtypes that tensor cores multiply, accumulating in float32, whatever the algorithm."""
ALIGNMENT = 16
"""Alignment in bytes of a matrix and of each of its rows."""


def gemm_layout(view: View, dtype: str) -> tuple[bool, int] | None:
    """Whether a matrix is column-major by torch's convention, and its leading dimension. None for other layouts."""
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
