"""Rematerialize cheap elements of large buffers on GPUs, where arithmetic costs less than memory traffic.

Lowering stores values that several operations read. After a reduction, memory then holds values that its inputs
determine. The backward of a batch norm would write two images in float32, for its sums and for its gradient.
Recomputation reads three existing images in 16 bits instead.

A few short rows are recomputed in the loop that sums their elements: softmax in attention's weighted sum of values. A
token attends to its cache by three kernels: scores, softmax, and the sum of values by weights. The softmax takes less
time than its launch. Each program of the sum reads a row of scores from the cache, and computes the weights itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dcompile.codegen.nest.contraction import multiplies_few_rows
from dcompile.codegen.nest.gpu_tiling import make_plan
from dcompile.codegen.nest.tile_plan import TilePlan
from dcompile.codegen.schedule.fusion.fuse import Access, drop_internal, first_reads
from dcompile.codegen.schedule.fusion.iteration_space import divisions, solve
from dcompile.codegen.schedule.fusion.merge import MAX_BUFFERS, MAX_VALUES, append_value, mask_value, move_value
from dcompile.device_traits import loop_traits
from dcompile.ir.analysis import ancestors, inner_names, is_at_known_place, ranges, runtime_refs, turning_point
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Index, Ranges, substitute, var
from dcompile.ir.nodes import Apply, IndexOf, Load, Loop, Program, Reduce, Ref, Scan, Step, Store, Value, View
from dcompile.ir.ops import OPS

MIN_RECOMPUTE_BYTES = 1 << 20
"""Smallest size of a buffer: smaller ones stay in the cache."""
MIN_STEP_DISTANCE = 8
"""Largest distance from writer to reader, in steps: the inputs of a recomputation must live that long."""
MAX_RECOMPUTE_COST = 48
"""Additions for each element: about what a GPU computes while it moves eight more bytes."""
MAX_TRAFFIC_SHARE = 0.75
"""Fraction of the traffic that may remain."""
UNLIMITED = 1 << 62
"""Bound of a range that a comparison leaves open."""


def rematerialize(program: Program, reads: Sequence[Access] = ()) -> Program:
    """Recompute elements of large buffers in the GPU loops that read them, if that reads fewer bytes.

    `reads`: inputs that are sharded parameters. The step that reads one first still does, on every rank.

    Guarantees: bitwise-equal values: every operation keeps its rounding.
    Relies on: every buffer has one writer, except inputs that are updated in place.
    """
    table = program.table
    if not any(isinstance(step, Loop) and loop_traits(step, table).many_threads for step in program.steps):
        return program
    work = _Work(program, first_reads(program, reads))
    for number in range(len(work.steps)):
        offers = list(work.offers(number))
        for chosen in ([offers] if len(offers) > 1 else []) + [[offer] for offer in offers]:
            if chosen and work.take(number, chosen):
                break
    return drop_internal(replace(program, steps=tuple(work.steps)))


@dataclass(frozen=True, slots=True)
class _RecomputableStore:
    """A store whose elements readers may recompute: the values it depends on, and the buffers that these load."""

    store: Store
    refs: Sequence[Ref]
    sources: frozenset[str]


class _Work:
    """The steps while they change, with the readers and writers of each buffer."""

    def __init__(self, program: Program, first: Mapping[int, frozenset[str]]) -> None:
        self.table: Mapping[str, Buffer] = program.table
        self.first = first
        self.steps: list[Step] = list(program.steps)
        self.kept = program.returned.union(program.inputs)
        self.readers: dict[str, set[int]] = {}
        self.writers: dict[str, set[int]] = {}
        for number, step in enumerate(self.steps):
            for found, names in ((self.readers, step.reads), (self.writers, step.writes)):
                for name in names:
                    found.setdefault(name, set()).add(number)

    def offers(self, number: int) -> Iterator[_RecomputableStore]:
        """Yield the stores of this step that readers could recompute."""
        loop = self.steps[number]
        if not isinstance(loop, Loop) or not loop_traits(loop, self.table).many_threads:
            return
        for store in loop.stores:
            users = self.readers.get(store.buffer, set())
            if store.mode != "set" or store.buffer in self.kept or not users or not self._is_large(store.buffer):
                continue
            if not all(
                number < user <= number + MIN_STEP_DISTANCE and isinstance(self.steps[user], Loop) for user in users
            ):
                continue
            refs = sorted(ancestors(loop.body, [store.value]))
            values = [loop.body[ref] for ref in refs]
            if not all(map(_may_repeat, values)) or sum(map(_cost, values)) > MAX_RECOMPUTE_COST:
                continue
            sources = frozenset(value.buffer for value in values if isinstance(value, Load))
            changed = (at for name in sources for at in self.writers.get(name, ()))
            known = all(isinstance(self.table[name].extent, int) for name in sources)
            if sources & self.first.get(number, frozenset()):
                continue
            if known and sources and not any(number <= at <= max(users) for at in changed):
                yield _RecomputableStore(store, refs, sources)

    def _is_large(self, name: str) -> bool:
        buffer = self.table[name]
        return isinstance(buffer.extent, int) and buffer.nbytes >= MIN_RECOMPUTE_BYTES

    def take(self, number: int, offers: Sequence[_RecomputableStore]) -> bool:
        """Inline these stores into all their readers, if each reader can and memory traffic falls enough."""
        loop = self.steps[number]
        assert isinstance(loop, Loop), "only loops make offers"
        given = {offer.store.buffer: offer for offer in offers}
        users = sorted(set().union(*(self.readers[name] for name in given)))
        before = sum(self.table[name].nbytes * (1 + len(self.readers[name])) for name in given)
        after, told = 0, {}
        for user in users:
            reader = self.steps[user]
            assert isinstance(reader, Loop), "only loops are offered anything"
            mine = {name: offer for name, offer in given.items() if name in reader.reads}
            fresh = frozenset().union(*(offer.sources for offer in mine.values())) - reader.reads
            after += sum(self.table[name].typical_bytes for name in fresh)
            inlined = _inline_recomputed(reader, loop, mine)
            if inlined is None:
                return False
            told[user] = inlined
        if after > MAX_TRAFFIC_SHARE * before:
            return False
        for user, inlined in told.items():
            for name in inlined.reads:
                self.readers[name].add(user)
            self.steps[user] = inlined
        for name in given:
            self.readers[name].clear()
        return True


def _may_repeat(value: Value) -> bool:
    """Return whether a value depends only on elements at indices known in advance."""
    return is_at_known_place(value) and not isinstance(value, Reduce | Scan)


def _cost(value: Value) -> int:
    return OPS[value.op].cost if isinstance(value, Apply) else 0


def _inline_recomputed(reader: Loop, maker: Loop, offers: Mapping[str, _RecomputableStore]) -> Loop | None:
    """Replace loads of `offers` in `reader` by `maker`'s computation; return None if the indices do not line up."""
    body: list[Value] = []
    known: dict[Value, Ref] = {}
    refs: dict[Ref, Ref] = {}
    for old, value in enumerate(reader.body):
        if not isinstance(value, Load) or value.buffer not in offers:
            refs[old] = append_value(body, known, move_value(value, refs, {}, body, known))
            continue
        offer, mask = offers[value.buffer], value.mask
        moved = move_value(value, refs, {}, body, known)
        assert isinstance(moved, Load), "what is offered was stored elsewhere"
        relocate = _relocation(reader, value, moved.index, maker, offer)
        if relocate is None:
            return None
        again: dict[Ref, Ref] = {}
        for ref in offer.refs:
            copy = move_value(maker.body[ref], again, {}, body, known)
            if isinstance(copy, Load | IndexOf):
                copy = replace(copy, index=relocate(copy.index))
            if isinstance(copy, Load) and mask is not None:
                copy = replace(copy, mask=refs[mask])
            again[ref] = append_value(body, known, copy)
        found = again[offer.store.value]
        refs[old] = (
            found
            if mask is None
            else append_value(body, known, mask_value(found, refs[mask], value.dtype, body, known))
        )
    stores = tuple(replace(store, value=refs[store.value]) for store in reader.stores)
    if any(runtime_refs(store.index) for store in stores):
        return None
    told = replace(reader, body=tuple(body), stores=stores)
    fits = len(body) <= MAX_VALUES and len(told.reads | told.writes) <= MAX_BUFFERS
    return told if fits and divisions(told) <= divisions(reader) + divisions(maker) else None


