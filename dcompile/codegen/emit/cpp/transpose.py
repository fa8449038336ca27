"""Transpose tiles through a small array, so that memory is read in order.

A tile of a tensor whose rows run across the simd loop is transposed in registers by the library's `turn`. It goes into
an array that the simd loop reads in order. A gather of 16 elements would touch 16 cache lines. At a stride of a power
of two these share a few sets of the cache. Of 2048x2048 elements, gathers took 4.5 ms, transposing 1.3 ms, a plain copy
0.7 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import memory_type
from dcompile.codegen.emit.cpp.plan import NestPlan, TransposeTile
from dcompile.codegen.emit.cpp.prefetch import MIN_PREFETCH_BYTES
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.nest.loop_nest import WIDE_TILE_SIDE, Nest
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.index import Index, Size, as_size, is_symbol, substitute, typical, var
from dcompile.ir.nodes import Load

ITEMSIZES = (1, 2, 4, 8)
"""Bytes of elements that `turn` can exchange between registers."""


def transpose_tiles(plan: NestPlan) -> NestPlan:
    """Transpose tiles of accesses that are contiguous across the simd loop."""
    tile = find_transposed(plan.nest, plan.table)
    return replace(plan, tile=tile) if tile else plan


def find_transposed(nest: Nest, table: Mapping[str, Buffer]) -> TransposeTile | None:
    """Return the accesses to transpose in a tiled pointwise loop; None for every other loop."""
    tiled = {row.name: row for row in nest.rows if row.tile > 1}
    if len(nest.elements) != 2 or not all(axis.name in tiled for axis in nest.elements):
        return None
    across, along = (tiled[axis.name] for axis in nest.elements)
    loads = {
        ref: distance
        for ref, value in enumerate(nest.body)
        if isinstance(value, Load) and value.mask is None and ITEMSIZE[value.dtype] in ITEMSIZES
        if (distance := _distance(value.index, across.name, along.name))
    }
    stores = {
        number: distance
        for number, store in enumerate(nest.stores)
        if store.mode == "set" and ITEMSIZE[table[store.buffer].dtype] in ITEMSIZES
        if (distance := _distance(store.index, across.name, along.name))
    }
    return TransposeTile(across, along, loads, stores) if loads or stores else None


def _distance(index: Index, across: str, along: str) -> Size | None:
    """Return the elements between neighbours along `along`, if `index` is contiguous across it only."""
    unit, step = index.coefficient(across), index.coefficient(along)
    if unit is None or step is None or any(name[0] == "v" for name in index.variables):
        return None
    fixed = all(map(is_symbol, step.variables))
    return as_size(step) if unit.constant == 1 and fixed and typical(step) > 1 else None


# --- the text ---------------------------------------------------------------------------------------------------------


def open_tiles(p: Printer) -> None:
    """Read a tile of each tensor whose rows are across the simd loop, and declare those of results."""
    if (tile := p.plan.tile) is None:
        return
    area = tile.across.tile * tile.along.tile
    for ref, distance in tile.loads.items():
        load = p.nest.body[ref]
        assert isinstance(load, Load)
        x = f"x{p.number(ref)}"
        p.line(f"alignas(64) {memory_type(load.dtype)} {x}[{area}];")
        corner = p.place(load.buffer, tile.corner(load.index))
        extents = f"{tile.extent(tile.along)}, {tile.extent(tile.across)}"
        _prefetch_tile(p, tile, load, distance)
        p.line(f"turn(&{corner}, {p.size(distance)}, {x}, {tile.along.tile}, {extents});")
    for number in tile.stores:
        dtype = memory_type(p.plan.table[p.nest.stores[number].buffer].dtype)
        p.line(f"alignas(64) {dtype} y{number}[{area}];")


def _prefetch_tile(p: Printer, tile: TransposeTile, load: Load, distance: Size) -> None:
    """Prefetch the next tile, if its rows are too short for hardware prefetch.

    With 2-byte elements, a transposed tensor took 0.85 of the time with AVX-512, 0.7 to 1.05 with AVX2; 4 and 8 bytes
    gained nothing.
    """
    along, nbytes = tile.along, p.plan.bytes_of(load.buffer)
    small = isinstance(nbytes, int) and nbytes < MIN_PREFETCH_BYTES
    if ITEMSIZE[load.dtype] > 2 or along.tile < WIDE_TILE_SIDE or small:
        return
    low = f"{along.name}_low"
    corner = substitute(tile.corner(load.index), {low: var(low) + along.tile}, {})
    given = f"&{p.place(load.buffer, corner)}, {p.size(distance)}, {along.tile}, {tile.across.tile}"
    p.line(f"if ({low} + {along.tile} < {p.size(along.size)}) ask_for({given});")


def close_tiles(p: Printer) -> None:
    """Write a tile of each transposed result."""
    if (tile := p.plan.tile) is None:
        return
    for number, distance in tile.stores.items():
        store = p.nest.stores[number]
        corner = p.place(store.buffer, tile.corner(store.index))
        extents = f"{tile.extent(tile.across)}, {tile.extent(tile.along)}"
        p.line(f"turn(y{number}, {tile.along.tile}, &{corner}, {p.size(distance)}, {extents});")
