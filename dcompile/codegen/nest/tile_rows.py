"""Tile loops over rows for GPU programs: whole rows, at once or in blocks."""

from __future__ import annotations

from dcompile.codegen.nest.loop_nest import Nest, accesses, unit_strides
from dcompile.codegen.nest.tile_plan import (
    MAX_PERSISTENT_ELEMENTS,
    PROGRAMS,
    ROW_ELEMENTS,
    TileDim,
    TilePlan,
    about,
    count,
    power_of_two,
    warps_of,
)
from dcompile.ir.analysis import ancestors, runtime_refs
from dcompile.ir.index import Index
from dcompile.ir.nodes import Load, Reduce, Scan

PAIRED = (2048, 4096)
"""Lengths of rows that are faster in pairs: a program then has 32 elements for each thread."""
READ_ELEMENTS = 4096
"""Elements of a row that 256 threads read at a time if only row values are stored. This takes 0.96 of the time of 512
threads at once (docs/lab/constants.md, K1)."""
PIECE_ELEMENTS = 2048
"""Elements of a longer row that 128 threads read at a time. This takes 0.91 of the time of twice as many elements and
threads (docs/lab/constants.md, K2)."""
OUTER_ROWS = 64
"""Rows of a tile where adjacent rows, not elements, are contiguous."""
MAX_ELEMENT_LOADS = 8
"""Loads for each element up to which a thread has 32 elements in registers."""


def tile_rows(nest: Nest) -> TilePlan:
    rows, size = about(nest.rows), about(nest.elements)
    known = isinstance(count(nest.elements), int)
    whole = power_of_two(size)
    if _is_lane(nest):
        x = min(OUTER_ROWS, power_of_two(rows))
        while x > 16 and rows < x * PROGRAMS:
            x //= 2
        # few programs: a double block, or all elements, since nothing else hides memory latency
        few = rows < 2 * x * PROGRAMS
        # windows of nine loads in 32 elements of each thread spill: 16 of them take 130 to 170 registers
        wide = _reads_windows(nest)
        most = MAX_PERSISTENT_ELEMENTS // 2 if wide else MAX_PERSISTENT_ELEMENTS
        if wide and few and most < x * whole <= 2 * most and x > 16:
            x //= 2
        r = min(ROW_ELEMENTS * (2 if few else 1) // x, whole)
        if known and few and r < whole and x * whole <= most:
            dims = TileDim("x", nest.rows, x), TileDim("r", nest.elements, whole)
            return TilePlan("rows", nest, dims, max(min(x * whole // 512, 16), 1))
        dims = TileDim("x", nest.rows, x), TileDim("r", nest.elements, r)
        warps = max(min(x * r // 512, 8 if wide else 4), 1)
        return TilePlan("rows", nest, dims, warps, looped=r < size or not known)
    if not known:
        piece = min(max(4 * whole, PIECE_ELEMENTS // 8), PIECE_ELEMENTS)
        dims = TileDim("x", nest.rows, 1), TileDim("r", nest.elements, piece)
        return TilePlan("rows", nest, dims, max(piece // 512, 1), looped=True)
    if whole > MAX_PERSISTENT_ELEMENTS:
        return TilePlan(
            "rows", nest, (TileDim("x", nest.rows, 1), TileDim("r", nest.elements, PIECE_ELEMENTS)), 4, looped=True
        )
    x = max(min(ROW_ELEMENTS // whole, power_of_two(rows)), 1)
    while x > 1 and rows < x * PROGRAMS:
        x //= 2
    if all(nest.row_stores) and whole > READ_ELEMENTS and _in_one_pass(nest):
        return TilePlan(
            "rows",
            nest,
            (TileDim("x", nest.rows, x), TileDim("r", nest.elements, READ_ELEMENTS)),
            warps_of(READ_ELEMENTS),
            looped=True,
        )
    if x == 1 and PAIRED[0] <= whole <= PAIRED[1] and rows >= PROGRAMS and not all(nest.row_stores):
        # two rows at once are slower for maxima: softmax takes 154 us for 139, RMSNorm 37.2 for 37.6 (one H200)
        sums = all(value.op == "sum" for value in nest.body if isinstance(value, (Reduce, Scan)))
        x = 2 if sums and rows >= 2 * PROGRAMS else 1
        return TilePlan(
            "rows", nest, (TileDim("x", nest.rows, x), TileDim("r", nest.elements, whole)), max(x * whole // 1024, 1)
        )
    return TilePlan("rows", nest, (TileDim("x", nest.rows, x), TileDim("r", nest.elements, whole)), warps_of(x * whole))


def _in_one_pass(nest: Nest) -> bool:
    """Is every element of a row needed only once, unlike for a variance, which needs the mean first?"""
    reduces = [ref for ref, value in enumerate(nest.body) if isinstance(value, Reduce)]
    below = ancestors(nest.body, [value.arg for value in nest.body if isinstance(value, Reduce)])
    return not any(isinstance(value, Scan) for value in nest.body) and not below.intersection(reduces)


def _is_lane(nest: Nest) -> bool:
    """Are adjacent rows, rather than elements of a row, contiguous in memory?"""
    if not nest.rows or about(nest.rows[-1:]) < 8 or not any(isinstance(value, (Reduce, Scan)) for value in nest.body):
        return False
    # weighted by traffic: in a weighted sum over a matrix's rows, the weights count little beside the matrix
    often = [
        (index, weight * _points(nest, index))
        for index, weight in accesses(nest.body, nest.stores)
        if index.variables & nest.element_names
    ]
    return unit_strides(nest.rows[-1].name, often) > unit_strides(nest.elements[-1].name, often)


def _reads_windows(nest: Nest) -> bool:
    """Does an element read many others, such as a window of 3 x 3?"""
    names = nest.element_names
    loads = [value for value in nest.body if isinstance(value, Load) and value.index.variables & names]
    return len(loads) > MAX_ELEMENT_LOADS


def _points(nest: Nest, index: Index) -> int:
    """Return the number of elements that an index reaches; a run-time value may reach all."""
    return about(axis for axis in nest.axes if axis.name in index.variables or runtime_refs(index))