def _relocation(
    reader: Loop, load: Load, address: Index, maker: Loop, offer: _RecomputableStore
) -> Callable[[Index], Index] | None:
    """Return how indices of `maker` become those that recompute what `load` reads at `address`; None if unknown.

    A gather reads where only a kernel knows. It can recompute what is made of elements at the same address alone, such
    as the logit of a row's class.
    """
    if runtime_refs(load.index):
        sources = [maker.body[ref] for ref in offer.refs]
        places = {value.index for value in sources if isinstance(value, Load | IndexOf)}
        fits = places == {offer.store.index} and not any(isinstance(value, IndexOf) for value in sources)
        return (lambda _: address) if fits else None
    bounds = ranges(reader)
    found = _places(reader, load, offer.store.index, ranges(maker), bounds)
    return None if found is None else lambda index: substitute(index, found, bounds)


def _places(reader: Loop, load: Load, index: Index, own: Ranges, bounds: Ranges) -> dict[str, Index] | None:
    """Return the maker's variables at which its store at `index` writes what `load` reads; None if unknown.

    `own` are the maker's ranges. A masked load reads stored elements only where the mask holds, so variables range over
    the part that the mask keeps.
    """
    left = {name: span for name, span in _spans(reader.body, load.mask, bounds).items() if span[0] < span[1]}
    within = {**bounds, **{name: high - low for name, (low, high) in left.items()}}
    target = substitute(load.index, {name: var(name) + low for name, (low, _) in left.items()}, within)
    places = solve(index, own, target, within)
    back = {name: var(name) - low for name, (low, _) in left.items()}
    return None if places is None else {name: substitute(place, back, bounds) for name, place in places.items()}


