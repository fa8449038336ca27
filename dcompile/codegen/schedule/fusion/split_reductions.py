"""Split column reductions for GPUs: two stages, where a loop combines values over rows.

Each of many programs writes its partial results to memory, and a second, small loop reduces these in a fixed order. So
the result does not depend on timing, as it would with atomic additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.nest.loop_nest import Axis, Nest, may_exceed
from dcompile.codegen.nest.tile_columns import chunk_of, programs_wanted, sees_whole_rows, tile_sides
from dcompile.codegen.nest.tile_plan import (
    MAX_PERSISTENT_ELEMENTS,
    PROGRAMS,
    ROW_ELEMENTS,
    about,
    ceil_div,
    count,
    power_of_two,
)
from dcompile.codegen.schedule.fusion.collective_order import Access
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.iteration_space import position, radix, respace
from dcompile.codegen.schedule.fusion.merge import without
from dcompile.device_traits import loop_traits
from dcompile.ir.analysis import (
    ancestors,
    inner_names,
    is_row_store,
    outer_names,
    ranges,
    runtime_refs,
    store_operands,
)
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Div, Index, Size, as_index, size_product, var
from dcompile.ir.nodes import Apply, Const, Load, Loop, Program, Reduce, Ref, Scan, Step, Store, Value

UNKNOWN_ROWS = 64
"""Rows that a program covers where their number is symbolic, so the number of parts depends on the call."""


def split_column_reductions(program: Program) -> Program:
    """Split stores that combine values of all rows: each of many programs combines a run of rows.

    Only the order of summation changes. Loops on CPUs are unchanged.
    """
    table = dict(program.table)
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Loop) and loop_traits(step, table).many_threads and 0 not in (*step.outer, *step.inner):
            for loop in _detach_combining_stores(step, table):
                steps += _in_parts(loop, table)
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps), buffers=tuple(table.values()))


def refuse_after_split(program: Program, reads: Sequence[Access] = (), results: Sequence[Access] = ()) -> Program:
    """Fuse second stages with the loops that use their results. As `fuse`, for GPUs."""
    table = program.table
    loops = [step for step in program.steps if isinstance(step, Loop)]
    return fuse(program, reads, results) if any(loop_traits(loop, table).many_threads for loop in loops) else program


def axes_of(names: Iterable[str], sizes: Iterable[Size]) -> tuple[Axis, ...]:
    return tuple(Axis(name, size) for name, size in zip(names, sizes, strict=True))


def _nest(loop: Loop) -> Nest:
    rows = axes_of(outer_names(loop), loop.outer)
    elements = axes_of(inner_names(loop), loop.inner)
    row_stores = tuple(is_row_store(loop, store) for store in loop.stores)
    return Nest(rows, elements, None, loop.body, loop.stores, row_stores)


def _collects(nest: Nest, number: int) -> bool:
    """Can a program that loops over rows accumulate a combining store in registers?"""
    elements = tuple(axis for axis in nest.elements if axis.size != 1)
    return chunk_of(nest.stores[number], nest.rows, elements, nest.row_stores[number]) == 0


def _in_parts(loop: Loop, table: dict[str, Buffer]) -> list[Loop]:
    """Redirect every combining store to a row of a buffer of parts, and add a loop that reduces the parts."""
    nest = _nest(loop)
    combining = [n for n, store in enumerate(loop.stores) if store.mode != "set"]
    if not combining or not loop.outer or not all(_collects(nest, n) for n in combining):
        return [loop]
    chunk = rows_per_program(nest)
    parts = ceil_div(count(nest.rows), chunk)
    if parts == 1:
        return [loop]
    number = Index((((Div(position("i", loop.outer), chunk),), 1),))
    stores = list(loop.stores)
    bodies: dict[Size, tuple[list[Value], list[Store]]] = {}
    for n in combining:
        store = loop.stores[n]
        buffer = table[store.buffer]
        size = size_product(buffer.shape)
        name = new_buffer(f"{store.buffer}_parts", buffer.dtype, (parts, size), buffer.device, table)
        stores[n] = replace(store, buffer=name, index=number * size + store.index)
        body, sums = bodies.setdefault(size, ([], []))
        body.append(Load(name, var("j0") * size + var("i0"), buffer.dtype))
        if buffer.dtype in ("bfloat16", "float16"):
            body.append(Apply("cast", (len(body) - 1,), "float32"))
        body.append(Reduce(store.mode, len(body) - 1, body[-1].dtype))
        if buffer.dtype in ("bfloat16", "float16"):
            body.append(Apply("cast", (len(body) - 1,), buffer.dtype))
        sums.append(Store(store.buffer, var("i0"), len(body) - 1))
    finish = [
        Loop(f"{loop.name}_sum", (size,), (parts,), tuple(body), tuple(sums), loop.origin)
        for size, (body, sums) in bodies.items()
    ]
    return [replace(loop, stores=tuple(stores)), *finish]


def rows_per_program(nest: Nest) -> int:
    """Return how many rows a program covers."""
    rows, size = about(nest.rows), about(nest.elements)
    if not isinstance(count(nest.rows), int):
        return UNKNOWN_ROWS
    if sees_whole_rows(nest):
        return max(-(-rows // PROGRAMS), min(ROW_ELEMENTS // power_of_two(size), rows), 1)
    at_once, columns = tile_sides(nest)
    wanted = max(programs_wanted(nest) // -(-size // columns), 1)
    covered = max(-(-rows // wanted), min(4 * at_once, rows))
    return min(-(-covered // at_once) * at_once, rows)  # whole tiles need no mask


def _detach_combining_stores(loop: Loop, table: dict[str, Buffer]) -> list[Loop]:
    """Return the loop, and separate loops for combining stores that no loop over rows can accumulate."""
    saved: dict[Ref, str] = {}
    leaving = _uncollectable_stores(loop, table)
    loop, apart = _by_way_of_memory(loop, leaving, table)
    wrong = [n for n in leaving if loop.stores[n].mode != "set"]
    rows = position("i", loop.outer)
    apart += [_as_reduction(loop, n, saved, rows, table) for n in wrong]
    if not apart:
        return [loop]
    kept = tuple(store for n, store in enumerate(loop.stores) if n not in wrong)
    kept += tuple(Store(name, rows, ref) for ref, name in saved.items())
    rest = without(replace(loop, stores=kept), frozenset())
    return [*([rest] if rest is not None else []), *apart]


def _uncollectable_stores(loop: Loop, table: Mapping[str, Buffer]) -> list[int]:
    """Return the combining stores that must leave the loop, and can.

    A store at a run-time index cannot leave: it combines in memory with atomics, as do the stores that stay with it.
    """
    nest = _nest(loop)
    fits = not may_exceed(size_product(loop.inner), MAX_PERSISTENT_ELEMENTS) or not sees_whole_rows(nest)
    combining = [n for n, store in enumerate(loop.stores) if store.mode != "set"]
    wrong = [n for n in combining if not (fits and _collects(nest, n))]
    able = [n for n in combining if _has_own_loop(loop, loop.stores[n], table)]
    if set(wrong) <= set(able):
        return wrong
    traits = loop_traits(loop, table)
    return [n for n in able if not traits.has_atomic(loop.stores[n].mode, table[loop.stores[n].buffer].dtype)]


def _has_own_loop(loop: Loop, store: Store, table: Mapping[str, Buffer]) -> bool:
    """Can a combining store become a loop over its results?"""
    bounds = ranges(loop)
    kept = {name: bounds[name] for name in store.index.variables & bounds.keys()}
    if runtime_refs(store.index) or radix(store.index, kept) is None:
        return False
    return size_product(kept.values()) == size_product(table[store.buffer].shape)


def _by_way_of_memory(loop: Loop, numbers: list[int], table: dict[str, Buffer]) -> tuple[Loop, list[Loop]]:
    """Write values of combining stores to memory where no loop can recompute them; return the loops that combine them.

    This applies to values of a scan, and to all values of a loop that writes its own inputs.
    """
    rows, elements = position("i", loop.outer), position("j", loop.inner)
    stores, apart = list(loop.stores), list[Loop]()
    for n in numbers:
        store, row_store = loop.stores[n], is_row_store(loop, loop.stores[n])
        needed = ancestors(loop.body, store_operands(store), through_reduces=False)
        if not loop.reads & loop.writes and not any(isinstance(loop.body[ref], Scan) for ref in needed):
            continue
        dtype, shape = loop.body[store.value].dtype, loop.outer if row_store else (*loop.outer, *loop.inner)
        place = rows if row_store else rows * size_product(loop.inner) + elements
        name = new_buffer(f"{store.buffer}_values", dtype, shape, table[store.buffer].device, table)
        simple = replace(loop, body=(Load(name, place, dtype),), stores=(replace(store, value=0),))
        apart.append(_as_reduction(simple, 0, {}, rows, table))
        stores[n] = Store(name, place, store.value)
    return replace(loop, stores=tuple(stores)), apart


def _as_reduction(loop: Loop, number: int, saved: dict[Ref, str], rows: Index, table: dict[str, Buffer]) -> Loop:
    """Turn a combining store into a loop over its results; the first loop saves the row values that it needs."""
    store, bounds = loop.stores[number], ranges(loop)
    kept = store.index.variables & bounds.keys()
    row_store = is_row_store(loop, store)
    names = [name for name in bounds if bounds[name] != 1 and not (row_store and name[0] == "j")]
    outer = [name for name in names if name in kept]
    inner = [name for name in names if name not in kept]
    values = {name: as_index(0) for name in bounds}
    values |= {name: var(f"i{place}") for place, name in enumerate(outer)}
    values |= {name: var(f"j{place}") for place, name in enumerate(inner)}
    needed = ancestors(loop.body, store_operands(store), through_reduces=False)
    body: list[Value] = []
    for ref, value in enumerate(loop.body):
        if isinstance(value, Reduce):
            if ref in needed:
                if ref not in saved:
                    device = table[store.buffer].device
                    saved[ref] = new_buffer(f"{loop.name}_rows", value.dtype, loop.outer, device, table)
                body.append(Load(saved[ref], rows, value.dtype))
                continue
            value = Const(0, value.dtype)
        body.append(value)
    index = store.index
    if inner:
        body.append(Reduce(store.mode, store.value, body[store.value].dtype))
    result = len(body) - 1 if inner else store.value
    made = Loop(f"{loop.name}tile_columns", loop.outer, loop.inner, tuple(body), (Store(store.buffer, index, result),))
    made = replace(made, origin=loop.origin)
    sizes = tuple(bounds[name] for name in outer), tuple(bounds[name] for name in inner)
    found = without(respace(made, *sizes, values), frozenset())
    assert found is not None, f"{loop.name} has a store of nothing"
    return found


def new_buffer(name: str, dtype: str, shape: tuple[Size, ...], device: str, table: dict[str, Buffer]) -> str:
    """Add a buffer for intermediate results to the table; return its name."""
    unique, number = name, 0
    while unique in table:
        number += 1
        unique = f"{name}{number}"
    strides = tuple(size_product(shape[place + 1 :]) for place in range(len(shape)))
    table[unique] = Buffer(unique, dtype, shape, strides, device)
    return unique
