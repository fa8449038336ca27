"""Threads: whether a kernel has several, and whether they share rows, blocks of one long row, or columns."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.nest.loop_nest import Axis, may_exceed
from dcompile.ir.index import Var
from dcompile.ir.nodes import Reduce, Scan

MIN_PARALLEL_WORK = 32768
"""Element operations from which a kernel has several threads: about 10 us, what waking a thread pool costs."""
COLUMNS_OF_THREAD = 64
"""Columns that a thread takes, where threads share rows, are a multiple of this: whole cache lines."""
MAX_RUN = 4096
"""Longest run of float additions into one vector of accumulators; runs are added up in float64."""


def parallelize(plan: NestPlan) -> NestPlan:
    """Share rows among threads where there is work enough; sizes that only the call knows are asked at run time."""
    return replace(plan, parallel=True) if may_exceed(plan.work, MIN_PARALLEL_WORK) else plan


def share_columns(plan: NestPlan) -> NestPlan:
    """Let threads share columns where column reductions are collected in place, as in an embedding's gradient.

    Each must keep its values apart along the innermost variable, whatever the row is.
    """
    last, stores = plan.nest.elements[-1], plan.nest.stores
    if not (plan.in_place and plan.parallel) or any(plan.nest.row_stores):
        return plan
    if not isinstance(last.size, int) or last.size < 2 * COLUMNS_OF_THREAD:
        return plan
    if any(row.name == last.name for row in plan.nest.rows):
        return plan
    if any(isinstance(value, (Reduce, Scan)) for value in plan.nest.body):
        return plan
    apart = all(_keeps_apart(plan, n, last) for n in range(len(stores)))
    return replace(plan, shared_columns=last) if apart else plan


def _keeps_apart(plan: NestPlan, number: int, axis: Axis) -> bool:
    """Do different elements along an axis never store to one place?"""
    index, size = plan.nest.stores[number].index, axis.size
    others = [coefficient for monomial, coefficient in index.terms if monomial != (Var(axis.name),)]
    unit = index.coefficient(axis.name)
    fixed = plan.nest.stores[number].mode == "set" or plan.can_store_at_once(number, axis.name)
    return (
        fixed
        and unit is not None
        and unit.constant == 1
        and isinstance(size, int)
        and all(c % size == 0 for c in others)
    )


def share_elements(plan: NestPlan) -> NestPlan:
    """Let threads take blocks of one long row, whose results are combined in order."""
    if plan.row_axes or len(plan.nest.elements) != 1 or not may_exceed(plan.nest.elements[0].size, 2 * MAX_RUN):
        return plan
    serial = any(isinstance(value, Scan) for value in plan.nest.body)
    shared = plan.parallel and not (plan.kept or plan.columns or serial)
    return replace(plan, shared_elements=True) if shared else plan