def _spans(body: Sequence[Value], mask: Ref | None, bounds: Ranges) -> dict[str, tuple[int, int]]:
    """Return the half-open range that a mask leaves of each variable, as far as its comparisons say."""
    found = {name: (0, size) for name, size in bounds.items() if isinstance(size, int)}
    for name, low, high in () if mask is None else _limits(body, mask, True):
        if name in found:
            first, behind_last = found[name]
            found[name] = max(first, low), min(behind_last, high)
    return {name: span for name, span in found.items() if span != (0, bounds[name])}


def _limits(body: Sequence[Value], ref: Ref, holds: bool) -> Iterator[tuple[str, int, int]]:
    """Yield (variable, lower bound, exclusive upper bound) of each comparison that must hold, or must not."""
    match body[ref]:
        case Apply("not", (arg,), _):
            yield from _limits(body, arg, not holds)
        case Apply("and" | "or" as op, args, _) if (op == "and") == holds:
            for arg in args:
                yield from _limits(body, arg, holds)
        case Apply("lt" | "le" | "gt" | "ge" as op, (left, right), _):
            found = turning_point(body[left], body[right])
            if found is None:
                return
            name, above = found[0], found[1] + (op in ("le", "gt"))  # below this, or from this on
            below = (op in ("lt", "le")) == holds
            yield (name, -UNLIMITED, above) if below else (name, above, UNLIMITED)


MAX_ROWS_BYTES = 1 << 20
"""Bytes of all rows: up to these, a kernel takes about as long as its launch."""
MAX_REPEATED_BYTES = 4 << 20
"""Bytes that all programs of the reader may read for it: from the L2 cache, they take a microsecond."""
Table = Mapping[str, Buffer]


def recompute_rows(program: Program, reads: Sequence[Access] = ()) -> Program:
    """Compute short rows with reductions again in the only loop that reads them, if each of its programs needs one.

    `reads`: inputs that are sharded parameters. The step that reads one first still does, on every rank.

    Guarantees: the same values, up to the order of sums.
    Relies on: every buffer has one writer, except inputs that are updated in place.
    """
    table = program.table
    steps = list(program.steps)
    kept = {view.buffer for view in program.outputs if isinstance(view, View)} | set(program.inputs)
    first = first_reads(program, reads)
    for place, maker in enumerate(steps):
        if place in first or not isinstance(maker, Loop) or not _makes_rows(maker, table, kept):
            continue
        (name,) = maker.writes
        readers = [number for number, step in enumerate(steps) if name in step.reads]
        if len(readers) != 1 or readers[0] < place or _changes(steps[place + 1 : readers[0]], maker):
            continue
        reader = steps[readers[0]]
        if isinstance(reader, Loop) and (joined := _joined(maker, reader, name, table)) is not None:
            steps[readers[0]] = joined
    changed = any(new is not old for new, old in zip(steps, program.steps, strict=True))
    return drop_internal(replace(program, steps=tuple(steps))) if changed else program


