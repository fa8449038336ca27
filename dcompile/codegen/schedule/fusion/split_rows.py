"""Split row reductions for GPUs: two stages, where rows are long and too few to occupy a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from dcompile.codegen.nest.loop_nest import expand, flatten_loop, renumber, renumber_values, stride
from dcompile.codegen.nest.tile_plan import MAX_PERSISTENT_ELEMENTS, PROGRAMS
from dcompile.codegen.nest.tile_rows import OUTER_ROWS, tile_rows
from dcompile.codegen.schedule.fusion.iteration_space import coordinates, position
from dcompile.codegen.schedule.fusion.merge import without
from dcompile.codegen.schedule.fusion.split_reductions import axes_of, new_buffer
from dcompile.device_traits import MULTIPROCESSORS, loop_traits
from dcompile.ir.analysis import ancestors, inner_names, is_row_store, operands, passes, row_values, store_operands
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import Size, size_product, substitute, var
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Program, Reduce, Ref, Scan, Step, Store, Value
from dcompile.ir.ops import REDUCTIONS

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
