"""Prefetch what loops read later, since memory is idle otherwise, or processors are.

Rows that later passes go through once more leave memory idle there: the next row is prefetched meanwhile. Rows that
elements are gathered from in any order are prefetched in order. Where caches are far (`toolchain.py`), what a loop
reads is prefetched some KB ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.nest.loop_nest import Axis, stride
from dcompile.ir.analysis import runtime_refs
from dcompile.ir.index import substitute, var
from dcompile.ir.nodes import ITEMSIZE, Apply, Load
from dcompile.ir.ops import OPS

MIN_PREFETCH_BYTES = 1 << 20
"""Size from which the next row of a tensor is prefetched while this one is worked on: caches hold smaller ones."""
MAX_PREFETCH_ROW_BYTES = 384 << 10
"""Bytes of a row of all of them, and of the next: less than a second level cache has."""
MIN_GATHERED_ROW_BYTES = 512
"""Bytes of a row that elements are gathered from, from which on the next one is prefetched."""


def prefetch_next_row(plan: NestPlan) -> NestPlan:
    """Prefetch the next row of what rows are read from, where later passes find this one's in the caches.

    Memory is idle there otherwise: a cross-entropy's forward took 0.7 of the time so, RMSNorm 0.65 (16 MB, Zen 3). The
    pass with most work does it, for which memory need not hurry.
    """
    nest, later = plan.nest, _later_passes(plan)
    if not later or nest.lane or not nest.rows or nest.rows[-1].tile > 1:
        return plan
    row, last = nest.rows[-1].name, nest.elements[-1].name
    found, nbytes = dict[Load, None](), 0
    for ref in plan.pass_values(0):
        value = nest.body[ref]
        if not isinstance(value, Load) or value.mask is not None or runtime_refs(value.index):
            continue
        distance = stride(value.index, row)
        if not isinstance(distance, int) or distance <= 0 or not plan.has_bytes(value.buffer, MIN_PREFETCH_BYTES):
            continue
        if stride(value.index, last) == 1:
            found[replace(value, index=substitute(value.index, {row: var(row) + 1}, {}))] = None
            nbytes += distance * ITEMSIZE[value.dtype]
    if not found or 2 * nbytes > MAX_PREFETCH_ROW_BYTES:
        return plan
    busiest = max(later, key=lambda number: (plan.cost(plan.new_vector_values(number)), number))
    return replace(plan, next_row=tuple(found), next_row_pass=busiest)


def _later_passes(plan: NestPlan) -> list[int]:
    """Passes that go through the row once more."""
    return [number for number in range(1, plan.pass_count) if any(plan.pass_roots[number])]


def next_gathered_rows(plan: NestPlan, number: int, axis: Axis) -> list[Load]:
    """The next of the rows that elements are gathered from in any order: prefetched in order.

    Gathers from rows of 4 KB took 0.7 of the time (8 MB, Zen 3).
    """
    found = dict[Load, None]()
    if not plan.nest.rows or len(plan.nest.elements) > 1 or plan.nest.rows[-1].tile > 1:
        return []
    row = plan.nest.rows[-1].name
    for ref in plan.new_values(number):
        value = plan.nest.body[ref]
        if not isinstance(value, Load) or value.mask is not None:
            continue
        picks = {f"v{r}": var(axis.name) for r in runtime_refs(value.index) if plan.levels.element[r]}
        distance = stride(value.index, row)
        if not picks or not isinstance(distance, int) or not plan.has_bytes(value.buffer, MIN_PREFETCH_BYTES):
            continue
        along, nbytes = substitute(value.index, picks, {}), distance * ITEMSIZE[value.dtype]
        if stride(along, axis.name) == 1 and MIN_GATHERED_ROW_BYTES <= nbytes <= MAX_PREFETCH_ROW_BYTES:
            found[replace(value, index=substitute(along, {row: var(row) + 1}, {}))] = None
    return list(found)


# --- where caches are far ---------------------------------------------------------------------------------------------


def updates_slowly(plan: NestPlan, number: int, name: str) -> bool:
    """Does a pass update several large float32 tensors by slow operations, as AdamW does?

    It prefetches all it reads then, where caches are far: 0.87 of the time with one thread and with two (16 tensors
    of 1 MB, and three of their kind; Intel's servers).
    """
    values = [plan.nest.body[ref] for ref in plan.vector_values(number)]
    slow = any(isinstance(value, Apply) and OPS[value.op].stalls and value.dtype == "float32" for value in values)
    if not slow:
        return False
    written = {store.buffer for store in plan.nest.stores}
    large = _large_loads(plan, number, name)
    return sum(load.buffer in written and load.dtype == "float32" for load in large) > 1


def far_loads(plan: NestPlan, number: int, name: str) -> list[Load]:
    """What a pass reads, element by element, of large tensors that no pass before has read or prefetched.

    What the kernel writes as well only where it updates slowly: AdamW in bfloat16 took 1.02 to 1.05 of the time.
    """
    asking = plan.next_row_pass
    if plan.tile or (number == 0 and asking is not None and not _may_stop(plan, asking)):
        return []
    written = {store.buffer for store in plan.nest.stores}
    slow = updates_slowly(plan, number, name)
    return [load for load in _large_loads(plan, number, name) if slow or load.buffer not in written]


def _large_loads(plan: NestPlan, number: int, name: str) -> list[Load]:
    """What a pass reads, element by element, of large tensors that no pass before has read."""
    before = {plan.nest.body[ref] for earlier in range(number) for ref in plan.vector_values(earlier)}
    found = dict[Load, None]()
    for ref in plan.vector_values(number):
        value = plan.nest.body[ref]
        if not isinstance(value, Load) or value.mask is not None or value in before:
            continue
        if plan.constant_stride(value.index, name) == 1 and plan.has_bytes(value.buffer, MIN_PREFETCH_BYTES):
            found[value] = None
    return list(found)


def _may_stop(plan: NestPlan, number: int) -> bool:
    """Does a pass look for places (`vectorize.find_searched`)? It need not come to the row's end."""
    chosen = (plan.nest.body[plan.reduce(ref).arg] for ref in plan.pass_roots[number][0])
    return any(isinstance(value, Apply) and (value.op, value.dtype) == ("where", "int32") for value in chosen)


def step_prefetches(plan: NestPlan, number: int, stores: Sequence[int], name: str) -> list[tuple[str, Load]]:
    """What a step of a vector loop prefetches: the library's function, and the load.

    A little ahead, if functions of one large tensor are streamed: what comes next is fetched too late then. An
    exponential of 16 MB took 0.9 of the time, cross-entropy's backward 0.86 to 0.98, sigmoid 0.95, GELU 0.99 (Zen 3,
    1 KB ahead; 2 and 4 were no better); loops over several tensors 1.0 to 1.04. Where caches are far, all of it
    (Intel's servers, 8 and 16 MB from the third level): cross-entropy's backward 0.76 with 4 KB, argmax 0.74, SwiGLU,
    sums of rows and of columns in bfloat16 0.85 to 0.9, a chain 0.93, AdamW 1.0.
    """
    if number == plan.next_row_pass:
        return [("ask", load) for load in plan.next_row]
    loads = far_loads(plan, number, name)
    values = [plan.nest.body[ref] for ref in plan.new_vector_values(number)]
    functions = any(isinstance(value, Apply) and OPS[value.op].vector == "function" for value in values)
    soon = len(loads) == 1 and functions and any(n in plan.streamed for n in stores)
    return [("ask_soon" if soon else "ask_far", load) for load in loads]
