"""Library calls that are matmuls, and GEMMs as BLAS describes them, with cuBLASLt's algorithms for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.nodes import SCALED, Arg, Extern, Step, View


@dataclass(frozen=True, slots=True)
class MatmulOp:
    """An operator that is a matmul, by the names of the same one without and with an addend."""

    alone: str
    adding: str
    batched: bool = False
    wide: bool = False
    """Factors of 16 bits have a result of float32 (`dcompile/operators/matmul_ops.py`)."""


MATMULS = (
    MatmulOp("aten.mm.default", "aten.addmm.default"),
    MatmulOp("aten.bmm.default", "aten.baddbmm.default", batched=True),
    MatmulOp("dcompile_matmul.mm_float32.default", "dcompile_matmul.addmm_float32.default", wide=True),
)
MATMUL_OPS: Mapping[str, MatmulOp] = {name: op for op in MATMULS for name in (op.alone, op.adding)}


@dataclass(frozen=True, slots=True)
class MatmulCall:
    """A library call that writes beta * added + alpha * left @ right to a place in the program."""

    op: MatmulOp
    left: View
    right: View
    added: View | None
    kwargs: tuple[tuple[str, Arg], ...]
    """Values of alpha and beta other than 1."""
    out: str

    @property
    def is_product(self) -> bool:
        """Whether nothing is added; the result may be scaled as it is written (`collectives/ddp_all_reduce.py`)."""
        return self.kwargs == (() if self.added is None else SCALED)


def matmul_of(step: Step) -> MatmulCall | None:
    """Return a step as a matmul; None for others, and for calls whose results the library allocates."""
    match step:
        case Extern(name, (*added, View() as left, View() as right), kwargs, (str(out),), "out") if name in MATMUL_OPS:
            start = added[0] if added else None
            assert start is None or isinstance(start, View), "a matrix or vector is added"
            how = tuple((key, value) for key, value in kwargs if value != 1)
            return MatmulCall(MATMUL_OPS[name], left, right, start, how, out)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of a GEMM: out (m x n) = a (m x k) times b (k x n), in column-major order.

    It is the transpose of torch's row-major operands. `transposed_a`: a is stored as its transpose. `lead_a`: leading
    dimension, in elements from one stored column to the next.
    """

    dtype: str
    m: int
    n: int
    k: int
    transposed_a: bool
    transposed_b: bool
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
