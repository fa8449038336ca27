"""Print the passes over one row: element loops with their reductions, and the row values between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dcompile.codegen.emit.cpp.loop_conditions import nest_within, print_row_pointers
from dcompile.codegen.emit.cpp.ops import COMPOUND, c_type, clause, literal, watches_nan
from dcompile.codegen.emit.cpp.outer_vectorize import open_lane, print_lane_pass, read_row_values
from dcompile.codegen.emit.cpp.parallelize import MAX_RUN
from dcompile.codegen.emit.cpp.plan import BEFORE_ROWS, NO_SCANS, NestPlan, VectorLoop
from dcompile.codegen.emit.cpp.prefetch import cached_condition, next_gathered_rows, print_gather_prefetches
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.scans import SCAN_BLOCK, declare_elements, open_scans, print_rounds
from dcompile.codegen.emit.cpp.software_pipeline import LateRow
from dcompile.codegen.emit.cpp.transpose import close_tiles, open_tiles
from dcompile.codegen.emit.cpp.value_facts import PositionCounter
from dcompile.codegen.emit.cpp.vector_printer import NO_SUMS, print_vector_loop
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, Axis, may_exceed
from dcompile.ir.analysis import operands, store_operands
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import size_product
from dcompile.ir.nodes import Const, Load, Reduce, Ref
from dcompile.ir.ops import REDUCTIONS

MAX_BLOCKS = 1024
"""Most blocks of one long row for threads."""


def print_row(p: Printer, late: LateRow | None = None, sums: Mapping[Ref, str] = NO_SUMS) -> None:
    """Print all passes over one row (over `OUTER_VECTOR_ROWS` rows, if there is a lane).

    `late`: the last pass runs during the next row. `sums`: reductions that are known already.
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
    """Print the row values that are known after pass `number - 1`, and their stores."""
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
    """Print one pass over the elements of the row; `plain`: without its vector loop."""
    if not any(p.plan.pass_roots[number]):
        return
    if p.nest.lane:
        print_lane_pass(p, number)
    elif p.plan.shared_elements:
        _print_shared_pass(p, number)
    else:
        ElementPass(p, number, None if plain else p.plan.vectors.get(number)).print(late, sums)


