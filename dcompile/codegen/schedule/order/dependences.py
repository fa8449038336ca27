"""Dependences between steps: removal of dead ones, and updates of the same kind next to one another.

`emit/triton/horizontal_fusion.py` launches neighbours of one kind as one. An optimizer's program goes from parameter to
parameter: scalars derived from the step count, an update, the next count. One launch for each of 147 counts took 0.9 ms
on an H200, beside 5.0 ms of updates (1.1 billion parameters).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from dcompile.device_traits import loop_traits
from dcompile.ir.buffers import Buffer
from dcompile.ir.canonical_names import nameless
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Step, Wait
from dcompile.ir.symbols import late_symbols, used_symbols


def touches(steps: Sequence[Step]) -> list[frozenset[str]]:
    """Return the buffers whose memory each step reads, writes or holds in flight.

    A library call that allocates may return a view of its argument, so users of its result count as users of the
    argument. This is tracked only for memory that is written again after its first use; other memory looks the same
    through a view at any time.
    """
    return [reads | writes for reads, writes in _accesses(steps)]


def edges(steps: Sequence[Step], *, ordered_starts: bool = True) -> list[frozenset[int]]:
    """Return, for each step, the earlier steps that must stay before it.

    Edges are read after write, write after read and write after write; a collective and its wait count as both on their
    buffers. A size symbol defined by a library call comes before its users. Collectives start in one order, since every
    rank must start the same ones; the model's own collectives among library calls are included. Library calls with
    effects keep their order, too. Edges implied by others through one buffer are left out. Without `ordered_starts`,
    the caller fixes the order of collectives.
    """
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    last_start: int | None = None
    last_effect: int | None = None
    result: list[frozenset[int]] = []
    late = frozenset(symbol for step in steps if isinstance(step, Extern) for symbol in step.tells)
    for number, (step, (reads, writes)) in enumerate(zip(steps, _accesses(steps), strict=True)):
        if late:  # a size counts as read by its users, and as written by the call that defines it
            reads |= used_symbols(step) & late
            writes = writes.union(step.tells if isinstance(step, Extern) else ())
        before = {writer[name] for name in reads | writes if name in writer}
        for name in writes:
            before.update(readers.pop(name, ()))
            writer[name] = number
        for name in reads - writes:
            readers[name].append(number)
        if ordered_starts and (isinstance(step, Collective) or communicates(step)):
            before.update(() if last_start is None else (last_start,))
            last_start = number
        if isinstance(step, Extern) and step.effect:
            before.update(() if last_effect is None else (last_effect,))
            last_effect = number
        result.append(frozenset(before - {number}))
    return result


def communicates(step: Step) -> bool:
    """Return whether a library call is a collective, or waits for one, which dcompile cannot split into two steps."""
    return isinstance(step, Extern) and "c10d" in step.op


def remove_dead_steps(program: Program) -> Program:
    """Remove steps and buffers that no observable result depends on.

    Kept: the steps that outputs depend on, writes to inputs, in-place calls, collectives, and library calls with
    effects. Unread results of library allocations become None.
    """
    live = program.returned.union(program.inputs)
    live |= _tellers(program)
    kept: list[Step] = []
    for step in reversed(program.steps):
        if not _has_effect(step) and not step.writes & live:
            continue
        if isinstance(step, Extern) and step.mode == "alloc":
            step = replace(step, outs=tuple(out if out in live else None for out in step.outs))
        live |= step.reads | step.writes
        kept.append(step)
    return replace(
        program,
        steps=tuple(reversed(kept)),
        buffers=tuple(buffer for buffer in program.buffers if buffer.name in live),
    )


def _tellers(program: Program) -> set[str]:
    """Return the results of calls that define a size symbol which no argument defines."""
    late = late_symbols(program)
    calls = (step for step in program.steps if isinstance(step, Extern) and not late.isdisjoint(step.tells))
    return {name for step in calls for name in step.writes}


def _has_effect(step: Step) -> bool:
    if isinstance(step, Extern):
        return step.effect or step.mode == "mutate"
    return isinstance(step, (Collective, Wait))


def _accesses(steps: Sequence[Step]) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Return (reads, writes) of each step, including accesses through views returned by library allocations."""
    changing = _overwritten_buffers(steps)
    behind: dict[str, frozenset[str]] = {}
    result: list[tuple[frozenset[str], frozenset[str]]] = []
    for step in steps:
        reads = step.reads.union(*(behind[name] for name in step.reads if name in behind))
        writes = step.writes
        if isinstance(step, Extern):
            if step.mode == "mutate":
                writes = writes.union(*(behind[name] for name in writes if name in behind))
            elif step.mode == "alloc" and (seen := reads & changing):
                behind |= dict.fromkeys(writes, seen)
        result.append((reads, writes))
    return result


def _overwritten_buffers(steps: Sequence[Step]) -> frozenset[str]:
    """Return the buffers that are written after an earlier step has touched them."""
    touched: set[str] = set()
    changing: set[str] = set()
    for step in steps:
        changing |= step.writes & (touched | (step.reads if isinstance(step, Extern) else frozenset()))
        touched |= step.reads | step.writes
    return frozenset(changing)


# --- updates ----------------------------------------------------------------------------------------------------------


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
