"""Narrow values: NaNs that need no care in rounding, and positions that fit into an int32."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.plan import NO_SCANS, NestPlan
from dcompile.codegen.emit.cpp.value_facts import PositionCounter, count_in_int32, short_nans, to_shorten
from dcompile.codegen.nest.loop_nest import may_exceed


def shorten_nans(plan: NestPlan) -> NestPlan:
    """Shorten NaNs of row values at their load, if elements computed from them are rounded to bfloat16."""
    if plan.nest.lane:
        return plan
    shortened = to_shorten(plan.nest.body, plan.levels.element, plan.nest.stores)
    if not shortened:
        return plan
    return replace(plan, shortened=shortened, short_nans=short_nans(plan.nest.body, shortened))


def count_positions(plan: NestPlan) -> NestPlan:
    """Count elements in an int32 where passes compute with positions: a vector holds twice as many."""
    if plan.nest.lane:
        return plan
    found = {number: counter for number in range(plan.pass_count) if (counter := _counter(plan, number))}
    return replace(plan, counters=found) if found else plan


def _counter(plan: NestPlan, number: int) -> PositionCounter | None:
    """Return the values of a pass that an int32 counter can replace, or None."""
    last, stores = plan.nest.elements[-1], plan.pass_roots[number][1]
    scans = plan.scans.get(number, NO_SCANS)
    at_once = all(plan.can_store_at_once(n, last.name) for n in stores)
    if may_exceed(last.size, 2**31 - 1) or scans.serial or scans.held or not at_once:
        return None
    return count_in_int32(plan.nest.body, plan.new_values(number), plan.levels.element, last.name)
