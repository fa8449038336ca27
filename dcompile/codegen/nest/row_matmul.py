"""Recognize products of one row and a matrix (GEMV) in a nest, and choose how their kernel reads the matrix.

A product of one row is a row reduction like any other: each row of the nest is a row of the matrix. The time is that of
reading it. So what counts is how many of its bytes are in flight, from the start of the kernel to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcompile.codegen.nest.loop_nest import Nest, levels, stride
from dcompile.device_traits import MULTIPROCESSORS
from dcompile.ir.analysis import is_at_known_place
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.nodes import Load, Reduce, Ref, Scan

MIN_DEPTH = 256
"""Length of a sum from which rows are tiled here: shorter ones are rows like any other."""
MAX_DEPTH = 16384
"""Length up to which a program holds whole rows."""
TILE_ELEMENTS, THREAD_ELEMENTS = 4096, 16
"""Elements of one matrix for a program and for a thread: two rows of 2048 took 0.84 of the time of one (K19)."""
LONG_ROW_ELEMENTS = 64
"""The same for a thread of longer rows: with 32, they took 1.04 (K19)."""
MAX_WARPS = 32
"""Warps that a program can have."""
MIN_PROGRAMS = 2 * MULTIPROCESSORS
"""Programs below which they have fewer rows."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """Tiling of a product of one row: matrix rows of a program, their padded length, and warps.

    A program holds whole rows, so that it can read all of them before its turn. Those that walk along their rows, or
    prefetch rows of later programs, took 0.94 to 1.0 of the time (K19), so it has neither.
    """

    rows: int
    depth: int
    warps: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth} w{self.warps}"


@dataclass(frozen=True, slots=True)
class RowMatmul:
    """Products of a nest: loads of matrices, contiguous along the sum, and the sizes of the matrices."""

    matrices: tuple[Ref, ...]
    columns: int
    """Rows of each matrix, which are columns of the result."""
    depth: int
    itemsize: int
    """Bytes of one element of each row of all matrices together."""

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.columns * self.depth * self.itemsize


def find_row_matmul(nest: Nest) -> RowMatmul | None:
    """Return the products of one row that a nest consists of; None if it is anything else."""
    sizes = [axis.size for axis in nest.axes]
    if len(nest.elements) != 1 or not nest.rows or not all(isinstance(size, int) for size in sizes):
        return None
    if not all(nest.row_stores) or any(store.mode != "set" for store in nest.stores):
        return None
    (along,) = nest.elements
    found = levels(nest)
    live = sorted(found.live)
    reduces = [value for ref in live if isinstance(value := nest.body[ref], Reduce)]
    if not reduces or any(value.op != "sum" for value in reduces) or max(found.known[ref] for ref in live) > 1:
        return None
    if any(isinstance(nest.body[ref], Scan) for ref in live) or not isinstance(along.size, int):
        return None
    rows = {axis.name for axis in nest.rows}
    matrices = tuple(ref for ref in live if found.element[ref] and _is_matrix(nest, ref, rows, along.name))
    loads = [value for ref in matrices if isinstance(value := nest.body[ref], Load)]
    if not loads or along.size < MIN_DEPTH:
        return None
    columns = 1
    for axis in nest.rows:
        assert isinstance(axis.size, int)
        columns *= axis.size
    return RowMatmul(matrices, columns, along.size, sum(ITEMSIZE[load.dtype] for load in loads))


def _is_matrix(nest: Nest, ref: Ref, rows: set[str], along: str) -> bool:
    """Is a value a load of another row of memory for each row of the nest, contiguous along the sum?"""
    value = nest.body[ref]
    if not isinstance(value, Load) or not is_at_known_place(value):
        return False
    return rows <= value.index.variables and stride(value.index, along) == 1


def choose_row_tile(found: RowMatmul) -> RowTile | None:
    """Choose the tile from the sizes alone; None where rows are tiled like those of any kernel."""
    whole = 1 << (found.depth - 1).bit_length()
    if found.itemsize != 2 * len(found.matrices) or whole > MAX_DEPTH:
        return None
    if whole > TILE_ELEMENTS:
        warps = max(whole * len(found.matrices) // (32 * LONG_ROW_ELEMENTS), 1)
        return RowTile(1, whole, min(1 << (warps.bit_length() - 1), MAX_WARPS))
    rows = TILE_ELEMENTS // whole
    while rows > 1 and found.columns < rows * MIN_PROGRAMS:
        rows //= 2
    return RowTile(rows, whole, max(rows * whole // (32 * THREAD_ELEMENTS), 1))
