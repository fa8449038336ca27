"""Hoist values that are equal in every row: they are computed once, before all rows, into a stack array."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.plan import BEFORE_ROWS, NestPlan
from dcompile.codegen.nest.loop_nest import Levels, Nest, cone_cost, may_exceed
from dcompile.ir.analysis import ancestors, operands
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import is_symbol, size_product
from dcompile.ir.nodes import Apply, Const, IndexOf, Ref, Value

MIN_HOIST_ROWS = 8
"""Rows from which an array is worth its memory."""
MAX_HOISTED_BYTES = 32768
"""Stack memory of all hoisted values of a kernel."""
MIN_HOIST_COST = 4
"""Additions from which a value is hoisted: the cost of a load, a store and a conversion."""


def hoist_values(plan: NestPlan) -> NestPlan:
    """Hoist element values that depend only on the position in the row: where to read, and with which weights."""
    hoisted = find_row_invariant(plan.nest, plan.levels)
    return replace(plan, hoisted=hoisted, kept=dict.fromkeys(hoisted, BEFORE_ROWS)) if hoisted else plan


def find_row_invariant(nest: Nest, levels: Levels) -> tuple[Ref, ...]:
    """Return element values that depend only on the position in the row, and have users that do not."""
    if nest.lane or len(nest.elements) != 1 or not nest.rows:
        return ()
    (axis,) = nest.elements
    if not isinstance(axis.size, int) or not may_exceed(size_product(row.count for row in nest.rows), MIN_HOIST_ROWS):
        return ()
    same = [False] * len(nest.body)
    for ref, value in enumerate(nest.body):
        same[ref] = _is_same(value, same, axis.name)
    used = {store.value for store in nest.stores} | {r for s in nest.stores for r in _refs(s.index.variables)}
    used |= {arg for ref in levels.live if not same[ref] for arg in operands(nest.body[ref])}
    found, size = list[Ref](), 0
    for ref in sorted(used & levels.live):
        number = same[ref] and levels.element[ref] and nest.body[ref].dtype != "bool"  # conditions split loops
        costly = number and cone_cost(ref, nest.body, frozenset()) >= MIN_HOIST_COST
        if costly and (size := size + axis.size * ITEMSIZE[nest.body[ref].dtype]) <= MAX_HOISTED_BYTES:
            found.append(ref)
    return tuple(found)


def hoisted_computation(plan: NestPlan) -> list[Ref]:
    """Return all values that hoisted ones are computed from, in order."""
    return sorted(ancestors(plan.nest.body, plan.hoisted))


def _refs(names: frozenset[str]) -> set[Ref]:
    return {int(name[1:]) for name in names if name[0] == "v"}


def _is_same(value: Value, same: list[bool], name: str) -> bool:
    match value:
        case Const():
            return True
        case IndexOf(index, _):
            return all(v == name or is_symbol(v) for v in index.variables)
        case Apply(_, args, _):
            return all(same[arg] for arg in args)
    return False