class ElementPass:
    """Prints a pass of one thread over a row's elements, with its plain loop and its vector loop, if any."""

    def __init__(self, printer: Printer, number: int, vectors: VectorLoop | None) -> None:
        self.printer, self.number, self.vectors = printer, number, vectors
        plan = printer.plan
        (self.reduces, stores), self.last = plan.pass_roots[number], printer.nest.elements[-1]
        self.scans, self.counter = plan.scans.get(number, NO_SCANS), plan.counters.get(number)
        self.partial = _long_sums(plan, number)
        self.scalars = [n for n in stores if plan.is_scalar_column(n, self.last.name)]
        """Column reductions that all elements of the innermost loop share."""
        self.stores = [n for n in stores if n not in self.scalars]
        long = may_exceed(self.last.size, SCAN_BLOCK if self.scans.held else 2 * MAX_RUN)
        self.blocked = long and bool(self.partial or self.scans.held)
        self.at = f"{self.last.name} - {self.last.name}_low" if self.blocked else self.last.name
        """Position of an element in block arrays."""

    def print(self, late: LateRow | None, sums: Mapping[Ref, str]) -> None:
        """Print the pass's accumulators, its loops, and the use of the accumulators."""
        p, partial = self.printer, sorted(self.partial)
        for ref in self.reduces:
            _open_accumulator(p, ref, "w" if ref in partial else "s", wide=ref in partial)
        open_scans(p, self.number)
        open_tiles(p)
        print_row_pointers(p, self.number)
        for axis in p.nest.elements[:-1]:
            p.open_axis(axis)
        if self.blocked:
            p.open_blocks(self.last, SCAN_BLOCK if self.scans.held else MAX_RUN)
        ready = print_rounds(p, self.number, self.last, self.blocked, self.at)
        for ref in partial:
            _open_accumulator(p, ref, "s", wide=False)
        self._open_scalars()
        self._print_loops(ready, late, sums)
        self._close_scalars()
        for ref in partial:
            p.line(f"w{p.number(ref)} += s{p.number(ref)};")
        p.close(len(p.nest.elements) - 1 + self.blocked)
        close_tiles(p)
        for ref in partial:
            p.line(f"const float64 s{p.number(ref)} = w{p.number(ref)};")

    def _open_scalars(self) -> None:
        p = self.printer
        for n in self.scalars:
            store = p.nest.stores[n]
            dtype = p.plan.table[store.buffer].dtype
            p.line(f"{c_type(dtype)} c{n} = {literal(REDUCTIONS[store.mode].identity(dtype), dtype)};")

    def _close_scalars(self) -> None:
        p = self.printer
        for n in self.scalars:
            store = p.nest.stores[n]
            place = f"{p.plan.columns[n]}[{p.index(store.index)}]"
            p.line(p.combine(store.mode, place, f"c{n}", p.plan.table[store.buffer].dtype))

    def _print_loops(self, ready: frozenset[Ref], late: LateRow | None, sums: Mapping[Ref, str]) -> None:
        """Print the innermost loops: the vector loop, and the plain loop or its parts; or one copy."""
        p, plan, number, last = self.printer, self.printer.plan, self.number, self.last
        low, high = p.bounds(last, self.blocked)
        if self.counter:
            self._open_counter(self.counter, low)
        start = low
        if self.vectors:
            beside = late.print_beside if late and number == late.late.host else None
            start = print_vector_loop(p, number, self.blocked, sums, beside)
        if plan.copies and plan.streamed.issuperset(self.stores):
            _print_copy(p, self.stores, last, (low, high))
        elif number in plan.pieces:
            for begin, end in plan.pieces[number]:
                p.plan = replace(plan, nest=nest_within(plan.nest, last, begin, end))
                self._print_loop(str(begin), str(end), ready)
            p.plan = plan
        else:
            self._print_loop(start, high, ready)
        if self.vectors and start == low:
            p.line("#endif")
        p.close(bool(self.counter))

    def _open_counter(self, counter: PositionCounter, low: str) -> None:
        """Start an int32 counter that stands for a value of the pass."""
        p = self.printer
        p.open("")
        p.line(f"int32 place = {low};")
        for ref in sorted(set(counter.matches.values())):
            p.line(f"const int32 e{p.number(ref)} = as_place({p.name(ref)});")

    def _print_loop(self, begin: str, end: str, ready: frozenset[Ref]) -> None:
        """Print the plain loop over elements, or a part of it. `ready`: values in block arrays."""
        p, plan, last, number = self.printer, self.printer.plan, self.last, self.number
        stores = (*self.stores, *self.scalars)
        if not self.scans.serial and all(plan.can_store_at_once(n, last.name) for n in stores):
            _simd_pragma(p, self.reduces, self.scalars, self.counter)
        p.open(f"for (int64 {last.name} = {begin}; {last.name} < {end}; {last.name}++)")
        for load in next_gathered_rows(plan, number, last):
            p.line(f"__builtin_prefetch(&{p.place(load.buffer, load.index)});")
        declare_elements(p, number, plan.targets(number), ready, self.at, self.counter)
        _combine_elements(p, self.reduces, self.stores)
        for n in self.scalars:
            store = p.nest.stores[n]
            p.line(p.combine(store.mode, f"c{n}", p.name(store.value), plan.table[store.buffer].dtype))
        if self.counter:
            p.line("place++;")
        p.close()


def _print_copy(p: Printer, stores: Iterable[int], last: Axis, bounds: tuple[str, str]) -> None:
    """Copy elements with streaming stores."""
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
    """Return float32 sums too long, or too nested, for one vector of accumulators."""
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
    """Print an element's reductions, then its stores."""
    for ref in reduces:
        value = p.name(p.plan.reduce(ref).arg)
        p.accumulate(ref, value)
        if watches_nan(p.plan.reduce(ref)):
            p.line(f"n{p.number(ref)} |= {value} != {value};")
    for n in stores:
        p.store(n)


# --- one long row -----------------------------------------------------------------------------------------------------


def _print_shared_pass(p: Printer, number: int) -> None:
    """Print a pass over one long row; blocks depend only on its length, so the result is independent of threads."""
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
    """Return length and number of blocks of one long row, and the largest number."""
    if isinstance(axis.size, int):
        block = MAX_RUN * math.ceil(axis.size / (MAX_RUN * MAX_BLOCKS))
        return block, math.ceil(axis.size / block), math.ceil(axis.size / block)
    size, most = p.size(axis.size), MAX_RUN * MAX_BLOCKS
    if "block" not in p.declared:
        p.declared.add("block")
        p.line(f"const int64 block = {size} <= {most} ? {MAX_RUN} : ({size} + {most - 1}) / {most} * {MAX_RUN};")
        p.line(f"const int64 blocks = ({size} + block - 1) / block;")
    return "block", "blocks", MAX_BLOCKS
