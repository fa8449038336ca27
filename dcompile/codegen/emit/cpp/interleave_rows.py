"""Interleave rows (unroll-and-jam): sums of rows and columns mostly wait for memory, so several are read at once.

A running sum waits for its own additions, and those of other rows fill the time. The accumulator's dtype and the order
of each row stay the same. One row at a time took twice as long (float32, 1 MB, Zen 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from dcompile.codegen.emit.cpp.parallelize import MAX_RUN
from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.emit.cpp.prefetch import MIN_PREFETCH_BYTES
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.row_passes import print_row_values
from dcompile.codegen.emit.cpp.vector_printer import VectorStep
from dcompile.codegen.emit.cpp.vectorize import ACCUMULATORS, MAX_WAITING_COST, WIDTH, has_vector, stores_vector
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import size_product
from dcompile.ir.nodes import Const, Load, Reduce, Ref

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
    """Interleave rows in a kernel that only sums their float32 elements; those of bfloat16 took 1.13 times as long.

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
    """Return the load of a sum's float32 elements, if nothing is done to them before."""
    value = plan.nest.body[reduce.arg]
    return value if isinstance(value, Load) and value.dtype == "float32" else None


def print_summed_rows(p: Printer, ref: Ref) -> Mapping[Ref, str]:
    """Print the sums of several rows, from `r_at` on, each as if alone; return the expression of row `r`'s sum."""
    (last,), n, load = p.nest.elements, p.number(ref), _summed_load(p.plan, p.plan.reduce(ref))
    assert load is not None, "rows that are added up as they are"
    loop = p.plan.vectors[0]
    steps, ways = VectorStep(p, loop.step), loop.accumulators
    kind, width = steps.type("float32"), steps.width
    _open_add(steps, f"{kind}& x{n}")
    p.line(f"if (WIDTH == 16) ask_next<{width} * {ITEMSIZE[load.dtype]}>(&{p.place(load.buffer, load.index)});")
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
