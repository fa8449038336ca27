"""Scans within a row, one block at a time: first vectorized arguments, then the scan, one element after another.

A pass with scans takes several rounds over each block. A round computes the arguments of the next scans and runs these
over the block in memory; the last round is the pass's own. So everything around a scan is vectorized, and a row of any
length needs no more memory than a block. The order of combination is the row's, as in eager mode, on any number of
threads and with any fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dcompile.codegen.emit.cpp.keep_values import MIN_KEEP_COST
from dcompile.codegen.emit.cpp.ops import SPELLING, c_type, literal
from dcompile.codegen.emit.cpp.plan import NO_SCANS, NestPlan, ScanRounds
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.value_facts import PositionCounter
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, Axis, cone_cost
from dcompile.ir.analysis import operands
from dcompile.ir.nodes import Apply, Load, Ref, Scan
from dcompile.ir.ops import OPS, SCANS

MAX_SERIAL_COST = 8
"""Additions for each element up to which a pass with scans is one loop, one element after another."""
SCAN_BLOCK = 1024
"""Elements of a block: 8 KB of float64 for each scan, so that a few scans and their arguments share L1."""
NONE_READY: frozenset[Ref] = frozenset()


# --- the decision -----------------------------------------------------------------------------------------------------


def block_scans(plan: NestPlan) -> NestPlan:
    """Decide the rounds of each pass with scans."""
    if plan.nest.lane or not any(isinstance(value, Scan) for value in plan.nest.body):
        return plan
    found = {number: _scan_rounds(plan, number) for number in range(plan.pass_count)}
    return replace(plan, scans={number: rounds for number, rounds in found.items() if rounds.scans})


def _scan_rounds(plan: NestPlan, number: int) -> ScanRounds:
    """Return the scans of a pass in rounds: a scan follows those that its argument depends on."""
    body, depth = plan.nest.body, dict[Ref, int]()
    targets = plan.targets(number)
    needed, new = plan.needed(number, targets), plan.new_values(number)
    scans = [ref for ref in new if isinstance(body[ref], Scan)]
    if not scans:
        return NO_SCANS
    if _is_serial(plan, needed, scans):
        return ScanRounds((tuple(scans),), serial=True)
    for ref in needed:
        depth[ref] = max((depth.get(operand, 0) for operand in operands(body[ref])), default=0) + (ref in scans)
    groups = tuple(tuple(r for r in scans if depth[r] == d) for d in range(1, max(depth.values()) + 1))
    held = frozenset(scans)
    computed = [{*plan.needed(number, scan_arguments(plan, group), held)} for group in groups]
    computed.append({*plan.needed(number, targets, held)})
    for ref in new:
        again = sum(ref in values for values in computed) > 1
        if again and not isinstance(body[ref], Load) and cone_cost(ref, body, held) >= MIN_KEEP_COST:
            held |= {ref}
    return ScanRounds(groups, held)


def _is_serial(plan: NestPlan, needed: Iterable[Ref], scans: Iterable[Ref]) -> bool:
    """Is there so little work besides the scans that it may wait for them? Float sums alone take too long."""
    cost = sum(OPS[value.op].cost for ref in needed if isinstance(value := plan.nest.body[ref], Apply))
    slow = all(plan.scan(ref).op not in ("max", "min") and "float" in plan.scan(ref).dtype for ref in scans)
    return cost <= MAX_SERIAL_COST and not slow


def scan_arguments(plan: NestPlan, scans: Iterable[Ref]) -> list[Ref]:
    """Return the arguments of scans."""
    return [plan.scan(ref).arg for ref in scans]


# --- the text ---------------------------------------------------------------------------------------------------------


def open_scans(p: Printer, number: int) -> None:
    """Declare a block's memory, and the values that scans carry from block to block."""
    rounds = p.plan.scans.get(number, NO_SCANS)
    for ref in sorted(rounds.held):
        p.declare_once(f"h{p.number(ref)}", p.nest.body[ref].dtype, f"[{block_length(p.plan)}]")
    for ref in (ref for group in rounds.scans for ref in group):
        carried = p.declare_once(f"u{p.number(ref)}", p.plan.scan(ref).dtype)
        p.line(f"{carried} = {identity_of(p.plan, ref)};")


