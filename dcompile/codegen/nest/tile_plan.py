"""The tiling of a loop for GPU programs, as data, and the sizes that all ways to tile share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dcompile.codegen.nest.contraction import Contraction
from dcompile.codegen.nest.loop_nest import Axis, Nest
from dcompile.codegen.nest.row_matmul import RowMatmul, RowTile
from dcompile.device_traits import MULTIPROCESSORS
from dcompile.ir.index import (
    TYPICAL,
    Index,
    Size,
    Var,
    as_index,
    as_size,
    evaluate,
    extreme,
    flatten,
    floordiv,
    size_product,
    typical,
)
from dcompile.ir.nodes import Tile

ROW_ELEMENTS = 2048
"""Elements of a tile of short rows: 16 for each of 128 threads."""
MAX_PERSISTENT_ELEMENTS = 16384
"""Longest row that a program holds in registers (32 elements for each of 512 threads) instead of reading it twice."""
PROGRAMS = 2 * MULTIPROCESSORS
"""Programs of a kernel that loops over rows, and the fewest that a kernel should have."""
Kind = Literal["flat", "turn", "rows", "columns", "skinny"]


@dataclass(frozen=True, slots=True)
class TileDim:
    """One dimension of a tile: its loop variables, in row-major order, and the number of positions."""

    name: str
    axes: tuple[Axis, ...]
    block: int

    @property
    def size(self) -> Size:
        return count(self.axes)

    @property
    def blocks(self) -> Size:
        return ceil_div(self.size, self.block)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiling of a loop.

    flat: elements in order. turn: two-dimensional tiles with `batch` variables outside. rows: `dims` are rows and
    elements; a program has whole rows, at once or, if `looped`, in blocks. columns: a program loops over `chunk` rows
    and accumulates its column reductions. skinny: `dims` are columns and rows of products of few rows.
    """

    kind: Kind
    nest: Nest
    dims: tuple[TileDim, ...]
    warps: int
    batch: tuple[Axis, ...] = ()
    looped: bool = False
    chunk: Size = 0
    atomic: bool = False
    """Whether combining stores do so in memory."""
    skinny: tuple[Contraction, Tile] | None = None
    """Products of few rows, and how they are tiled."""
    words: tuple[tuple[int, ...], ...] = ()
    """Numbers of stores whose bytes are stored together."""
    row_matmul: tuple[RowMatmul, RowTile] | None = None
    """Products of one row, and how they are tiled, where that is not as for any rows."""

    def __post_init__(self) -> None:
        assert self.warps in (1, 2, 4, 8, 16, 32), f"no GPU has programs of {self.warps} warps"

    @property
    def grid(self) -> Size:
        match self.kind:
            case "columns":
                return size_product((self.parts, self.dims[1].blocks))
            case "rows":
                return self.dims[0].blocks
            case _:
                return size_product((count(self.batch), *(dim.blocks for dim in self.dims)))

    @property
    def parts(self) -> Size:
        """Runs of rows for programs; at least one, since sums of no rows are stored, too."""
        rows = self.dims[0].size
        if not isinstance(self.chunk, int):
            return 1  # one run of all rows
        return as_size(extreme("max", ceil_div(rows, self.chunk), 1))


def warps_of(elements: int) -> int:
    """Return the warps of a block: 16 elements a thread, or 32 where a block would exceed 512 threads."""
    return min(max(elements // 512, 1), 16)


def row_number(rows: tuple[Axis, ...]) -> Index:
    """Return the position of a row among all rows."""
    numbers = [Index((((Var(axis.name),), 1),)) for axis in rows]
    steps = [count(rows[place + 1 :]) for place in range(len(rows))]
    return flatten(numbers, steps)


def count(axes: Iterable[Axis]) -> Size:
    """Return the number of points of a space."""
    return size_product(axis.size for axis in axes)


def about(axes: Iterable[Axis]) -> int:
    """Return the number of points of a space, for decisions that affect only speed."""
    return typical(count(axes))


def typical_stride(step: Size) -> int:
    """Return a stride, possibly negative, for decisions that affect only speed."""
    return step if isinstance(step, int) else evaluate(step, dict.fromkeys(step.variables, TYPICAL))


def ceil_div(size: Size, block: int) -> Size:
    """Return the number of blocks that cover a size."""
    return as_size(floordiv(as_index(size) + block - 1, block, {}))


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
