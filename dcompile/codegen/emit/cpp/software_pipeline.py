"""Software pipelining: the last pass over a row runs during the next row, so that its stores overlap with computation.

The last pass over a row only writes, and the processor waits for memory in it. In the pass before, with its
exponentials, memory waits for the processor. A thread keeps the last pass's inputs of its row, and runs each of its
steps together with one over the next row. Cross-entropy with its gradient took 0.68 of the time (128 rows of 32000 in
float32, one thread; 0.73 with two, Zen 4). Each step reads the kept values before the next row overwrites them, so one
copy suffices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dcompile.codegen.emit.cpp.ops import c_type
from dcompile.codegen.emit.cpp.plan import BEFORE_ROWS, LatePass, NestPlan
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.emit.cpp.vector_printer import VectorStep, step_width
from dcompile.codegen.emit.cpp.vectorize import STEP_ELEMENTS, has_vectors, step_of_pass, vectorize
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.ir.index import size_product
from dcompile.ir.nodes import Scan

_NAMES = re.compile(r"\b[tie]\d+\b")
"""Pattern of names that a row may have declared."""


def pipeline_last_pass(plan: NestPlan) -> NestPlan:
    """Run the last pass of a row during the next row, if it only stores, and if it and its host use whole vectors."""
    nest, number = plan.nest, plan.pass_count - 1
    if not plan.parallel or nest.lane or plan.columns or plan.shared_columns or plan.tile or len(nest.elements) != 1:
        return plan
    several = may_exceed(size_product(axis.size for axis in nest.rows), 1)
    if not several or any(row.tile != 1 for row in nest.rows) or any(isinstance(v, Scan) for v in nest.body):
        return plan
    (last,), (reduces, stores), needed = nest.elements, plan.pass_roots[number], plan.pass_values(number)
    if reduces or not stores or not plan.selected_rows.isdisjoint(needed):
        return plan
    kept = tuple(ref for ref in needed if BEFORE_ROWS < plan.kept.get(ref, number) < number)
    hosts = {plan.kept[ref] for ref in kept}
    if len(hosts) != 1 or not _can_host(plan, host := min(hosts)) or not isinstance(last.size, int):
        return plan
    step = step_of_pass(plan, number)
    if STEP_ELEMENTS[step] > STEP_ELEMENTS[plan.vectors[host].step]:
        return plan
    if last.size % STEP_ELEMENTS[step] or not has_vectors(plan, number):
        return plan
    late = LatePass(number, host, kept, step)
    # the last pass, perhaps the busiest, is no longer one of its row: its host prefetches the next row
    return vectorize(replace(plan, late=late, next_row_pass=host if plan.next_row else None))


def _can_host(plan: NestPlan, number: int) -> bool:
    """Does a pass go through the row in whole vectors, one after another?"""
    (last,), loop = plan.nest.elements, plan.vectors.get(number)
    if loop is None or number in plan.counters or not plan.selected_rows.isdisjoint(plan.new_values(number)):
        return False
    whole = isinstance(last.size, int) and last.size % STEP_ELEMENTS[loop.step] == 0
    return whole and loop.accumulators == 1 and loop.guard == "VECTORS"


@dataclass(frozen=True, slots=True)
class LateRow:
    """Prints the last pass of the waiting row: as a function that each step of the next row calls."""

    printer: Printer
    late: LatePass
    given: tuple[tuple[str, str, str], ...]
    """Parameters of the function: type, name, and the value at the end of the row's own passes."""

    def print_beside(self, step: str, at: str) -> None:
        """In a step of the host pass: run the last pass of the waiting row on the same elements."""
        p, width = self.printer, step_width(self.late.step)
        p.open("if (waits)")
        for n in range(STEP_ELEMENTS[step] // STEP_ELEMENTS[self.late.step]):
            p.line(self._call(f"{at} + {n} * {width}" if n else at))
        p.close()

    def leave(self) -> None:
        """In place of the last pass: let the row wait. Without vectors, the pass follows here."""
        p = self.printer
        p.line("#ifdef VECTORS")
        for _, name, value in self.given:
            p.line(f"{name}_behind = {value};")
        p.line("waits = true;")
        p.line("#else")

    def close(self) -> None:
        """After a thread's rows: run the last pass of the last row."""
        p, (last,), width = self.printer, self.printer.nest.elements, step_width(self.late.step)
        p.line("#ifdef VECTORS")
        loop = f"for (int64 {last.name} = 0; {last.name} < {last.size}; {last.name} += {width})"
        p.line(f"if (waits) {loop} {self._call(last.name)}")
        p.line("#endif")

    def _call(self, at: str) -> str:
        return f"behind({', '.join([at, *(f'{name}_behind' for _, name, _ in self.given)])});"


def open_late_row(p: Printer) -> LateRow | None:
    """Before a thread's rows: declare the values kept of the row before, and a step of its last pass."""
    if (late := p.plan.late) is None:
        return None
    (last,), stores = p.nest.elements, p.plan.pass_roots[late.number][1]
    for ref in late.kept:
        p.declare_kept(ref, last.size)

    def head(lines: Iterable[str]) -> str:
        parameters = [f"int64 {last.name}", *(f"{kind} {name}" for kind, name, _ in _given(p, lines))]
        kept = "".join(f", &r{p.number(ref)}" for ref in late.kept)
        return f"const auto behind = [={kept}]({', '.join(parameters)})"

    steps = VectorStep(p, late.step, p.plan.counters.get(late.number))
    p.line("#ifdef VECTORS")
    given = _given(p, p.local_function(head, lambda: steps.print(late.number, last.name, [], stores)))
    p.line("bool waits = false;")
    for kind, name, _ in given:
        p.line(f"{kind} {name}_behind = 0;")
    p.line("#endif")
    return LateRow(p, late, given)


def _given(p: Printer, lines: Iterable[str]) -> tuple[tuple[str, str, str], ...]:
    """Return the row values that these lines use."""
    used = {name for line in lines for name in _NAMES.findall(line)}
    rows = [("int64", axis.name, axis.name) for axis in p.nest.rows if axis.name in used]
    levels = p.plan.levels
    refs = sorted(ref for ref in levels.live if not levels.element[ref] and ref in p.numbers)
    values = [(c_type(p.nest.body[ref].dtype), p.name(ref), p.name(ref)) for ref in refs]
    places = [("int32", f"e{p.number(ref)}", f"as_place({p.name(ref)})") for ref in refs]
    return (*rows, *(one for one in (*values, *places) if one[1] in used))
