"""Write functions of pairs for a tile of queries and keys, whose scores are in registers.

The statements are those of any kernel (`printer.py`). What depends neither on scores nor on the inner dimension of the
tile is written once, before the loop over that dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.nest.loop_nest import Axis, Nest, may_exceed, renumber
from dcompile.codegen.nest.tile_plan import TileDim, TilePlan
from dcompile.device_traits import MAX_INT32_ELEMENTS
from dcompile.ir.analysis import ancestors
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import ZERO, Index, Size, var
from dcompile.ir.nodes import Load, Ref, Store, Value
from dcompile.ir.pair_function import GRADIENT, PLACES, SCORE, PairFunction

BATCH, HEAD, QUERY, KEY = "i0", "i1", "i2", "j0"
"""Names of a pair's position in kernels: two numbers of the program, and two tensors of positions."""
_BOTH = var(QUERY) + var(KEY)
_VARYING: Mapping[str, Index] = {
    SCORE: _BOTH, GRADIENT: _BOTH, **dict(zip(PLACES, (ZERO, ZERO, var(QUERY), var(KEY)), strict=True))
}  # fmt: skip
"""Arguments of functions -> an index that varies as they do."""


class PairTile:
    """A tile with queries along one dimension and keys along the other, and functions of its pairs by name."""

    def __init__(
        self,
        functions: Mapping[str, PairFunction],
        table: Mapping[str, Buffer],
        outer: tuple[str, Size, int],
        inner: tuple[str, Size, int],
        ragged: Collection[str],
        warps: int,
    ) -> None:
        """`outer`, `inner`: the name of a position, how many there are, and how many of them a tile has.

        `ragged`: names of positions of which a tile may have some that do not exist.
        """
        dims = tuple(TileDim(name, (Axis(axis, size),), block) for name, (axis, size, block) in
                     zip("yx", (outer, inner), strict=True))  # fmt: skip
        beyond = [dim.name for dim in dims if dim.axes[0].name in ragged]
        body, self.results = _one_body(functions)
        stores = tuple(Store(SCORE, _BOTH, ref) for ref in self.results.values())
        axes = tuple(axis for dim in dims for axis in dim.axes)
        nest = Nest((), axes, None, body, stores, (False,) * len(stores))
        numbers = {name: Buffer(name, "float32", (1,), (1,)) for name in (SCORE, GRADIENT, *PLACES)}
        reads = {value.buffer for value in body if isinstance(value, Load)} & table.keys()
        wide = any(may_exceed(table[name].extent, MAX_INT32_ELEMENTS - 1) for name in reads)
        places = dict(zip(PLACES, (BATCH, HEAD, QUERY, KEY), strict=True))
        short = ".to(tl.int32)" if wide else ""
        held = {SCORE: SCORE, GRADIENT: GRADIENT, **{name: f"{place}{short}" for name, place in places.items()}}
        plan = TilePlan("turn", nest, dims, warps)
        self.text = TritonText(plan, {**table, **numbers}, registers=held, ragged=beyond)
        self.text.wide = wide
        self.outer, self.inner = dims
        self._before: set[Ref] = set()
        self._inside: set[Ref] = set()

    @property
    def shape(self) -> str:
        """Shape of a tile."""
        return self.text.shape("yx")

    def is_ragged(self, dim: TileDim) -> bool:
        """Whether the last tile exceeds what there is along a dimension."""
        return self.text.has_mask(dim)

    def write_outer(self, names: Iterable[str]) -> None:
        """Write what functions need and the loop over the inner dimension does not change."""
        for ref in self._needed(names):
            if self.text.classes[ref] <= {"y"}:
                self.text.declare(ref)
                self._before.add(ref)

    def begin_step(self, start: str) -> None:
        """Name the positions of a step along the inner dimension, from `start` on."""
        self._inside = {*self._before}
        self.text.position(self.inner, start)

    def write(self, names: Iterable[str]) -> None:
        """Write functions for the tile of a step, each value once: `value` gives their results."""
        for ref in self._needed(names):
            if ref not in self._inside:
                self.text.declare(ref)
                self._inside.add(ref)

    def value(self, name: str) -> str:
        """Return a function's results for the whole tile, in float32."""
        ref = self.results[name]
        found = self.text.whole(ref, self.text.everything)
        return found if self.text.nest.body[ref].dtype == "float32" else f"({found}).to(tl.float32)"

    def test(self, name: str) -> str:
        """Return whether a function's results are True, or not 0, for the whole tile."""
        ref = self.results[name]
        found = self.text.whole(ref, self.text.everything)
        return found if self.text.nest.body[ref].dtype == "bool" else f"({found} != 0)"

    def _needed(self, names: Iterable[str]) -> list[Ref]:
        return sorted(ancestors(self.text.nest.body, [self.results[name] for name in names]))


def _one_body(functions: Mapping[str, PairFunction]) -> tuple[tuple[Value, ...], dict[str, Ref]]:
    """Return the values of all functions as one body, equal ones once, and the result of each function."""
    body: list[Value] = []
    known: dict[str, Ref] = {}
    results: dict[str, Ref] = {}
    for name, function in functions.items():
        number: dict[Ref, Ref] = {}
        for ref, value in enumerate(function.body):
            placed = renumber(value, number)
            if isinstance(placed, Load) and placed.buffer in _VARYING:
                placed = replace(placed, index=_VARYING[placed.buffer])
            number[ref] = known.setdefault(repr(placed), len(body))
            if number[ref] == len(body):
                body.append(placed)
        results[name] = number[function.result]
    return tuple(body), results
