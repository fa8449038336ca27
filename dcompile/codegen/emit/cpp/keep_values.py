"""Keep values instead of computing them again: from pass to pass over a row, and for all rows.

Values that several passes over a row need are recomputed if they are cheap. Values that are equal in every row are
hoisted: they are computed once, before all rows, into a stack array.
"""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import MEMORY
from dcompile.codegen.emit.cpp.plan import BEFORE_ROWS, NestPlan
from dcompile.codegen.nest.loop_nest import Levels, Nest, cone_cost, may_exceed
from dcompile.ir.analysis import ancestors, operands
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import Size, is_symbol, size_product
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Ref, Value

MAX_KEPT_BYTES = 1 << 18
"""Stack bytes for values kept from pass to pass. They fit into L2, from which a load costs less than an exponential.
Softmax of rows of 32000 took 0.75 of the time in float32 (0.7 in bfloat16, Zen 3)."""
MIN_KEEP_COST = 10
"""Additions from which a value is kept rather than recomputed: one exp, about the cost of a store and a load."""
MAX_STACK_ELEMENTS = 4096
"""Elements of a kept value on the stack where the length of rows is symbolic; longer rows use the heap."""


def keep_values(plan: NestPlan) -> NestPlan:
    """Keep element values for later passes where recomputation costs more."""
    if plan.nest.lane:
        return plan
    count = size_product(axis.size for axis in plan.nest.elements)
    kept = dict.fromkeys(plan.hoisted, BEFORE_ROWS)
    computed = dict(kept)
    nbytes = 0
    for number in range(plan.pass_count):
        stack, seen = plan.targets(number), set[Ref]()
        while stack:
            ref = stack.pop()
            if ref in seen or not plan.levels.element[ref]:
                continue
            seen.add(ref)
            if computed.get(ref, number) < number:
                more = 0 if ref in kept else _array_bytes(plan, ref, count)
                if ref in kept or (nbytes + more <= MAX_KEPT_BYTES and _is_costly(plan, ref, frozenset(kept))):
                    kept[ref] = computed[ref]
                    nbytes += more
                    continue
            stack += operands(plan.nest.body[ref])
        for ref in seen:
            computed.setdefault(ref, number)
    return replace(plan, kept=kept) if len(kept) > len(plan.kept) else plan


def _is_costly(plan: NestPlan, ref: Ref, kept: frozenset[Ref]) -> bool:
    """Does recomputing a value from its loads and from kept values cost more than reading it from an array?"""
    return not isinstance(plan.nest.body[ref], Load) and cone_cost(ref, plan.nest.body, kept) >= MIN_KEEP_COST


def _array_bytes(plan: NestPlan, ref: Ref, count: Size) -> int:
    """Return the stack bytes of a value's array."""
    dtype = plan.nest.body[ref].dtype
    return (count if isinstance(count, int) else MAX_STACK_ELEMENTS) * ITEMSIZE["float32" if dtype in MEMORY else dtype]


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
