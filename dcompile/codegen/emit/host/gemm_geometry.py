"""GEMM geometries in BLAS's terms, for library matmuls that another algorithm than ATen's may compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import TENSOR_CORE_DTYPES, Chosen, Geometry, gemm_layout
from dcompile.ir.nodes import SCALED, Extern, Program, View

MIN_FLOP_SHARE = 0.02
"""Fraction of a program's matmul FLOPs below which a geometry is not worth measuring."""


def geometry(step: Extern, table: Mapping[str, Buffer]) -> Geometry | None:
    """Return the geometry of a GPU matmul that the library supports: static sizes, rows or columns contiguous."""
    factors = factors_of(step)
    if step.mode != "out" or factors is None or step.outs[0] is None:
        return None
    left, right = factors
    out = table[step.outs[0]]
    whole = View(out.name, out.shape, out.strides)
    if out.dtype not in TENSOR_CORE_DTYPES or not out.device.startswith("cuda"):
        return None
    a, b, c = (gemm_layout(view, out.dtype) for view in (right, left, whole))
    if a is None or b is None or c is None or c[0]:
        return None
    (rows, inner), columns = left.shape, right.shape[1]
    assert isinstance(rows, int) and isinstance(inner, int) and isinstance(columns, int), "seen by gemm_layout"
    return Geometry(out.dtype, columns, rows, inner, a[0], b[0], a[1], b[1], c[1])


def factors_of(step: Extern) -> tuple[View, View] | None:
    """Return the factors of a plain matmul, or of one scaled as it is written (`collectives/fold_average.py`)."""
    match step:
        case Extern("aten.mm.default", (View() as left, View() as right), ()):
            return left, right
        case Extern("aten.addmm.default", (View(), View() as left, View() as right)) if step.kwargs == SCALED:
            return left, right
        case _:
            return None


def measurable_geometries(program: Program) -> dict[Geometry, int]:
    """Return the geometries with a large share of a program's matmul FLOPs, and their counts."""
    table = program.table
    found = (geometry(step, table) for step in program.steps if isinstance(step, Extern))
    counts = Counter(g for g in found if g is not None)
    total = sum(g.flops * count for g, count in counts.items())
    return {g: count for g, count in counts.items() if g.flops * count >= MIN_FLOP_SHARE * total}


def read_by_chosen(program: Program, chosen: Chosen) -> set[str]:
    """Return inputs of matmuls with a chosen algorithm, which needs known strides and 16-byte alignment."""
    if not chosen:
        return set()
    table = program.table
    found = (step for step in program.steps if isinstance(step, Extern) and geometry(step, table) in chosen)
    return {view.buffer for step in found for view in factors_of(step) or ()}
