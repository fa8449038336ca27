"""Split reductions for GPUs into two stages: over rows, and along rows that are long and too few to occupy a GPU.

Each of many programs writes its partial results to memory, and a second, small loop reduces these in a fixed order. So
the result does not depend on timing, as it would with atomic additions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from dcompile.codegen.nest.gpu_tiling import (
    OUTER_ROWS,
    chunk_of,
    programs_wanted,
    sees_whole_rows,
    tile_rows,
    tile_sides,
)
from dcompile.codegen.nest.loop_nest import (
    Axis,
    Nest,
    expand,
    flatten_loop,
    may_exceed,
    renumber,
    renumber_values,
    stride,
)
from dcompile.codegen.nest.tile_plan import (
    MAX_PERSISTENT_ELEMENTS,
    PROGRAMS,
    ROW_ELEMENTS,
    about,
    ceil_div,
    count,
    power_of_two,
)
from dcompile.codegen.schedule.fusion.fuse import Access, fuse
from dcompile.codegen.schedule.fusion.iteration_space import coordinates, position, radix, respace
from dcompile.codegen.schedule.fusion.merge import without
from dcompile.device_traits import MULTIPROCESSORS, loop_traits
from dcompile.ir.analysis import (
    ancestors,
    inner_names,
    is_row_store,
    operands,
    outer_names,
    passes,
    ranges,
    row_values,
    runtime_refs,
    store_operands,
)
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Div, Index, Size, as_index, size_product, substitute, var
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Program, Reduce, Ref, Scan, Step, Store, Value
from dcompile.ir.ops import REDUCTIONS

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


MIN_SPLIT_ROW_ELEMENTS = 32768
"""Elements from which a row is split: one program reduces a shorter row in the time of another launch."""
PART_ELEMENTS = 2048
"""Fewest elements of a row for one program."""
MAX_SPLIT_PROGRAMS = 2 * PROGRAMS
"""Programs of four warps from which rows are not split: they have half of the warps that a GPU runs at a time."""
MAX_LOADED_ELEMENTS = 16 * PART_ELEMENTS
"""Elements from which a part is split further: more programs with less work each hide memory latency."""


def split_row_reductions(program: Program) -> Program:
    """Split long rows among several programs where rows are few.

    Only the order of summation changes. Loops on CPUs are unchanged.
    """
    table = dict(program.table)
    steps: list[Step] = []
    for step in program.steps:
        parts = row_parts(step) if isinstance(step, Loop) and loop_traits(step, table).many_threads else 1
        steps += _split_reductions(step, parts, table) if isinstance(step, Loop) and parts > 1 else [step]
    return replace(program, steps=tuple(steps), buffers=tuple(table.values()))


def row_parts(loop: Loop) -> int:
    """Return the number of parts for each row: 1 if rows alone occupy the GPU."""
    if not any(isinstance(value, Reduce) for value in loop.body) or any(store.mode != "set" for store in loop.stores):
        return 1
    if any(isinstance(value, Scan) for value in loop.body):
        return 1
    if any(store.buffer in loop.reads and is_row_store(loop, store) for store in loop.stores):
        return 1  # the loop over elements may read the old row values
    rows, size = size_product(loop.outer), size_product(loop.inner)
    if not (isinstance(rows, int) and isinstance(size, int)):
        return 1  # the decision needs static sizes
    if rows == 0 or size < MIN_SPLIT_ROW_ELEMENTS or rows >= MAX_SPLIT_PROGRAMS * OUTER_ROWS:
        return 1
    programs = _programs(loop, rows)
    if programs >= MAX_SPLIT_PROGRAMS:
        return 1
    most = max(size // PART_ELEMENTS, 1)
    wanted = min(max(PROGRAMS // programs, min(4 * PROGRAMS // programs, size // MAX_LOADED_ELEMENTS), 1), most)
    if programs >= MULTIPROCESSORS and (found := _parts_along_axis(loop, size, wanted)):
        return found
    # a nearby divisor saves masks
    near = [n for n in range(max(wanted // 2, 1), min(2 * wanted, most) + 1) if size % n == 0 and size // n % 8 == 0]
    return min(near, key=lambda n: abs(n - wanted)) if near else wanted


def _parts_along_axis(loop: Loop, size: int, wanted: int) -> int:
    """Return a number of parts that divides along the outermost of several axes, such as the batch; 0 if none fits.

    A part is one entry of that axis or an equal piece of it, so its positions need no division. A program then has it
    in registers, 16 elements in a thread.
    """
    outermost = loop.inner[0] if len(loop.inner) > 1 else 0
    if not isinstance(outermost, int) or not wanted <= outermost <= 4 * wanted:
        return 0
    whole = size // outermost
    fitting = [n for n in range(1, 5) if whole % n == 0 and whole // n <= MAX_PERSISTENT_ELEMENTS // 2]
    return outermost * (fitting[0] if fitting else 1)


def _programs(loop: Loop, rows: int) -> int:
    """Return the number of programs that have a loop's rows: a program has several where these are neighbours."""
    return rows if rows < MULTIPROCESSORS else -(-rows // tile_rows(flatten_loop(loop)).dims[0].block)


def _known(sizes: Iterable[Size]) -> tuple[int, ...]:
    """Return the sizes of a loop with split rows, all static."""
    found = tuple(sizes)
    ints = tuple(size for size in found if isinstance(size, int))
    assert len(ints) == len(found), "rows of symbolic size are not shared"
    return ints


def _split_reductions(loop: Loop, parts: int, table: dict[str, Buffer]) -> list[Loop]:
    """Split the loop's reductions into two stages, pass by pass; element stores that need them get a loop of their own.

    Others stay in the first stage, if it covers each row exactly.
    """
    inner = axes_of(inner_names(loop), _known(loop.inner))
    body, stores = expand(loop.body, loop.stores, list(inner))
    loop = replace(loop, body=body, stores=stores)
    rows, device = prod(_known(loop.outer)), table[stores[0].buffer].device
    known = passes(loop)
    live = ancestors(body, [ref for store in stores for ref in store_operands(store)])
    reduces = [ref for ref in sorted(live) if isinstance(body[ref], Reduce)]
    early = _early_stores(loop, parts)
    stores = tuple(store for store in stores if store not in early)
    done: dict[Ref, str] = {}
    read: dict[Ref, str] = {}
    steps: list[Loop] = []
    last = max(known[ref] for ref in reduces)
    for number in range(1, last + 1):
        now = [ref for ref in reduces if known[ref] == number]
        pieces = {r: new_buffer(f"{loop.name}_parts", body[r].dtype, (rows, parts), device, table) for r in now}
        results = {r: new_buffer(f"{loop.name}_rows", body[r].dtype, (rows,), device, table) for r in now}
        steps.append(_part(loop, parts, pieces, done, early if number == 1 else ()))
        at_end = [s for s in stores if is_row_store(loop, s)] if number == last else []
        if number == last:
            read = {
                r: new_buffer(f"{loop.name}_values", body[r].dtype, (rows,), device, table) for r in _read_by_rows(loop)
            }
        steps.append(_sum(loop, parts, pieces, done, results | read, at_end))
        done |= results
    elements = tuple(store for store in stores if not is_row_store(loop, store))
    place = position("i", _known(loop.outer))
    done |= read
    loaded = tuple(Load(done[ref], place, value.dtype) if ref in done else value for ref, value in enumerate(body))
    rest = without(replace(loop, body=loaded, stores=elements), frozenset())
    steps += [rest] if rest is not None else []
    dead = frozenset(name for name in done.values() if not any(name in step.reads for step in steps))
    for name in dead:
        del table[name]
    return [kept for step in steps if (kept := without(step, dead)) is not None]


def _early_stores(loop: Loop, parts: int) -> tuple[Store, ...]:
    """Return the element stores that need no reduction, and step through memory as what a part reads.

    A transposed store would write single elements, each to a memory sector of its own. If a later stage reads what the
    loop overwrites, the last one overwrites it.
    """
    if prod(_known(loop.inner)) % parts:
        return ()
    name = inner_names(loop)[-1]
    steps = {0, 1} | {stride(value.index, name) for value in loop.body if isinstance(value, Load)}
    elements = [store for store in loop.stores if not is_row_store(loop, store)]
    found: list[Store] = []
    for store in elements:
        below = ancestors(loop.body, store_operands(store))
        if stride(store.index, name) in steps and not any(isinstance(loop.body[ref], Reduce) for ref in below):
            found.append(store)
    rest = [ref for store in elements if store not in found for ref in store_operands(store)]
    later = ancestors(loop.body, rest, through_reduces=False)
    read = {value.buffer for ref, value in enumerate(loop.body) if isinstance(value, Load) and ref in later}
    again = not read.isdisjoint(loop.writes)
    return tuple(store for store in found if not (again and store.buffer in loop.reads))


def _read_by_rows(loop: Loop) -> list[Ref]:
    """Return what the loop over the elements reads in place of reductions: the row values computed from these.

    Then only the second stage computes them. Every program of the loop over elements would divide in float64 for a
    scale of float8 training. Empty where these values are more than the reductions.
    """
    body, of_row = loop.body, row_values(loop)
    stores = [store for store in loop.stores if not is_row_store(loop, store)]
    live = ancestors(body, [ref for store in stores for ref in store_operands(store)], through_reduces=False)
    used = {ref for at in live if not of_row[at] for ref in operands(body[at])}
    used |= {ref for store in stores for ref in store_operands(store)}
    below = {ref: _reductions_below(body, ref) for ref in sorted(used) if of_row[ref]}
    computed = [ref for ref, reduces in below.items() if reduces and not isinstance(body[ref], Reduce)]
    reduces = set[Ref]().union(*below.values())
    direct = [ref for ref in below if isinstance(body[ref], Reduce)]
    return computed if len(computed) + len(direct) <= len(reduces) else []


def _reductions_below(body: Sequence[Value], ref: Ref) -> set[Ref]:
    """Return the last reductions that a value depends on."""
    return {at for at in ancestors(body, [ref], through_reduces=False) if isinstance(body[at], Reduce)}


def _part(loop: Loop, parts: int, pieces: dict[Ref, str], done: dict[Ref, str], early: Sequence[Store] = ()) -> Loop:
    """Build the first stage: each row in `parts`; the last may be shorter, and positions beyond the row are masked.

    `early`: element stores that belong to it, if all parts are equal.
    """
    outer, inner, rank = _known(loop.outer), _known(loop.inner), len(loop.outer)
    size = prod(inner)
    length = -(-size // parts)
    cut = parts * length != size
    bounds = {f"i{k}": n for k, n in enumerate((*outer, parts))} | {"j0": length}
    flat = var(f"i{rank}") * length + var("j0")
    values = coordinates("j", inner, flat, bounds)
    rows, element = position("i", outer), row_values(loop)
    body: list[Value] = []
    if cut:
        body += [IndexOf(flat), Const(size, "int64"), Apply("lt", (0, 1), "bool")]
    number: dict[Ref, Ref] = {}
    stores: list[Store] = []
    for ref, value in enumerate(loop.body):
        if ref in done:
            value = Load(done[ref], rows, value.dtype)
        value = renumber(value, number)
        if isinstance(value, (Load, IndexOf)):
            value = replace(value, index=substitute(value.index, values, bounds))
        if cut and isinstance(value, Load) and not element[ref]:
            if value.mask is not None:
                body.append(Apply("and", (value.mask, 2), "bool"))
            value = replace(value, mask=2 if value.mask is None else len(body) - 1)
        if cut and isinstance(value, Reduce):
            body.append(Const(REDUCTIONS[value.op].identity(value.dtype), value.dtype))
            body.append(Apply("where", (2, value.arg, len(body) - 1), value.dtype))
            value = replace(value, arg=len(body) - 1)
        body.append(value)
        number[ref] = len(body) - 1
        if ref in pieces:
            stores.append(Store(pieces[ref], rows * parts + var(f"i{rank}"), number[ref]))
    for store in early:
        index = substitute(renumber_values(store.index, number), values, bounds)
        stores.append(replace(store, value=number[store.value], index=index))
    made = Loop(f"{loop.name}_part", (*outer, parts), (length,), tuple(body), tuple(stores), loop.origin)
    kept = without(made, frozenset())
    assert kept is not None, f"{loop.name} has reductions that nothing uses"
    return kept


def _sum(
    loop: Loop,
    parts: int,
    pieces: dict[Ref, str],
    done: dict[Ref, str],
    results: dict[Ref, str],
    row_stores: list[Store],
) -> Loop:
    """Build the second stage: each row's reductions from their parts and, in the last pass, the row's stores."""
    rows, of_row = position("i", _known(loop.outer)), row_values(loop)
    body: list[Value] = []
    number: dict[Ref, Ref] = {}
    for ref, value in enumerate(loop.body):
        if ref in pieces:
            body.append(Load(pieces[ref], rows * parts + var("j0"), value.dtype))
            assert isinstance(value, Reduce)
            body.append(Reduce(value.op, len(body) - 1, value.dtype))
        elif ref in done:
            body.append(Load(done[ref], rows, value.dtype))
        elif of_row[ref] and not isinstance(value, Reduce) and all(used in number for used in operands(value)):
            body.append(renumber(value, number))
        else:
            continue
        number[ref] = len(body) - 1
    stores = [Store(name, rows, number[ref]) for ref, name in results.items()]
    stores += [replace(s, value=number[s.value], index=renumber_values(s.index, number)) for s in row_stores]
    return Loop(f"{loop.name}_sum", loop.outer, (parts,), tuple(body), tuple(stores), loop.origin)
