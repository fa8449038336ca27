"""Tile loops for GPU programs: choose the variables that a tile spans, its extents, and the number of warps.

All decisions follow from the loop's sizes and strides alone. So a kernel is the same on every rank and on every device
of one kind. Block sizes are numbers. Where sizes are symbols, blocks are chosen for a typical size, and a row of
symbolic length is read in several blocks, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dcompile.codegen.nest.byte_words import WORD, by_words
from dcompile.codegen.nest.contraction import Contraction, choose_tile, find_contraction
from dcompile.codegen.nest.loop_nest import Axis, Nest, accesses, flatten_loop, may_exceed, stride, unit_strides
from dcompile.codegen.nest.row_matmul import RowMatmul, RowTile, choose_row_tile, find_row_matmul
from dcompile.codegen.nest.tile_columns import rows_of_program, tile_columns
from dcompile.codegen.nest.tile_plan import (
    MAX_PERSISTENT_ELEMENTS,
    PROGRAMS,
    TileDim,
    TilePlan,
    about,
    count,
    power_of_two,
    typical_stride,
)
from dcompile.codegen.nest.tile_rows import tile_rows
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import Index, size_product
from dcompile.ir.nodes import Load, Loop, Reduce, Scan, Store, Tile, Value

FLAT_ELEMENTS = 1024
"""Elements of a pointwise tile: 8 for each of 128 threads, so one access moves 16 bytes of a 16-bit dtype."""
TRANSPOSE_SIDES = (32, 64)
"""Sides of a transpose tile."""
BYTE_TRANSPOSE_SIDES = (64, 64)
"""Sides of a transpose tile of four warps where all stores have one byte (docs/lab/constants.md, K3)."""
WORD_TRANSPOSE_SIDES = (128, 64)
"""Sides of a transpose tile of eight warps whose bytes are stored by words (docs/lab/constants.md, K3)."""
NARROW_SIDES = range(3, 16)
"""Short sides of transposed runs: positions of a filter, channels of an image."""
MIN_WIDE_SIDE = 64
"""Least length of the other side."""
NARROW_ELEMENTS = 2048
"""Elements of a transpose tile with a short side, rounded up to a power of two (docs/lab/constants.md, K22)."""
MANY_ACCESSES = 3
"""Whole matrices that a loop reads, or stores across, from which its tile of words has half as many rows: otherwise its
values, 32 of each in a thread, would not fit registers."""
MIN_UNKNOWN_ROW = 64
"""Length from which rows are separate tiles where sizes are symbolic; a symbol counts as long."""


def make_plan(loop: Loop, row_tile: RowTile | None = None) -> TilePlan:
    """Choose the tiling of a loop, unless it was measured. `row_tile`: that of products of one row, to measure it."""
    in_pieces = may_exceed(size_product(loop.inner), MAX_PERSISTENT_ELEMENTS) and all(
        store.mode == "set" for store in loop.stores
    )
    nest = flatten_loop(loop, in_one_pass=in_pieces)
    if (found := find_contraction(nest)) is not None:
        return _skinny(nest, found, loop.tile)
    combining = [n for n, store in enumerate(nest.stores) if store.mode != "set"]
    chunk = rows_of_program(nest, combining)
    if combining and chunk:
        return tile_columns(nest, chunk)
    if (product := find_row_matmul(nest)) is not None and (tile := row_tile or choose_row_tile(product)) is not None:
        return _row_matmul(nest, product, tile)
    plan = tile_rows(nest) if nest.elements and _needs_rows(nest) else _pointwise(nest)
    return replace(plan, atomic=bool(combining))


def _needs_rows(nest: Nest) -> bool:
    return any(nest.row_stores) or any(isinstance(value, (Reduce, Scan)) for value in nest.body)


def _skinny(nest: Nest, found: Contraction, tile: Tile | None) -> TilePlan:
    if tile is None:
        tile = choose_tile(found)
    assert tile.rows >= found.row_count, f"a tile of {tile.rows} rows has not all {found.row_count}"
    x, y = TileDim("x", found.columns, tile.columns), TileDim("y", found.rows, tile.rows)
    return TilePlan("skinny", nest, (x, y), tile.warps, found.batch, skinny=(found, tile))


def _row_matmul(nest: Nest, found: RowMatmul, tile: RowTile) -> TilePlan:
    dims = TileDim("x", nest.rows, tile.rows), TileDim("r", nest.elements, tile.depth)
    return TilePlan("rows", nest, dims, tile.warps, row_matmul=(found, tile))


def _pointwise(nest: Nest) -> TilePlan:
    axes = (*nest.rows, *nest.elements)
    nest = replace(nest, rows=(), elements=axes, row_stores=(False,) * len(nest.stores))
    used = _full(axes, accesses(nest.body, nest.stores))
    near = {axis.name: unit_strides(axis.name, used) for axis in axes}
    scores = {axis.name: near[axis.name] - 100 * (about([axis]) < 8) for axis in axes}
    best = max(reversed(axes), key=lambda axis: scores[axis.name], default=None)
    if best and not near[best.name]:  # a short contiguous run, such as a group of few channels, beats a long stride
        best = max(reversed(axes), key=lambda axis: near[axis.name])
    rest = [axis for axis in axes if axis is not best]
    other = max(rest, key=lambda axis: scores[axis.name], default=None)
    if best and other and min(about([best]), about([other])) >= 16 and _both_ways(nest, best.name, other.name):
        batch = tuple(axis for axis in rest if axis is not other)
        for along, across in ((best, other), (other, best)):
            if (found := by_words(nest, along, across)) is not None:
                return _turn_words(*found, along, across, batch)
        sides, per_warp = (BYTE_TRANSPOSE_SIDES, 1024) if _stores_bytes(nest) else (TRANSPOSE_SIDES, 512)
        y, x = TileDim("y", (other,), _side(other, sides[0])), TileDim("x", (best,), _side(best, sides[1]))
        return TilePlan("turn", nest, (y, x), max(y.block * x.block // per_warp, 1), batch)
    if (pair := _narrow_sides(axes, used)) is not None:
        return _turn_narrow(nest, *pair)
    if best and rest and (block := _row_block(nest, best)):
        y, x = TileDim("y", tuple(rest), 1), TileDim("x", (best,), block)
        return TilePlan("turn", nest, (y, x), max(block // 256, 1))
    size = about(axes)
    block = FLAT_ELEMENTS
    while block > 128 and size < block * PROGRAMS:
        block //= 2
    block = min(block, power_of_two(size))
    # concurrent programs touch adjacent memory: rotary embedding's rows of 256 bytes took 0.9 of the time in address
    # order (8192 tokens, one H200)
    rest.sort(key=lambda axis: -reach(nest, axis.name))
    ordered = (*rest, best) if best else ()
    return TilePlan("flat", nest, (TileDim("x", ordered, block),), max(block // 256, 1))


def _turn_words(
    nest: Nest, words: tuple[tuple[int, ...], ...], best: Axis, across: Axis, batch: tuple[Axis, ...]
) -> TilePlan:
    """Tile a nest of four rows at a time; `across` is the axis of its rows before."""
    groups = next(axis for axis in nest.elements if axis.name == across.name)
    loads = {
        value.buffer
        for value in nest.body
        if isinstance(value, Load) and {best.name, across.name} <= value.index.variables
    }
    rows, columns = WORD_TRANSPOSE_SIDES
    rows //= 2 if max(len(loads), len(words)) >= MANY_ACCESSES else 1
    y, x = TileDim("y", (groups,), _side(groups, rows // WORD)), TileDim("x", (best,), _side(best, columns))
    return TilePlan("turn", nest, (y, x), min(max(y.block * x.block * WORD // 512, 1), 8), batch, words=words)


def _narrow_sides(axes: tuple[Axis, ...], used: list[tuple[Index, int]]) -> tuple[Axis, Axis] | None:
    """Return a short and a long axis whose runs some accesses have one way round, and all others the other way.

    Elements in the order of the store would read each cache line once for each position of the short axis.
    """
    for narrow in axes:
        for wide in axes:
            if narrow.size not in NARROW_SIDES or not isinstance(wide.size, int) or wide.size < MIN_WIDE_SIDE:
                continue
            steps = {(stride(index, narrow.name), stride(index, wide.name)) for index, _ in used}
            far = {step for step in steps if step[1] == 1 and isinstance(step[0], int) and step[0] >= wide.size}
            if far and steps - far == {(1, narrow.size)}:
                return narrow, wide
    return None


def _turn_narrow(nest: Nest, narrow: Axis, wide: Axis) -> TilePlan:
    height = power_of_two(about([narrow]))
    y, x = TileDim("y", (narrow,), height), TileDim("x", (wide,), _side(wide, NARROW_ELEMENTS // height))
    batch = tuple(axis for axis in nest.elements if axis not in (narrow, wide))
    return TilePlan("turn", nest, (y, x), power_of_two(max(about([narrow]) * x.block // 512, 1)), batch)


def reach(of: Nest | Loop, name: str) -> int:
    """Return the distance in memory between neighbours along a variable, summed over all accesses."""
    return distance(of.body, of.stores, name)


def distance(body: Iterable[Value], stores: Iterable[Store], name: str) -> int:
    """Return this distance summed over some stores and the loads among some values."""
    steps = [(stride(index, name), weight) for index, weight in accesses(tuple(body), tuple(stores))]
    return sum(abs(typical_stride(step)) * weight for step, weight in steps if step is not None)


def _full(axes: tuple[Axis, ...], used: list[tuple[Index, int]]) -> list[tuple[Index, int]]:
    """Return the accesses that depend on the most variables: a value for each row does not determine the tile."""
    names = {axis.name for axis in axes}
    most = max((len(index.variables & names) for index, _ in used), default=0)
    return [(index, weight) for index, weight in used if len(index.variables & names) == most]


def _stores_bytes(nest: Nest) -> bool:
    return all(ITEMSIZE[nest.body[store.value].dtype] == 1 for store in nest.stores)


def _both_ways(nest: Nest, best: str, other: str) -> bool:
    """Are some accesses contiguous along one variable and others only along the other?"""
    indices = [index for index, _ in _full((*nest.rows, *nest.elements), accesses(nest.body, nest.stores))]
    return any(stride(index, other) == 1 and stride(index, best) not in (None, 0, 1) for index in indices)


def _row_block(nest: Nest, best: Axis) -> int:
    """Return the elements of one row in a tile of part of a row, where some loads belong to the row and are read once.

    0 where tiles over all elements are better: short rows, rows not of whole 16 bytes, or rows slightly longer than a
    tile. With symbolic sizes, such a tile computes coordinates, which need divisions, once and not for each element.
    """
    if not isinstance(count((*nest.rows, *nest.elements)), int):
        size = about([best])
        return 0 if size < MIN_UNKNOWN_ROW else min(FLAT_ELEMENTS, max(power_of_two(size), FLAT_ELEMENTS // 4))
    names = {axis.name for axis in nest.elements}
    indices = [index for index, _ in accesses(nest.body, nest.stores)]
    if not any(index.variables & names and best.name not in index.variables for index in indices):
        return 0
    size = about([best])
    fitting = [
        block
        for block in (FLAT_ELEMENTS, FLAT_ELEMENTS // 2, FLAT_ELEMENTS // 4)
        if -(-size // block) * block <= 1.15 * size
    ]
    return fitting[0] if fitting and size % 8 == 0 else 0


def _side(axis: Axis, most: int) -> int:
    return min(most, power_of_two(about([axis])))


# --- columns ----------------------------------------------------------------------------------------------------------
