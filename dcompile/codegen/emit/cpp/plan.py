"""The plan of a kernel: a nest, all decisions about it before printing, and queries on both.

`make_plan` decides nothing: its text is plain loops on one thread. The rows of `NEST_PASSES` (`pipeline.py`) then fill
in one decision each, as pure functions from a plan to a plan. The printer reads the plan and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from dcompile.codegen.emit.cpp.value_facts import PositionCounter, round_values, short_nans
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, Axis, Levels, Nest, stride
from dcompile.codegen.nest.loop_nest import levels as find_levels
from dcompile.ir.analysis import operands, store_operands
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.index import Index, Size, as_size, substitute, var
from dcompile.ir.nodes import Apply, IndexOf, Load, Reduce, Ref, Scan
from dcompile.ir.ops import OPS

BEFORE_ROWS = -1
"""Number of the pass that computes hoisted values."""
FIRST_DECISION = 7
"""Number of fields before the decisions, which decisions are made from."""


@dataclass(frozen=True, slots=True)
class TransposeTile:
    """A tile whose accesses are transposed in registers: `across` is contiguous in memory, `along` is the simd loop.

    `loads` and `stores` (by number) are the transposed accesses, with the elements between neighbours along `along`.
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

    @property
    def full(self) -> bool:
        """Whether every tile is complete."""
        return self.across.divides and self.along.divides

    def corner(self, index: Index) -> Index:
        """Return the index of a tile's first element in memory."""
        names = (self.across.name, self.along.name)
        return substitute(index, {name: var(f"{name}_low") for name in names}, {})

    def extent(self, axis: Axis) -> str:
        """Return the elements of a tile along one of its variables."""
        return str(axis.tile) if self.full else f"{axis.name}_high - {axis.name}_low"


@dataclass(frozen=True, slots=True)
class Scaling:
    """A tensor that is stored at the indices of its load, and the value that it is multiplied by."""

    tensor: Load
    number: Ref


@dataclass(frozen=True, slots=True)
class ScanRounds:
    """The scans of each round of a pass, and the values in block arrays: scans, and costly values.

    A `serial` pass has no arrays and one round: it is one loop, one element after another.
    """

    scans: tuple[tuple[Ref, ...], ...] = ()
    held: frozenset[Ref] = frozenset()
    serial: bool = False


NO_SCANS = ScanRounds()


@dataclass(frozen=True, slots=True)
class GatherPrefetch:
    """A load of a row of a large table, and the load of the row's number."""

    table: Load
    position: Load


@dataclass(frozen=True, slots=True)
class VectorLoop:
    """The vectorization of a pass."""

    guard: str
    """Macro that is defined on the machines that use it."""
    step: str = ""
    """Vectors of a step (`vectorize.STEP_ELEMENTS`)."""
    accumulators: int = 1
    searched: Ref | None = None
    """The condition, if the pass only searches for its first position."""


@dataclass(frozen=True, slots=True)
class LatePass:
    """The software-pipelined last pass of a row, which runs in the steps of pass `host` of the next row."""

    number: int
    host: int
    kept: tuple[Ref, ...]
    """Values that rows keep for it."""
    step: str
    """Vectors of one of its steps (`vectorize.STEP_ELEMENTS`)."""


