"""Vectorize along rows: passes over `OUTER_VECTOR_ROWS` rows together, where adjacent elements are in different rows.

Each row value is an array over the rows, and so is each accumulator. Passes over floats use vectors along the rows, two
at a time. A reduction takes several elements of each row before the next rows, so that accumulators stay in registers
meanwhile. A sum over a middle dimension took 0.6 of the time, softmax 0.67, in float16 0.3 (Zen 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import FLOATS, c_type, literal
from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.emit.cpp.prefetch import far_loads
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.scans import advance_scan, open_row_scans
from dcompile.codegen.emit.cpp.vector_printer import VectorStep
from dcompile.codegen.emit.cpp.vectorize import STEP_ELEMENTS, gains_from_vectors, has_vector, stores_vector
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, Axis
from dcompile.ir.analysis import operands
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import substitute, var
from dcompile.ir.nodes import Const, Ref
from dcompile.ir.ops import REDUCTIONS

GROUP = 8
"""Elements of each row that a reduction takes at a time: the longest run of float32 additions.

Runs are added up in float64.
"""
COLLECTED = {"sum": "{0} + {1}", "prod": "{0} * {1}", "max": "greater({1}, {0})", "min": "lesser({1}, {0})"}
"""Vectorized reductions: the accumulator combined with one more value. A maximum stays NaN from the first NaN on."""


# --- the decision -----------------------------------------------------------------------------------------------------


def vectorize_rows(plan: NestPlan) -> NestPlan:
    """Write passes over several rows in vectors along the rows, where that is possible and faster."""
    if plan.nest.lane is None:
        return plan
    lane = plan.nest.lane.name
    return replace(plan, row_vectors=frozenset(n for n in range(plan.pass_count) if _gains(plan, n, lane)))


def _gains(plan: NestPlan, number: int, name: str) -> bool:
    """Can a pass be written in vectors along the rows, and is it faster then?"""
    (reduces, stores), needed = plan.pass_roots[number], plan.pass_values(number)
    body, element = plan.nest.body, plan.levels.element
    return (
        (bool(reduces) or any(gains_from_vectors(plan, ref) for ref in needed))
        and all(plan.reduce(ref).op in COLLECTED and plan.reduce(ref).dtype == "float32" for ref in reduces)
        and all(has_vector(plan, ref, number, name) for ref in needed)
        and all(stores_vector(plan, n, name) for n in stores)
        and all(element[ref] or body[ref].dtype in {"bool", *FLOATS} for ref in _used(plan, number))
    )


def _used(plan: NestPlan, number: int) -> set[Ref]:
    """Return the values that a pass uses."""
    targets = plan.targets(number)
    return {ref for value in plan.needed(number, targets) for ref in operands(plan.nest.body[value])} | {*targets}


# --- the text ---------------------------------------------------------------------------------------------------------


def lane_of(p: Printer) -> Axis:
    """Return the variable of the rows that are computed together."""
    assert p.nest.lane is not None
    return p.nest.lane


def open_lane(p: Printer, simd: bool, start: str = "0") -> None:
    """Open the loop over the rows computed together."""
    lane = lane_of(p)
    if simd:
        p.line("#pragma omp simd")
    p.open(f"for (int64 l = {start}; l < {lane.name}_high - {lane.name}_low; l++)")
    p.line(f"const int64 {lane.name} = {lane.name}_low + l;")


def read_row_values(p: Printer, refs: Iterable[Ref], vectors: VectorStep | None = None) -> None:
    """Read row values from their arrays over the rows, one or a vector of each."""
    for ref in sorted(refs):
        value = p.nest.body[ref]
        if p.plan.levels.element[ref] or isinstance(value, Const):
            continue
        kind, place = c_type(value.dtype), f"l{p.number(ref)}[l]"
        if vectors:
            moved = vectors.moved("bool" if value.dtype == "bool" else "float32")
            kind, place = vectors.type(value.dtype), f"load_{moved}(&{place})"
        p.line(f"const {kind} {p.name(ref)} = {place};")


def print_lane_pass(p: Printer, number: int) -> None:
    """Print one pass over several rows at a time."""
    for ref in p.plan.pass_roots[number][0]:
        reduce, name = p.plan.reduce(ref), f"s{p.number(ref)}"
        kind = "float64" if _is_long(p, ref) else c_type(reduce.dtype)
        p.line(f"alignas(64) {kind} {name}[{OUTER_VECTOR_ROWS}];")
        identity = literal(REDUCTIONS[reduce.op].identity(reduce.dtype), reduce.dtype)
        p.line(f"for (int64 l = 0; l < {OUTER_VECTOR_ROWS}; l++) {name}[l] = {identity};")
    if number in p.plan.row_vectors:
        _print_groups(p, number)
        return
    scans = open_row_scans(p, p.plan.pass_values(number))
    for axis in p.nest.elements:
        p.open_axis(axis)
    _print_plain(p, number, scans)
    p.close(len(p.nest.elements))


def _is_long(p: Printer, ref: Ref) -> bool:
    """Is this reduction accumulated in float64?"""
    return p.plan.reduce(ref).op == "sum" and p.plan.reduce(ref).dtype == "float32"


def _print_plain(p: Printer, number: int, scans: Sequence[Ref], start: str = "0") -> None:
    """Print the plain loop over the rows, for one element of each."""
    reduces, stores = p.plan.pass_roots[number]
    open_lane(p, simd=all(p.plan.can_store_at_once(n, lane_of(p).name) for n in stores), start=start)
    read_row_values(p, _used(p.plan, number))
    for ref in p.plan.pass_values(number):
        if ref in scans:
            advance_scan(p, ref, f"u{p.number(ref)}[l]")
        else:
            p.declare(ref)
    for ref in reduces:
        reduce, place = p.plan.reduce(ref), f"s{p.number(ref)}[l]"
        p.line(p.combine(reduce.op, place, p.name(reduce.arg), "float64" if _is_long(p, ref) else reduce.dtype))
    for n in stores:
        p.store(n)
    p.close()


def _print_groups(p: Printer, number: int) -> None:
    """Print a pass: groups of elements of each row where it reduces, otherwise one element at a time."""
    last = p.nest.elements[-1]
    if not p.plan.pass_roots[number][0]:
        for axis in p.nest.elements:
            p.open_axis(axis)
        _print_vectors(p, number, "")
        p.close(len(p.nest.elements))
        return
    for axis in p.nest.elements[:-1]:
        p.open_axis(axis)
    first, high = f"{last.name}_first", p.bounds(last, False)[1]
    p.open(f"for (int64 {first} = 0; {first} < {high}; {first} += {GROUP})")
    divides = isinstance(last.size, int) and last.size % GROUP == 0
    end = f"{first} + {GROUP}" if divides else f"{first} + {GROUP} < {high} ? {first} + {GROUP} : {high}"
    p.line(f"const int64 {last.name}_end = {end};")
    _print_vectors(p, number, f"for (int64 {last.name} = {first}; {last.name} < {last.name}_end; {last.name}++)")
    p.close(len(p.nest.elements))


def _print_vectors(p: Printer, number: int, each: str) -> None:
    """Print the vector loop over the rows, and the plain one for remaining rows or machines without vectors.

    `each`: the loop over elements inside, if there are several.
    """
    (reduces, stores), lane, steps = p.plan.pass_roots[number], lane_of(p), VectorStep(p, "two")
    whole = isinstance(lane.size, int) and lane.size % STEP_ELEMENTS["two"] == 0
    if not whole:
        p.line("int64 l_at = 0;")
    p.line("#ifdef VECTORS")
    at, begin = ("l", "int64 l = 0") if whole else ("l_at", "")
    p.open(f"for ({begin}; {at} + PAIR <= {lane.name}_high - {lane.name}_low; {at} += PAIR)")
    if not whole:
        p.line("const int64 l = l_at;")
    p.line(f"const int64 {lane.name} = {lane.name}_low + l;")
    read_row_values(p, _used(p.plan, number), steps)
    for ref in reduces:
        _open_collected(steps, ref)
    if each:
        p.open(each)
    _prefetch_elements(p, number)
    steps.declare(number, lane.name, p.plan.pass_values(number))
    for ref in reduces:
        _collect(steps, ref)
    for n in stores:
        steps.store(n)
    p.close(bool(each))
    for ref in reduces:
        _put_collected(steps, ref)
    p.close()
    p.line("#else" if whole else "#endif")
    if each:
        p.open(each)
    _print_plain(p, number, [], start="0" if whole else "l_at")
    p.close(bool(each))
    if whole:
        p.line("#endif")


def _prefetch_elements(p: Printer, number: int) -> None:
    """Prefetch the next elements of the same rows where caches are far.

    Rows are so close that hardware prefetch misses them: a sum over a middle dimension took 0.94 of the time
    (docs/lab/constants.md, K7).
    """
    last = p.nest.elements[-1].name
    for load in far_loads(p.plan, number, lane_of(p).name):
        place = p.place(load.buffer, substitute(load.index, {last: var(last) + GROUP}, {}))
        p.line(f"ask_if_far<PAIR * {ITEMSIZE[load.dtype]}>(&{place});")


def _open_collected(steps: VectorStep, ref: Ref) -> None:
    p = steps.printer
    n = p.number(ref)
    start = f"{steps.widen}(0.f)" if _is_long(p, ref) else f"load_{steps.moved('float32')}(&s{n}[l])"
    p.line(f"{steps.type('float32')} x{n} = {start};")
    if p.plan.reduce(ref).op in ("max", "min"):
        p.line(f"{steps.type('bool')} y{n} = {{}};")


def _collect(steps: VectorStep, ref: Ref) -> None:
    p, reduce = steps.printer, steps.printer.plan.reduce(ref)
    n, value = p.number(ref), steps.value(reduce.arg)
    p.line(f"x{n} = {COLLECTED[reduce.op].format(f'x{n}', value)};")
    if reduce.op in ("max", "min"):
        p.line(f"y{n} = y{n} | ({value} != {value});")


def _put_collected(steps: VectorStep, ref: Ref) -> None:
    p, op = steps.printer, steps.printer.plan.reduce(ref).op
    n, x = p.number(ref), f"x{p.number(ref)}"
    if op in ("max", "min"):
        x = f'select_(y{n}, {steps.widen}(__builtin_nanf("")), {x})'
    put = "add_two_float64" if _is_long(p, ref) else f"put_{steps.moved('float32')}"
    p.line(f"{put}(&s{n}[l], {x});")
