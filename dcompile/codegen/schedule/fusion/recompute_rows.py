"""Recompute a few short rows in the GPU loop that sums their elements: softmax in attention's weighted sum of values.

A token attends to its cache by three kernels: scores, softmax, and the sum of values by weights. The softmax takes less
time than its launch. Each program of the sum reads a row of scores from the cache, and computes the weights itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.nest.contraction import multiplies_few_rows
from dcompile.codegen.nest.gpu_tiling import make_plan
from dcompile.codegen.nest.tile_plan import TilePlan
from dcompile.codegen.schedule.fusion.collective_order import Access, first_reads
from dcompile.codegen.schedule.fusion.fuse import drop_internal
from dcompile.codegen.schedule.fusion.iteration_space import divisions, solve
from dcompile.codegen.schedule.fusion.merge import MAX_BUFFERS, MAX_VALUES, append_value, move_value
from dcompile.device_traits import loop_traits
from dcompile.ir.analysis import inner_names, is_at_known_place, ranges, runtime_refs
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Index, substitute, var
from dcompile.ir.nodes import IndexOf, Load, Loop, Program, Reduce, Ref, Scan, Step, Value, View

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
