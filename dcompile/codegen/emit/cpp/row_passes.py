"""Print the passes over one row: element loops with their reductions, and the row values between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.emit.cpp.masked_rows import print_row_pointers
from dcompile.codegen.emit.cpp.ops import COMPOUND, c_type, clause, literal, watches_nan
from dcompile.codegen.emit.cpp.outer_vectorize import open_lane, print_lane_pass, read_row_values
from dcompile.codegen.emit.cpp.parallelize import MAX_RUN
from dcompile.codegen.emit.cpp.plan import BEFORE_ROWS, NO_SCANS, NestPlan
from dcompile.codegen.emit.cpp.prefetch import next_gathered_rows
from dcompile.codegen.emit.cpp.prefetch_gather import print_gather_prefetches
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.scans import SCAN_BLOCK, declare_elements, open_scans, print_rounds
from dcompile.codegen.emit.cpp.software_pipeline import LateRow
from dcompile.codegen.emit.cpp.split_loops import nest_within
from dcompile.codegen.emit.cpp.stream_stores import cached_condition
from dcompile.codegen.emit.cpp.transpose import close_tiles, open_tiles
from dcompile.codegen.emit.cpp.value_facts import PositionCounter
from dcompile.codegen.emit.cpp.vector_printer import NO_SUMS, print_vector_loop
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, Axis, may_exceed
from dcompile.ir.analysis import operands, store_operands
from dcompile.ir.index import size_product
from dcompile.ir.nodes import ITEMSIZE, Const, Load, Reduce, Ref
from dcompile.ir.ops import REDUCTIONS

MAX_BLOCKS = 1024
"""Blocks at most that threads take of one long row."""


def print_row(p: Printer, late: LateRow | None = None, sums: Mapping[Ref, str] = NO_SUMS) -> None:
    """All passes over one row (over `OUTER_VECTOR_ROWS` rows, if there is a lane).

    `late`: the last pass runs beside the next row. `sums`: reductions that are known already.
    """
    print_gather_prefetches(p)
    count, early = size_product(axis.size for axis in p.nest.elements), late.late.kept if late else ()
    for ref in (ref for ref, number in p.plan.kept.items() if number > BEFORE_ROWS and ref not in early):
        p.declare_kept(ref, count)
    for number in range(p.plan.pass_count + 1):
        print_row_values(p, number)
        if late and number == late.late.number:
            late.leave()
            _print_pass(p, number, None, NO_SUMS, plain=True)
            p.line("#endif")
        elif number < p.plan.pass_count:
            _print_pass(p, number, late, sums)
    if not isinstance(count, int):
        for ref in p.plan.kept:
            p.line(f"if (r{p.number(ref)} != r{p.number(ref)}_local) free(r{p.number(ref)});")


# --- row values -------------------------------------------------------------------------------------------------------


def print_row_values(p: Printer, number: int) -> None:
    """Row values that become known after pass `number - 1`, and their stores."""
    body, levels, lane = p.nest.body, p.plan.levels, p.nest.lane
    rows = (ref for ref in sorted(levels.live) if not levels.element[ref] and levels.known[ref] == number)
    here = [ref for ref in rows if not isinstance(body[ref], Const)]
    stores = [n for n, row in enumerate(p.nest.row_stores) if row and levels.store_at[n] == number]
    if not here and not stores:
        return
    if lane is None:
        for ref in here:
            _name_result(p, ref) if isinstance(body[ref], Reduce) else p.declare(ref)
        for n in stores:
            p.store(n)
        return
    for ref in here:
        p.line(f"alignas(64) {c_type(body[ref].dtype)} l{p.number(ref)}[{OUTER_VECTOR_ROWS}];")
    open_lane(p, simd=all(p.plan.can_store_at_once(n, lane.name) for n in stores))
    used = {ref for value in here for ref in operands(body[value])}
    used |= {ref for n in stores for ref in store_operands(p.nest.stores[n])}
    read_row_values(p, used - set(here))
    for ref in here:
        if isinstance(body[ref], Reduce):
            p.line(f"const {c_type(body[ref].dtype)} {p.name(ref)} = s{p.number(ref)}[l];")
        else:
            p.declare(ref)
        p.line(f"l{p.number(ref)}[l] = {p.name(ref)};")
    for n in stores:
        p.store(n)
    p.close()


def _name_result(p: Printer, ref: Ref) -> None:
    """Name the result of a reduction, after its pass."""
    reduce, s = p.plan.reduce(ref), f"s{p.number(ref)}"
    result = f'n{p.number(ref)} ? __builtin_nan("") : {s}' if watches_nan(reduce) else s
    dtype = c_type(reduce.dtype)
    p.line(f"const {dtype} {p.name(ref)} = {dtype}({result});")


# --- a pass over the elements of a row --------------------------------------------------------------------------------


def _print_pass(p: Printer, number: int, late: LateRow | None, sums: Mapping[Ref, str], *, plain: bool = False) -> None:
    """One pass over the elements of the row; a `plain` one is for machines without vectors."""
    if not any(p.plan.pass_roots[number]):
        return
    if p.nest.lane:
        print_lane_pass(p, number)
    elif p.plan.shared_elements:
        _print_shared_pass(p, number)
    else:
        _print_element_pass(p, number, late, sums, plain)


def _print_element_pass(p: Printer, number: int, late: LateRow | None, sums: Mapping[Ref, str], plain: bool) -> None:
    """A pass of one thread: what it accumulates in, its loops, and what becomes of that."""
    (reduces, _), last = p.plan.pass_roots[number], p.nest.elements[-1]
    held, partial = p.plan.scans.get(number, NO_SCANS).held, _long_sums(p.plan, number)
    for ref in reduces:
        _open_accumulator(p, ref, "w" if ref in partial else "s", wide=ref in partial)
    open_scans(p, number)
    open_tiles(p)
    print_row_pointers(p, number)
    for axis in p.nest.elements[:-1]:
        p.open_axis(axis)
    long = may_exceed(last.size, SCAN_BLOCK if held else 2 * MAX_RUN)
    blocked = long and bool(partial or held)
    if blocked:
        p.open_blocks(last, SCAN_BLOCK if held else MAX_RUN)
    at = f"{last.name} - {last.name}_low" if blocked else last.name
    ready = print_rounds(p, number, last, blocked, at)
    for ref in sorted(partial):
        _open_accumulator(p, ref, "s", wide=False)
    _print_innermost(p, number, blocked, ready, at, None if plain else late, sums, plain)
    for ref in sorted(partial):
        p.line(f"w{p.number(ref)} += s{p.number(ref)};")
    p.close(len(p.nest.elements) - 1 + blocked)
    close_tiles(p)
    for ref in sorted(partial):
        p.line(f"const float64 s{p.number(ref)} = w{p.number(ref)};")


def _print_innermost(
    p: Printer,
    number: int,
    blocked: bool,
    ready: frozenset[Ref],
    at: str,
    late: LateRow | None,
    sums: Mapping[Ref, str],
    plain: bool,
) -> None:
    """The innermost loops of a pass: in vectors, and the plain one; or one copy."""
    plan, stores, last = p.plan, p.plan.pass_roots[number][1], p.nest.elements[-1]
    low, high = p.bounds(last, blocked)
    scalars = [n for n in stores if plan.is_scalar_column(n, last.name)]
    for n in scalars:
        store = p.nest.stores[n]
        dtype = plan.table[store.buffer].dtype
        p.line(f"{c_type(dtype)} c{n} = {literal(REDUCTIONS[store.mode].identity(dtype), dtype)};")
    counter = plan.counters.get(number)
    if counter:
        _open_counter(p, counter, low)
    start = low
    vectors = number in plan.vectors and not plain
    if vectors:
        beside = late.print_beside if late and number == late.late.host else None
        start = print_vector_loop(p, number, blocked, sums, beside)
    if plan.copies and plan.streamed.issuperset(stores):
        _print_copy(p, stores, last, (low, high))
    elif number in plan.pieces:
        for begin, end in plan.pieces[number]:
            p.plan = replace(plan, nest=nest_within(plan.nest, last, begin, end))
            _print_loop(p, number, (str(begin), str(end)), ready, at, counter, scalars)
        p.plan = plan
    else:
        _print_loop(p, number, (start, high), ready, at, counter, scalars)
    if vectors and start == low:
        p.line("#endif")
    p.close(bool(counter))
    for n in scalars:
        store = p.nest.stores[n]
        place = f"{plan.columns[n]}[{p.index(store.index)}]"
        p.line(p.combine(store.mode, place, f"c{n}", plan.table[store.buffer].dtype))


def _open_counter(p: Printer, counter: PositionCounter, low: str) -> None:
    """Begin to count in an int32, where that stands for a value of the pass."""
    p.open("")
    p.line(f"int32 place = {low};")
    for ref in sorted(set(counter.matches.values())):
        p.line(f"const int32 e{p.number(ref)} = as_place({p.name(ref)});")


def _print_loop(
    p: Printer,
    number: int,
    bounds: tuple[str, str],
    ready: frozenset[Ref],
    at: str,
    counter: PositionCounter | None,
    scalars: Sequence[int],
) -> None:
    """The plain loop over elements, or a part of it."""
    plan, (reduces, stores), last = p.plan, p.plan.pass_roots[number], p.nest.elements[-1]
    serial = plan.scans.get(number, NO_SCANS).serial
    if not serial and all(plan.can_store_at_once(n, last.name) for n in stores):
        _simd_pragma(p, reduces, scalars, counter)
    p.open(f"for (int64 {last.name} = {bounds[0]}; {last.name} < {bounds[1]}; {last.name}++)")
    for load in next_gathered_rows(plan, number, last):
        p.line(f"__builtin_prefetch(&{p.place(load.buffer, load.index)});")
    declare_elements(p, number, plan.targets(number), ready, at, counter)
    _combine_elements(p, reduces, [n for n in stores if n not in scalars])
    for n in scalars:
        store = p.nest.stores[n]
        p.line(p.combine(store.mode, f"c{n}", p.name(store.value), plan.table[store.buffer].dtype))
    if counter:
        p.line("place++;")
    p.close()


def _print_copy(p: Printer, stores: Iterable[int], last: Axis, bounds: tuple[str, str]) -> None:
    """Write elements past the caches, as they are read."""
    (low, high), tile = bounds, p.plan.tile
    p.line(f"const int64 {last.name} = {low};")
    for n in stores:
        store = p.nest.stores[n]
        load = p.nest.body[store.value]
        assert isinstance(load, Load)
        read = p.place(load.buffer, load.index)
        if tile and store.value in tile.loads:
            read = f"x{p.number(store.value)}[{tile.place}]"
        size = f"({high} - {last.name}) * {ITEMSIZE[load.dtype]}"
        given = f"(&{p.place(store.buffer, store.index)}, &{read}, {size});"
        unless = f"if ({cached}) __builtin_memcpy{given} else " if (cached := cached_condition(p.plan, n)) else ""
        p.line(f"{unless}stream_bytes{given}")


def _simd_pragma(p: Printer, reduces: Iterable[Ref], scalars: Iterable[int], counter: PositionCounter | None) -> None:
    clauses = []
    for ref in reduces:
        reduce = p.plan.reduce(ref)
        clauses.append(f"reduction({clause(reduce)}:s{p.number(ref)})")
        if watches_nan(reduce):
            clauses.append(f"reduction(|:n{p.number(ref)})")
    for n in scalars:
        if p.nest.stores[n].mode not in COMPOUND:
            return
        clauses.append(f"reduction({COMPOUND[p.nest.stores[n].mode]}:c{n})")
    if counter:
        clauses.append("linear(place:1)")
    p.line(" ".join(("#pragma omp simd", *clauses)))


def _long_sums(plan: NestPlan, number: int) -> frozenset[Ref]:
    """Float sums too long, or too nested, for one vector of accumulators."""
    long = len(plan.nest.elements) > 1 or may_exceed(plan.nest.elements[-1].size, 2 * MAX_RUN)
    sums = (r for r in plan.pass_roots[number][0] if plan.reduce(r).op == "sum" and plan.reduce(r).dtype == "float32")
    return frozenset(sums) if long else frozenset()


def _open_accumulator(p: Printer, ref: Ref, prefix: str, wide: bool) -> None:
    """Declare the accumulator of a reduction; a `wide` one is float64."""
    reduce = p.plan.reduce(ref)
    identity = literal(REDUCTIONS[reduce.op].identity(reduce.dtype), reduce.dtype)
    kind = "float64" if wide else "int32" if reduce.dtype == "bool" else c_type(reduce.dtype)
    p.line(f"{kind} {prefix}{p.number(ref)} = {identity};")
    if watches_nan(reduce):
        p.line(f"int32 n{p.number(ref)} = 0;")


def _combine_elements(p: Printer, reduces: Iterable[Ref], stores: Iterable[int]) -> None:
    """What becomes of an element: reductions, then stores."""
    for ref in reduces:
        value = p.name(p.plan.reduce(ref).arg)
        p.accumulate(ref, value)
        if watches_nan(p.plan.reduce(ref)):
            p.line(f"n{p.number(ref)} |= {value} != {value};")
    for n in stores:
        p.store(n)


# --- one long row -----------------------------------------------------------------------------------------------------


def _print_shared_pass(p: Printer, number: int) -> None:
    """A pass over one long row; the blocks depend on its length only, so the result on no number of threads."""
    (axis,), (reduces, stores), wide = p.nest.elements, p.plan.pass_roots[number], _long_sums(p.plan, number)
    block, blocks, most = _blocks_of_row(p, axis)
    for ref in reduces:
        kind = "int32" if p.plan.reduce(ref).dtype == "bool" else c_type(p.plan.reduce(ref).dtype)
        p.line(f"{kind} p{p.number(ref)}[{most}];")
        if watches_nan(p.plan.reduce(ref)):
            p.line(f"int32 m{p.number(ref)}[{most}];")
    p.parallel_for()
    p.open(f"for (int64 b = 0; b < {blocks}; b++)")
    p.line(f"const int64 {axis.name}_low = b * {block};")
    last = f"b == {blocks - 1 if isinstance(blocks, int) else f'{blocks} - 1'}"
    p.line(f"const int64 {axis.name}_high = {last} ? {p.size(axis.size)} : {axis.name}_low + {block};")
    for ref in reduces:
        _open_accumulator(p, ref, "s", wide=False)
    _simd_pragma(p, reduces, [], None)
    p.open_axis(axis, bounded=True)
    declare_elements(p, number, p.plan.targets(number))
    _combine_elements(p, reduces, stores)
    p.close()
    for ref in reduces:
        p.line(f"p{p.number(ref)}[b] = s{p.number(ref)};")
        if watches_nan(p.plan.reduce(ref)):
            p.line(f"m{p.number(ref)}[b] = n{p.number(ref)};")
    p.close()
    for ref in reduces:
        _open_accumulator(p, ref, "s", wide=ref in wide)
    if reduces:
        p.open(f"for (int64 b = 0; b < {blocks}; b++)")
        for ref in reduces:
            p.accumulate(ref, f"p{p.number(ref)}[b]")
            if watches_nan(p.plan.reduce(ref)):
                p.line(f"n{p.number(ref)} |= m{p.number(ref)}[b];")
        p.close()


def _blocks_of_row(p: Printer, axis: Axis) -> tuple[int | str, int | str, int]:
    """Length and number of blocks of one long row, and their greatest number."""
    if isinstance(axis.size, int):
        block = MAX_RUN * math.ceil(axis.size / (MAX_RUN * MAX_BLOCKS))
        return block, math.ceil(axis.size / block), math.ceil(axis.size / block)
    size, most = p.size(axis.size), MAX_RUN * MAX_BLOCKS
    if "block" not in p.declared:
        p.declared.add("block")
        p.line(f"const int64 block = {size} <= {most} ? {MAX_RUN} : ({size} + {most - 1}) / {most} * {MAX_RUN};")
        p.line(f"const int64 blocks = ({size} + block - 1) / block;")
    return "block", "blocks", MAX_BLOCKS
