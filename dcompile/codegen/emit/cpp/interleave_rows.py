"""Interleave rows (unroll-and-jam): sums of rows and columns mostly wait for memory, so several are read at once.

A running sum waits for its own additions, and those of other rows fill the time. The accumulator's dtype and the order
of each row stay the same. One row at a time took twice as long (float32, 1 MB, Zen 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import c_type
from dcompile.codegen.emit.cpp.parallelize import MAX_RUN
from dcompile.codegen.emit.cpp.plan import NO_SCANS, NestPlan
from dcompile.codegen.emit.cpp.prefetch import MIN_PREFETCH_BYTES
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.row_passes import print_row_values
from dcompile.codegen.emit.cpp.scans import (
    NONE_READY,
    SCAN_BLOCK,
    block_length,
    declare_elements,
    identity_of,
    scan_arguments,
    scan_step,
)
from dcompile.codegen.emit.cpp.vector_printer import VectorStep
from dcompile.codegen.emit.cpp.vectorize import ACCUMULATORS, MAX_WAITING_COST, WIDTH, has_vector, stores_vector
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import size_product
from dcompile.ir.nodes import Apply, Const, Load, Reduce, Ref

SUMMED_ROWS = 4
"""Rows summed together."""
ADDED_ROWS = 8
"""Rows added to column sums at a time, each a stream from memory."""
VECTORS_OF_ROW = 4
"""Vectors of each row with AVX-512: whole cache lines, one after another."""
MAX_L1_COLUMNS = 4096
"""Columns up to which sums stay in L1 from row to row."""


# --- sums of columns --------------------------------------------------------------------------------------------------


def interleave_column_sums(plan: NestPlan) -> NestPlan:
    """Add several rows at a time in kernels that only sum columns, with little work for each element."""
    nest = plan.nest
    if plan.in_place or not plan.row_axes or plan.pass_count > 1 or plan.pass_roots[0][0] or plan.kept or plan.tile:
        return plan
    (last, *others) = nest.elements
    if others or nest.lane or not isinstance(last.size, int) or last.size % WIDTH:
        return plan
    values = plan.vector_values(0)
    row = (nest.body[ref] for ref in plan.levels.live if not plan.levels.element[ref])
    adds_up = (
        len(plan.columns) == len(nest.stores)
        and all(store.mode == "sum" and store.index.variables == {last.name} for store in nest.stores)
        and all(isinstance(value, Load | Const) for value in row)
        and not any(isinstance(v, Load) and v.mask is not None for v in map(nest.body.__getitem__, values))
        and plan.cost(values) <= MAX_WAITING_COST
        and all(has_vector(plan, ref, 0, last.name) for ref in values)
        and all(stores_vector(plan, n, last.name) for n in plan.columns)
    )
    return replace(plan, interleaved_columns=True) if adds_up else plan


def print_added_rows(p: Printer, at: str, high: str, block: str) -> None:
    """Print the addition of several rows at a time to column sums, which are then read and written once for all rows.

    Several streams from memory are faster as well: 8 rows take 0.89 of the time of 4 in float32 (docs/lab/constants.md,
    K5).
    """
    (last,), columns, steps = p.nest.elements, p.plan.columns, VectorStep(p)
    assert isinstance(last.size, int), "columns of symbolic size are not added up together"
    loads = [value for ref in p.plan.vector_values(0) if isinstance(value := p.nest.body[ref], Load)]
    short = all(ITEMSIZE[load.dtype] == 2 for load in loads) and last.size <= MAX_L1_COLUMNS
    _open_add(steps, ", ".join(f"wide& x{n}" for n in columns))
    if short:
        steps.prefetch(0, [], last.name)
    for n in columns:
        p.line(f"x{n} += {steps.value(p.nest.stores[n].value)};")
    p.depth -= 1
    p.line("};")
    known = int(block) if block.isdigit() else None
    across = math.gcd(last.size // WIDTH, VECTORS_OF_ROW) if len(columns) <= 2 else 1
    p.line(f"constexpr int64 across = WIDTH == 16 ? {across} : 1;")
    if len(loads) == 1 and (known is None or known >= ADDED_ROWS):
        _print_some_rows(p, at, high, ADDED_ROWS, short)
    if len(loads) > 1 or known is None or known % ADDED_ROWS:
        _print_some_rows(p, at, high, SUMMED_ROWS, short)
    p.line("#endif")


def _open_add(steps: VectorStep, sums: str) -> None:
    """Open the function that adds some elements of a row to `sums`, its parameters; only on machines with vectors."""
    p, (last,) = steps.printer, steps.printer.nest.elements
    p.line("#ifdef VECTORS")
    p.open(f"const auto add = [=](int64 r, int64 {last.name}, {sums}) __attribute__((always_inline))")
    p.name_coordinates("r")
    print_row_values(p, 0)
    steps.declare(0, last.name, p.plan.vector_values(0))


def _print_some_rows(p: Printer, at: str, high: str, most: int, short: bool) -> None:
    """Print the loop over groups of `most` rows; `short` rows are added one at a time with AVX-512."""
    (last,), stores = p.nest.elements, p.nest.stores
    places = {n: f"&{name}[{p.index(stores[n].index)} + v * WIDTH]" for n, name in p.plan.columns.items()}
    p.line(f"constexpr int64 rows{most} = {f'WIDTH == 16 ? 1 : {most}' if short else most};")
    p.open(f"for (; {at} + rows{most} <= {high}; {at} += rows{most})")
    p.open(f"for (int64 {last.name} = 0; {last.name} < {last.size}; {last.name} += across * WIDTH)")
    p.line(f"wide {', '.join(f'x{n}[across]' for n in places)};")
    _print_across(p, *(f"x{n}[v] = load_float32({place});" for n, place in places.items()))
    p.line(f"#pragma GCC unroll {most}")
    p.open(f"for (int64 row = 0; row < rows{most}; row++)")
    _print_across(p, f"add({at} + row, {last.name} + v * WIDTH, {', '.join(f'x{n}[v]' for n in places)});")
    p.close()
    _print_across(p, *(f"put_float32({place}, x{n}[v]);" for n, place in places.items()))
    p.close(2)


def _print_across(p: Printer, *lines: str) -> None:
    """Print lines for each of several vectors of a row."""
    p.line(f"#pragma GCC unroll {VECTORS_OF_ROW}")
    p.open("for (int64 v = 0; v < across; v++)")
    for line in lines:
        p.line(line)
    p.close()


# --- sums of rows -----------------------------------------------------------------------------------------------------


def interleave_row_sums(plan: NestPlan) -> NestPlan:
    """Interleave rows in a kernel that only sums their elements.

    Four rows, each a stream from memory, took 0.86 of the time of one in float32 (docs/lab/constants.md, K6). Their
    accumulators occupy all sixteen registers of AVX2, so sums of squares gained nothing. With AVX-512, rows are read
    one after another, and each line is prefetched once. Where caches are far (Intel's servers), four rows are
    interleaved and prefetched.
    """
    nest, loop, (reduces, stores) = plan.nest, plan.vectors.get(0), plan.pass_roots[0]
    if plan.columns or plan.shared_columns or plan.tile or plan.kept or stores or len(nest.elements) != 1:
        return plan
    if loop is None or loop.accumulators == 1 or len(reduces) != 1:
        return plan
    if any(any(plan.pass_roots[later]) for later in range(1, plan.pass_count)):
        return plan
    (last,), count = nest.elements, size_product(axis.count for axis in plan.row_axes)
    if not isinstance(count, int) or count % SUMMED_ROWS or any(axis.tile != 1 for axis in nest.rows):
        return plan
    if not isinstance(last.size, int) or last.size % (ACCUMULATORS * WIDTH) or last.size > 2 * MAX_RUN:
        return plan
    early = (nest.body[r] for r in plan.levels.live if not plan.levels.element[r] and plan.levels.known[r] == 0)
    if not all(isinstance(value, Load | Const) for value in early) or not _is_stream(plan, plan.reduce(reduces[0])):
        return plan
    return replace(plan, interleaved_sum=reduces[0])


def _is_stream(plan: NestPlan, reduce: Reduce) -> bool:
    """Does a reduction add up a large tensor as it is in memory?"""
    load = _summed_load(plan, reduce)
    if reduce.op != "sum" or load is None or load.mask is not None:
        return False
    return plan.has_bytes(load.buffer, MIN_PREFETCH_BYTES)


def _summed_load(plan: NestPlan, reduce: Reduce) -> Load | None:
    """Return the load of a sum's elements, if nothing is done to them before: float32, or bfloat16."""
    match value := plan.nest.body[reduce.arg]:
        case Load(_, _, "float32"):
            return value
        case Apply("cast", (arg,), "float32") if isinstance(load := plan.nest.body[arg], Load):
            return load if load.dtype == "bfloat16" else None
    return None


def print_summed_rows(p: Printer, ref: Ref) -> Mapping[Ref, str]:
    """Print the sums of several rows, from `r_at` on, each as if alone; return the expression of row `r`'s sum."""
    (last,), n, load = p.nest.elements, p.number(ref), _summed_load(p.plan, p.plan.reduce(ref))
    assert load is not None, "rows that are added up as they are"
    loop = p.plan.vectors[0]
    steps, ways = VectorStep(p, loop.step), loop.accumulators
    kind, width = steps.type("float32"), steps.width
    _open_add(steps, f"{kind}& x{n}")
    place = p.place(load.buffer, load.index)
    asks = "caches_are_far" if loop.step else "WIDTH == 16"
    p.line(f"if ({asks}) ask_next<{width} * {ITEMSIZE[load.dtype]}>(&{place});")
    steps.accumulate(ref)
    p.depth -= 1
    p.line("};")
    p.line(f"{kind} x{n}[{SUMMED_ROWS}][{ways}];")
    for row in range(SUMMED_ROWS):
        p.line(f"fill(x{n}[{row}], 0.f);")
    p.line(f"constexpr int64 abreast = WIDTH == 16 && !caches_are_far ? 1 : {SUMMED_ROWS};")
    p.line(f"#pragma GCC unroll {SUMMED_ROWS}")
    p.open(f"for (int64 first = 0; first < {SUMMED_ROWS}; first += abreast)")
    p.open(f"for (int64 {last.name} = 0; {last.name} < {last.size}; {last.name} += {ways} * {width})")
    for way in range(ways):
        p.line(f"#pragma GCC unroll {SUMMED_ROWS}")
        p.line("for (int64 row = first; row < first + abreast; row++)")
        p.line(f"  add(r_at + row, {last.name} + {way} * {width}, x{n}[row][{way}]);")
    p.close(2)
    totals = ", ".join(f"total(x{n}[{row}])" for row in range(SUMMED_ROWS))
    p.line(f"const float32 z{n}[{SUMMED_ROWS}] = {{{totals}}};")
    p.line("#endif")
    return {ref: f"z{n}[r - r_at]"}


SCANNED_ROWS = 4
"""Rows at a time: an addition takes 3 cycles, and L1 holds inputs and outputs."""
MIN_INTERLEAVED_ROWS = 32
"""Rows from which they are interleaved: fewer are left to separate threads."""


def interleave_scans(plan: NestPlan) -> NestPlan:
    """Scan several rows at a time in kernels whose running sums take most of the time."""
    nest, rounds = plan.nest, plan.scans.get(0, NO_SCANS)
    if len(rounds.scans) != 1 or rounds.serial:
        return plan
    if nest.lane or plan.columns or plan.kept or plan.tile or len(nest.elements) != 1 or any(nest.row_stores):
        return plan
    if any(row.tile > 1 for row in nest.rows) or any(isinstance(value, Reduce) for value in nest.body):
        return plan
    if any(isinstance(value, Load) and value.mask is not None for value in nest.body):
        return plan
    many = may_exceed(size_product(axis.count for axis in nest.rows), MIN_INTERLEAVED_ROWS - 1)
    return replace(plan, interleaved_scans=True) if many else plan


def print_scanned_rows(p: Printer, parallel: bool) -> None:
    """Print the loop over groups of interleaved rows."""
    (last,), rounds = p.nest.elements, p.plan.scans[0]
    (scans,), rows = rounds.scans, p.size(size_product(axis.count for axis in p.nest.rows))
    length = block_length(p.plan)
    if parallel:
        p.parallel_for()
    p.open(f"for (int64 g = 0; g < {rows}; g += {SCANNED_ROWS})")
    p.line(f"const int64 g_end = g + {SCANNED_ROWS} < {rows} ? g + {SCANNED_ROWS} : {rows};")
    for ref in sorted(rounds.held):
        kind = c_type(p.nest.body[ref].dtype)
        p.line(f"alignas(64) {kind} all{p.number(ref)}[{SCANNED_ROWS * length}];")
    for ref in scans:
        start = ", ".join([identity_of(p.plan, ref)] * SCANNED_ROWS)
        p.line(f"{c_type(p.plan.scan(ref).dtype)} u{p.number(ref)}[{SCANNED_ROWS}] = {{{start}}};")
    blocked, at = may_exceed(last.size, SCAN_BLOCK), last.name
    if blocked:
        at = f"{last.name} - {last.name}_low"
        p.open_blocks(last, SCAN_BLOCK)
    ready = _print_arguments(p, scans, blocked, at)
    _print_scans(p, scans, blocked, at)
    _print_results(p, ready, blocked, at)
    p.close(1 + blocked)


def _open_rows(p: Printer) -> None:
    """Open the loop over the rows of a group, with each row's parts of the arrays."""
    p.open("for (int64 r = g; r < g_end; r++)")
    p.name_coordinates("r")
    for ref in sorted(p.plan.scans[0].held):
        n = p.number(ref)
        p.line(f"{c_type(p.nest.body[ref].dtype)}* const h{n} = all{n} + (r - g) * {block_length(p.plan)};")
    print_row_values(p, 0)


def _print_arguments(p: Printer, scans: tuple[Ref, ...], blocked: bool, at: str) -> frozenset[Ref]:
    """Compute the arguments of the scans; return the values that arrays then hold, scans included."""
    (last,) = p.nest.elements
    _open_rows(p)
    p.line("#pragma omp simd")
    p.open_axis(last, blocked)
    computed = declare_elements(p, 0, scan_arguments(p.plan, scans), NONE_READY, at)
    for ref in scans:
        p.line(f"h{p.number(ref)}[{at}] = {p.name(p.plan.scan(ref).arg)};")
    p.close(2)
    return (p.plan.scans[0].held & computed) | frozenset(scans)


def _print_scans(p: Printer, scans: Iterable[Ref], blocked: bool, at: str) -> None:
    """Advance all rows by one element at a time; an incomplete group runs row by row."""
    (last,), length = p.nest.elements, block_length(p.plan)
    for ref in scans:
        n, kind = p.number(ref), c_type(p.plan.scan(ref).dtype)
        p.open(f"if (g_end - g == {SCANNED_ROWS})")
        for row in range(SCANNED_ROWS):
            p.line(f"{kind} c{row} = u{n}[{row}];")
        p.open_axis(last, blocked)
        for row in range(SCANNED_ROWS):
            place = f"all{n}[{row * length} + {at}]"
            p.line(scan_step(p.plan, ref, f"c{row}", place))
            p.line(f"{place} = c{row};")
        p.close()
        for row in range(SCANNED_ROWS):
            p.line(f"u{n}[{row}] = c{row};")
        p.close()
        p.open("else for (int64 r = 0; r < g_end - g; r++)")
        p.open_axis(last, blocked)
        place = f"all{n}[r * {length} + {at}]"
        p.line(scan_step(p.plan, ref, f"u{n}[r]", place))
        p.line(f"{place} = u{n}[r];")
        p.close(2)


def _print_results(p: Printer, ready: frozenset[Ref], blocked: bool, at: str) -> None:
    """Compute and store the results of the scans."""
    (last,), stores = p.nest.elements, p.plan.pass_roots[0][1]
    _open_rows(p)
    if all(p.plan.can_store_at_once(n, last.name) for n in stores):
        p.line("#pragma omp simd")
    p.open_axis(last, blocked)
    declare_elements(p, 0, p.plan.targets(0), ready, at)
    for n in stores:
        p.store(n)
    p.close(2)