@dataclass(frozen=True, slots=True)
class NestPlan:
    """A nest and the decisions about it; passes are counted from 0, stores by their number in the nest."""

    nest: Nest
    table: Mapping[str, Buffer]
    """Buffers of the loop."""
    levels: Levels
    pass_roots: tuple[tuple[tuple[Ref, ...], tuple[int, ...]], ...]
    """Reductions and element stores of each pass."""
    exact: Mapping[str, frozenset[Ref]]
    """16-bit dtype -> float values that it represents exactly."""
    short_nans: frozenset[Ref]
    """Float values whose NaNs have no bits beyond those of bfloat16."""
    read_again: frozenset[str] = frozenset()
    """Buffers that later steps read again."""
    scaling: Scaling | None = None
    """Return at once if the tensor would be multiplied by 1 in its own memory."""
    parallel: bool = False
    """Share rows, or blocks of one long row, among threads."""
    shared_elements: bool = False
    """Threads share the elements of one long row."""
    in_place: bool = False
    """Accumulate column reductions in the results themselves."""
    shared_columns: Axis | None = None
    """Threads share columns instead: each takes a part of this variable in every row."""
    tile: TransposeTile | None = None
    shortened: frozenset[Ref] = frozenset()
    """Loads of row values whose NaNs are shortened at the load."""
    hoisted: tuple[Ref, ...] = ()
    """Element values that are equal in every row: computed once, before all rows."""
    kept: Mapping[Ref, int] = field(default_factory=dict)
    """Element values that later passes read from an array -> the pass that computes them."""
    scans: Mapping[int, ScanRounds] = field(default_factory=dict)
    """Passes with scans -> their rounds."""
    selected_rows: frozenset[Ref] = frozenset()
    """Masked loads that read through a pointer of their row: to the row, or to zeros."""
    counters: Mapping[int, PositionCounter] = field(default_factory=dict)
    """Passes that count their elements in an int32 -> the values that it replaces."""
    copies: bool = False
    """The kernel only writes the elements that it reads."""
    streamed: frozenset[int] = frozenset()
    """Stores that bypass the caches."""
    next_row: tuple[Load, ...] = ()
    """Loads of the next row, which pass `next_row_pass` prefetches."""
    next_row_pass: int | None = None
    gathers: tuple[GatherPrefetch, ...] = ()
    """Rows of tables that are prefetched before their row numbers are used."""
    vectors: Mapping[int, VectorLoop] = field(default_factory=dict)
    """Passes over elements that are written in vectors."""
    row_vectors: frozenset[int] = frozenset()
    """Passes over several rows at a time (`nest.lane`) that are written in vectors along the rows."""
    late: LatePass | None = None
    """Software pipelining: the last pass runs during the next row."""
    interleaved_sum: Ref | None = None
    """The sum whose rows are interleaved."""
    interleaved_columns: bool = False
    """Interleave rows that are added to column sums."""
    pieces: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Passes whose loop is split -> the bounds of each part."""

    def decisions(self) -> Iterator[str]:
        """Yield the decisions, one line each: the name of a field and its value."""
        for decided in fields(self)[FIRST_DECISION:]:
            if value := getattr(self, decided.name):
                shown = sorted(value) if isinstance(value, frozenset) else value
                yield decided.name if value is True else f"{decided.name}: {shown}"

    # --- passes ---

    @property
    def pass_count(self) -> int:
        """Number of passes over a row."""
        return len(self.pass_roots)

    @property
    def columns(self) -> dict[int, str]:
        """Column reductions: the number of each store, and the name of its accumulator."""
        return {n: f"q{n}" for n, store in enumerate(self.nest.stores) if store.mode != "set"}

    def targets(self, number: int) -> list[Ref]:
        """Return the values that a pass needs for its reductions and stores."""
        reduces, stores = self.pass_roots[number]
        uses = [ref for n in stores for ref in store_operands(self.nest.stores[n])]
        return [self.reduce(ref).arg for ref in reduces] + uses

    def needed(self, number: int, targets: Iterable[Ref], held: frozenset[Ref] = frozenset()) -> list[Ref]:
        """Return the element values that `targets` depend on, in order, up to held ones and those of earlier passes.

        Values of earlier passes are those that these keep.
        """
        stack, seen = list(targets), set[Ref]()
        while stack:
            ref = stack.pop()
            if ref not in seen and self.levels.element[ref]:
                seen.add(ref)
                if self.kept.get(ref, number) == number and ref not in held:
                    stack += operands(self.nest.body[ref])
        return sorted(seen)

    def pass_values(self, number: int) -> list[Ref]:
        """Return the element values that a pass needs."""
        return self.needed(number, self.targets(number))

    def new_values(self, number: int) -> list[Ref]:
        """Return the element values that a pass computes or loads itself, none kept by an earlier pass."""
        return [ref for ref in self.pass_values(number) if self.kept.get(ref, number) == number]

    def vector_values(self, number: int) -> list[Ref]:
        """Return the element values of a pass, without positions that are only compared."""
        targets = self.targets(number)
        needed, used = self.needed(number, targets), set(targets)
        for ref in needed:
            used |= set() if self._has_known_places(number, ref) else {*operands(self.nest.body[ref])}
        return [ref for ref in needed if ref in used]

    def new_vector_values(self, number: int) -> list[Ref]:
        """Return those of `vector_values` that are not kept from earlier passes."""
        return [ref for ref in self.vector_values(number) if self.kept.get(ref, number) == number]

    def _has_known_places(self, number: int, ref: Ref) -> bool:
        """Are the positions of a value's elements known without a vector of them?"""
        value, counter = self.nest.body[ref], self.counters.get(number)
        is_random = isinstance(value, Apply) and value.op == "philox"
        return is_random or (counter is not None and ref in counter.matches)

    # --- sizes and work ---

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """The variables of the loop over rows."""
        lane = self.nest.lane
        return (*self.nest.rows, *((Axis(lane.name, lane.size, OUTER_VECTOR_ROWS),) if lane else ()))

    @property
    def work(self) -> Size:
        """Operations of the kernel, in additions."""
        return as_size(self.nest.points * (self.cost(range(len(self.nest.body))) + len(self.nest.stores)))

    def cost(self, refs: Iterable[Ref]) -> int:
        """Return the cost of some values for one element, in additions."""
        values = (self.nest.body[ref] for ref in refs)
        return sum(OPS[value.op].cost if isinstance(value, Apply) else 1 for value in values)

    def bytes_of(self, name: str) -> Size:
        """Return the bytes from a buffer's first to its last element."""
        return as_size(self.table[name].extent * ITEMSIZE[self.table[name].dtype])

    def has_bytes(self, name: str, least: float) -> bool:
        """Is a buffer known to have at least `least` bytes?"""
        return isinstance(size := self.bytes_of(name), int) and size >= least

    # --- values and stores ---

    def reduce(self, ref: Ref) -> Reduce:
        """Return a value as a reduction."""
        value = self.nest.body[ref]
        assert isinstance(value, Reduce)
        return value

    def scan(self, ref: Ref) -> Scan:
        """Return a value as a scan."""
        value = self.nest.body[ref]
        assert isinstance(value, Scan)
        return value

    def is_scalar_column(self, number: int, name: str) -> bool:
        """Is a store a column reduction that all elements of the innermost loop share?"""
        store = self.nest.stores[number]
        depends = name in store.index.variables or any(
            self.levels.element[int(v[1:])] for v in store.index.variables if v[0] == "v"
        )
        return store.mode != "set" and not depends

    def can_store_at_once(self, number: int, name: str) -> bool:
        """May neighbours along `name` execute this store at the same time?"""
        store = self.nest.stores[number]
        if store.mode == "set":
            return True
        distance = store.index.coefficient(name)
        varying = [v for v in store.index.variables if v[0] == "v" and self._varies(int(v[1:]), name)]
        if distance is None or varying:
            return False
        return distance.constant != 0 or (self.is_scalar_column(number, name) and self.nest.lane is None)

    def _varies(self, ref: Ref, name: str) -> bool:
        value = self.nest.body[ref]
        direct = isinstance(value, (Load, IndexOf)) and name in value.index.variables
        return direct or any(self._varies(operand, name) for operand in operands(value))

    def constant_stride(self, index: Index, name: str) -> int | None:
        """Return the elements between neighbours along `name` in memory, if that is one number everywhere."""
        if any(self.nest.lane or self.levels.element[int(v[1:])] for v in index.variables if v[0] == "v"):
            return None
        found = stride(index, name)
        return found if isinstance(found, int) else None

    def is_transposed(self, number: int) -> bool:
        """Does a store go through a tile that is transposed afterwards?"""
        return self.tile is not None and number in self.tile.stores


NestDecision: TypeAlias = Callable[[NestPlan], NestPlan]
"""A row of `NEST_PASSES`: returns the same plan with one more decision."""


def make_plan(nest: Nest, table: Mapping[str, Buffer], read_again: frozenset[str] = frozenset()) -> NestPlan:
    """Return the plan without decisions: plain loops on one thread."""
    found = find_levels(nest)
    roots = tuple(_roots(nest, found, number) for number in range(max(found.store_at) + 1))
    exact = {narrow: round_values(nest.body, narrow) for narrow in ("bfloat16", "float16")}
    return NestPlan(nest, table, found, roots, exact, short_nans(nest.body), read_again)


def _roots(nest: Nest, levels: Levels, number: int) -> tuple[tuple[Ref, ...], tuple[int, ...]]:
    """Return the reductions and element stores of a pass."""
    live = sorted(levels.live)
    reduces = tuple(r for r in live if isinstance(nest.body[r], Reduce) and levels.known[r] == number + 1)
    stores = (n for n, row in enumerate(nest.row_stores) if not row and levels.store_at[n] == number)
    return reduces, tuple(stores)
