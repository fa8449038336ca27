"""Choose between keeping and rematerializing: values that several passes over a row need are recomputed if cheap."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.emit.cpp.ops import MEMORY
from dcompile.codegen.emit.cpp.plan import BEFORE_ROWS, NestPlan
from dcompile.codegen.nest.loop_nest import cone_cost
from dcompile.ir.analysis import operands
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import Size, size_product
from dcompile.ir.nodes import Load, Ref

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