def block_length(plan: NestPlan) -> int:
    """Return the elements of a block array."""
    size = plan.nest.elements[-1].size
    return max(min(size, SCAN_BLOCK) if isinstance(size, int) else SCAN_BLOCK, 1)


def print_rounds(p: Printer, number: int, axis: Axis, blocked: bool, at: str) -> frozenset[Ref]:
    """Print all rounds over a block but the last; return the values that block arrays then hold."""
    ready, rounds = NONE_READY, p.plan.scans.get(number, NO_SCANS)
    for group in () if rounds.serial else rounds.scans:
        p.line("#pragma omp simd")
        p.open_axis(axis, blocked)
        computed = declare_elements(p, number, scan_arguments(p.plan, group), ready, at)
        for ref in group:
            p.line(f"h{p.number(ref)}[{at}] = {p.name(p.plan.scan(ref).arg)};")
        p.close()
        p.open_axis(axis, blocked)
        for ref in group:
            carried, place = f"u{p.number(ref)}", f"h{p.number(ref)}[{at}]"
            p.line(scan_step(p.plan, ref, carried, place))
            p.line(f"{place} = {carried};")
            if ref in p.plan.kept:
                p.line(f"r{p.number(ref)}[{p.place_in_row()}] = {carried};")
        p.close()
        ready |= (rounds.held & computed) | frozenset(group)
    return ready


def declare_elements(
    p: Printer,
    number: int,
    targets: Sequence[Ref],
    ready: frozenset[Ref] = NONE_READY,
    at: str = "",
    counter: PositionCounter | None = None,
) -> frozenset[Ref]:
    """Declare the element values of a pass that `targets` depend on, and store held values at `at`.

    `ready`: values in block arrays already. Returns the declared values.
    """
    plan, place = p.plan, p.place_in_row()
    held = plan.scans.get(number, NO_SCANS).held
    needed = plan.needed(number, targets, ready)
    for ref in needed:
        kind, name, n = c_type(plan.nest.body[ref].dtype), p.name(ref), p.number(ref)
        if plan.kept.get(ref, number) < number:
            p.line(f"const {kind} {name} = r{n}[{place}];")
        elif ref in ready:
            p.line(f"const {kind} {name} = h{n}[{at}];")
        else:
            if isinstance(plan.nest.body[ref], Scan):
                advance_scan(p, ref, f"u{n}")
            else:
                p.declare(ref, counter)
            if ref in plan.kept:
                p.line(f"r{n}[{place}] = {name};")
            if ref in held:
                p.line(f"h{n}[{at}] = {name};")
    return frozenset(needed)


def advance_scan(p: Printer, ref: Ref, carried: str) -> None:
    """Declare the next value of a scan, from the value it carries."""
    p.line(scan_step(p.plan, ref, carried, p.name(p.plan.scan(ref).arg)))
    p.line(f"const {c_type(p.plan.scan(ref).dtype)} {p.name(ref)} = {carried};")


def scan_step(plan: NestPlan, ref: Ref, carried: str, value: str) -> str:
    """Return a statement that combines a value with the one that a scan carries."""
    scan = plan.scan(ref)
    combine = SCANS[scan.op].combine
    assert combine is not None
    return f"{carried} = {c_type(scan.dtype)}({SPELLING[combine].format(carried, value, dtype=scan.dtype)});"


def identity_of(plan: NestPlan, ref: Ref) -> str:
    """Return the initial value of a scan."""
    scan = plan.scan(ref)
    return literal(SCANS[scan.op].identity(scan.dtype), scan.dtype)


def open_row_scans(p: Printer, needed: Iterable[Ref]) -> list[Ref]:
    """Declare the values that each scan carries from element to element, for `OUTER_VECTOR_ROWS` rows together."""
    scans = [ref for ref in needed if isinstance(p.nest.body[ref], Scan)]
    for ref in scans:
        carried = p.declare_once(f"u{p.number(ref)}", p.plan.scan(ref).dtype, f"[{OUTER_VECTOR_ROWS}]")
        p.line(f"for (int64 l = 0; l < {OUTER_VECTOR_ROWS}; l++) {carried}[l] = {identity_of(p.plan, ref)};")
    return scans
