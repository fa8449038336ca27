"""Place updates of the same kind next to one another, for `emit/triton/horizontal_fusion.py` to launch as one.

An optimizer's program goes from parameter to parameter: scalars derived from the step count, an update, the next count.
One launch for each of 147 counts took 0.9 ms on an H200, beside 5.0 ms of updates (1.1 billion parameters).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from dcompile.codegen.schedule.order.dependences import edges
from dcompile.device_traits import loop_traits
from dcompile.ir.buffers import Buffer
from dcompile.ir.canonical_names import nameless
from dcompile.ir.nodes import Loop, Program, Step

SMALL_BYTES = 1 << 10
"""Largest result that may live longer because of reordering, for each loop."""


def group_updates(program: Program) -> Program:
    """Reorder neighbouring loops that write to inputs or to small results, so that loops of one kind follow each other.

    Loops keep their order, except that loops of the same kind as the one before come first. Dependences hold, and no
    loop passes a loop of another sort, a library call or a collective. Live memory grows by at most `SMALL_BYTES` for
    each loop.
    """
    table = program.table
    inputs = frozenset(program.inputs)
    steps: list[Step] = []
    for updates, run in groupby(program.steps, lambda step: _is_update(step, table, inputs)):
        found = list(run)
        steps += _by_kind(found, table) if updates and len(found) > 2 else found
    return replace(program, steps=tuple(steps))


def _is_update(step: Step, table: dict[str, Buffer], inputs: frozenset[str]) -> bool:
    if not isinstance(step, Loop) or not loop_traits(step, table).many_threads:
        return False
    return all((table[name].holder or name) in inputs or _is_small(table[name]) for name in step.writes)


def _is_small(buffer: Buffer) -> bool:
    return isinstance(buffer.extent, int) and buffer.nbytes <= SMALL_BYTES


def _by_kind(run: Sequence[Step], table: Mapping[str, Buffer]) -> list[Step]:
    """Return the same steps grouped by kind, each after all steps that it depends on."""
    kinds = [_kind(step, table) for step in run if isinstance(step, Loop)]
    before = edges(run)
    behind: dict[int, list[int]] = defaultdict(list)
    for number, firsts in enumerate(before):
        for first in firsts:
            behind[first].append(number)
    missing = [len(firsts) for firsts in before]
    ready: dict[Hashable, list[int]] = defaultdict(list)
    for number, count in enumerate(missing):
        if not count:
            ready[kinds[number]].append(number)
    order: list[Step] = []
    kind: Hashable = None
    while len(order) < len(run):
        if not ready.get(kind):
            kind = min((waiting[0], kind) for kind, waiting in ready.items() if waiting)[1]
        number = heapq.heappop(ready[kind])
        order.append(run[number])
        for later in behind[number]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready[kinds[later]], later)
    return order


def _kind(loop: Loop, table: Mapping[str, Buffer]) -> Hashable:
    """Return a key of a loop's computation that is independent of buffer names."""
    names: dict[str, str] = {}
    return nameless(loop, names), tuple(table[name].dtype for name in names)
