"""Transposing loops: which accesses are turned, tile by tile, through a small array, so that memory is read in order.

A tile of a tensor whose rows run across the simd loop is turned in registers (`turn` of the prelude) into an array that
the simd loop reads in order. A gather of 16 elements would touch 16 cache lines, which at a stride of a power of two
share a few sets of the cache (2048x2048: 4.5 ms with gathers, 1.3 ms turned, a plain copy 0.7 ms).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcompile.codegen.nest.loop_nest import Axis, Nest
from dcompile.ir.index import Index, Size, as_size, is_symbol, substitute, typical, var
from dcompile.ir.nodes import ITEMSIZE, Buffer, Load, Ref

ITEMSIZES = (1, 2, 4, 8)
"""Bytes of elements that `turn` knows how to exchange between registers."""


@dataclass(frozen=True, slots=True)
class Turned:
    """The tile's variables, `across` contiguous in memory and `along` the simd loop, and what is turned: the distance

    in memory of neighbours along `along`, for each load and each store by number.
    """

    across: Axis
    along: Axis
    loads: Mapping[Ref, Size]
    stores: Mapping[int, Size]

    @property
    def place(self) -> str:
        """Position of an element in a tile."""
        across, along = self.across.name, self.along.name
        return f"({across} - {across}_low) * {self.along.tile} + {along} - {along}_low"

    def corner(self, index: Index) -> Index:
        """Where a tile begins in memory."""
        names = (self.across.name, self.along.name)
        return substitute(index, {name: var(f"{name}_low") for name in names}, {})

    @property
    def full(self) -> bool:
        """Every tile is complete."""
        return self.across.divides and self.along.divides

    def extent(self, axis: Axis) -> str:
        """Elements of a tile along one of its variables."""
        return str(axis.tile) if self.full else f"{axis.name}_high - {axis.name}_low"


def find_turned(nest: Nest, table: Mapping[str, Buffer]) -> Turned | None:
    """What a tiled pointwise loop had better turn; None for every other loop."""
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
    return Turned(across, along, loads, stores) if loads or stores else None


def _distance(index: Index, across: str, along: str) -> Size | None:
    """Elements between neighbours along `along`, if `index` is contiguous across it only."""
    unit, step = index.coefficient(across), index.coefficient(along)
    if unit is None or step is None or any(name[0] == "v" for name in index.variables):
        return None
    fixed = all(map(is_symbol, step.variables))
    return as_size(step) if unit.constant == 1 and fixed and typical(step) > 1 else None
