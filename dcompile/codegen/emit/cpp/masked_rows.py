"""Select rows of masked loads by a pointer: one decision for each row replaces a condition at each element."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import memory_type
from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.emit.cpp.printer import Printer
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import ZERO, substitute
from dcompile.ir.nodes import Load, Ref

ZEROS_BYTES = 16384
"""Length of the library's `zeros`, which rows with a false mask are read from if they are no longer."""


def select_masked_rows(plan: NestPlan) -> NestPlan:
    """Select once a row whether a masked load reads memory or zeros."""
    if plan.nest.lane or plan.shared_elements or len(plan.nest.elements) > 1:
        return plan
    used = (ref for number in range(plan.pass_count) for ref in plan.new_values(number))
    found = frozenset(ref for ref in used if _is_whole_row(plan, ref))
    return replace(plan, selected_rows=found) if found else plan


def _is_whole_row(plan: NestPlan, ref: Ref) -> bool:
    """Is this a load of a whole row, with one mask for all of it?"""
    load, (last,) = plan.nest.body[ref], plan.nest.elements
    if not isinstance(load, Load) or load.mask is None or plan.levels.element[load.mask]:
        return False
    if may_exceed(last.size, ZEROS_BYTES // ITEMSIZE[load.dtype]):
        return False
    unit = load.index.coefficient(last.name)
    varies = any(plan.levels.element[int(v[1:])] for v in load.index.variables if v[0] == "v")
    return unit is not None and unit.constant == 1 and not varies


def print_row_pointers(p: Printer, number: int) -> None:
    """Point to the rows that a pass is the first to read, or to zeros."""
    last = p.nest.elements[-1]
    for ref in p.plan.pass_values(number):
        load, once = p.nest.body[ref], f"row of {ref}"
        if ref not in p.plan.selected_rows or once in p.declared:
            continue
        assert isinstance(load, Load) and load.mask is not None
        p.declared.add(once)
        kind = memory_type(load.dtype)
        start = p.place(load.buffer, substitute(load.index, {last.name: ZERO}, {}))
        row = f"{p.name(load.mask)} ? &{start} : (const {kind}*)zeros"
        p.line(f"const {kind}* const z{p.number(ref)} = {row};")
