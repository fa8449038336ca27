"""Distribute a kernel among threads: by rows, by blocks of one long row, or by columns."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.nest.loop_nest import Axis, may_exceed
from dcompile.ir.index import Var
from dcompile.ir.nodes import Reduce, Scan

MIN_PARALLEL_WORK = 32768
"""Element operations from which a kernel uses several threads: about 10 us, the cost of waking a thread pool."""
COLUMNS_OF_THREAD = 64
"""Columns of a thread are a multiple of this where threads share rows: whole cache lines."""
MAX_RUN = 4096
"""Longest run of float32 additions into one vector of accumulators; runs are added up in float64."""


def parallelize(plan: NestPlan) -> NestPlan:
    """Share rows among threads if there is enough work; work of symbolic size is checked at run time."""
    return replace(plan, parallel=True) if may_exceed(plan.work, MIN_PARALLEL_WORK) else plan


def share_columns(plan: NestPlan) -> NestPlan:
    """Share columns among threads where column reductions are accumulated in place, as in an embedding's gradient.

    Each element along the innermost variable must store to its own address, whatever the row is.
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
    """Do different elements along an axis always store to different addresses?"""
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
    """Share blocks of one long row among threads, and combine their results in order."""
    if plan.row_axes or len(plan.nest.elements) != 1 or not may_exceed(plan.nest.elements[0].size, 2 * MAX_RUN):
        return plan
    serial = any(isinstance(value, Scan) for value in plan.nest.body)
    shared = plan.parallel and not (plan.kept or plan.columns or serial)
    return replace(plan, shared_elements=True) if shared else plan
