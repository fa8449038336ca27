"""Interleave running sums of several rows: each waits for its own additions, and the others fill the time.

The accumulator's dtype and the order of each row stay the same. One row at a time took twice as long (float32, 1 MB,
Zen 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import c_type
from dcompile.codegen.emit.cpp.plan import NO_SCANS, NestPlan
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
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.ir.index import size_product
from dcompile.ir.nodes import Load, Reduce, Ref

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