def _makes_rows(loop: Loop, table: Table, kept: set[str]) -> bool:
    """Does a GPU loop only compute rows of one small buffer, with reductions over each?"""
    if not loop_traits(loop, table).many_threads or loop.product is not None or len(loop.stores) != 1:
        return False
    store = loop.stores[0]
    if store.mode != "set" or store.buffer in kept or not any(isinstance(value, Reduce) for value in loop.body):
        return False
    if any(isinstance(value, Scan) or not is_at_known_place(value) for value in loop.body) or len(loop.inner) != 1:
        return False
    touched = [table[name] for name in loop.reads | loop.writes]
    return all(isinstance(b.extent, int) for b in touched) and sum(b.nbytes for b in touched) <= MAX_ROWS_BYTES


def _changes(steps: list[Step], maker: Loop) -> bool:
    """Does any of these steps write what the maker reads?"""
    return any(step.writes & maker.reads for step in steps)


def _joined(maker: Loop, reader: Loop, name: str, table: Table) -> Loop | None:
    """Return the reader with the maker's rows computed inside, or None where that is not possible or not cheap."""
    if not loop_traits(reader, table).many_threads or reader.product is not None or multiplies_few_rows(reader):
        return None
    if maker.inner != reader.inner or any(store.mode != "set" for store in reader.stores):
        return None
    loads = [value for value in reader.body if isinstance(value, Load) and value.buffer == name]
    if len({load.index for load in loads}) != 1 or any(load.mask is not None for load in loads):
        return None
    places = _row_of(maker, reader, loads[0].index)
    if places is None:
        return None
    joined = _inline(maker, reader, name, places)
    if len(joined.body) > MAX_VALUES or len(joined.reads | joined.writes) > MAX_BUFFERS:
        return None
    if divisions(joined) > divisions(reader):
        return None
    return joined if _is_cheap(make_plan(joined), maker, table) else None


def _row_of(maker: Loop, reader: Loop, index: Index) -> dict[str, Index] | None:
    """Return the maker's variables at the element that the reader loads: a row of the reader reads one of the maker."""
    bounds = ranges(reader)
    if runtime_refs(index):
        return None
    places = solve(maker.stores[0].index, ranges(maker), index, bounds)
    if places is None:
        return None
    inner, (along,) = set(inner_names(reader)), inner_names(maker)
    rows = [place for variable, place in places.items() if variable != along]
    aligned = places[along] == var(along) and not any(place.variables & inner for place in rows)
    return places if aligned else None


def _inline(maker: Loop, reader: Loop, name: str, places: Mapping[str, Index]) -> Loop:
    """Return the reader with the maker's values in front. Loads of `name` are the value that the maker stores."""
    body: list[Value] = []
    known: dict[Value, Ref] = {}
    bounds, refs = ranges(reader), dict[Ref, Ref]()
    for old, value in enumerate(maker.body):
        if isinstance(value, Load | IndexOf):
            value = replace(value, index=substitute(value.index, places, bounds))
        refs[old] = append_value(body, known, move_value(value, refs, {}, body, known))
    stored = {name: refs[maker.stores[0].value]}
    own: dict[Ref, Ref] = {}
    for old, value in enumerate(reader.body):
        own[old] = append_value(body, known, move_value(value, own, stored, body, known))
    stores = tuple(replace(store, value=own[store.value]) for store in reader.stores)
    origin = tuple(dict.fromkeys((*maker.origin, *reader.origin)))
    return replace(reader, body=tuple(body), stores=stores, origin=origin)


def _is_cheap(plan: TilePlan, maker: Loop, table: Table) -> bool:
    """Does a program hold its rows at once, and do all programs together read little again?"""
    if plan.kind != "rows" or plan.looped or not isinstance(plan.grid, int):
        return False
    rows = 1
    for size in maker.outer:
        assert isinstance(size, int), "sizes are known"
        rows *= size
    each = sum(table[name].nbytes for name in maker.reads) // max(rows, 1)
    return plan.grid * each <= MAX_REPEATED_BYTES
