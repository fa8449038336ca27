"""The problem that `overlap_collectives` solves: collectives with bounds for their places, durations, live bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcompile.codegen.schedule.order.cost_model import collective_bytes
from dcompile.codegen.schedule.order.dependences import communicates, edges
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Collective, Program, Step, Wait
from dcompile.machine_model import GroupSize


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """One collective with its wait: their steps, the bounds of their places, and the memory in flight."""

    number: int
    start: Collective
    start_step: int
    wait_step: int
    low: int
    """First place for its start: every step that it depends on is done."""
    high: int
    """Last place for its wait: before the first step that touches the buffers it guards."""
    nbytes: int
    """Bytes that it holds while in flight; 0 if its memory is held anyway."""
    before: frozenset[int]
    """Collectives that must be complete before it starts, their waits included."""

    @property
    def is_gather(self) -> bool:
        """Whether it gathers parameters, and so may start as early as memory allows; the model's own gather results."""
        return self.start.gathers_parameters

    @property
    def fills(self) -> bool:
        """Whether it is one of the model's own and writes buffers that it does not read."""
        return self.start.call is not None and bool(self.start.writes - self.start.reads)


@dataclass(frozen=True, slots=True)
class CollectivePlaces:
    """Place of the start and of the wait of each collective, by number."""

    starts: Mapping[int, int]
    waits: Mapping[int, int]


class OverlapProblem:
    """The scheduling problem of one program: computing steps, collectives with bounds, durations, and live bytes."""

    def __init__(self, program: Program, seconds: Sequence[float], groups: Mapping[str, GroupSize]) -> None:
        self.program, self.seconds, self.groups = program, seconds, groups
        self.computing = [n for n, step in enumerate(program.steps) if not isinstance(step, (Collective, Wait))]
        self.times = np.concatenate(([0.0], np.cumsum([seconds[n] for n in self.computing])))
        """Start time of the step after each place, if computation never waited."""
        table = program.table
        self.root = {name: buffer.holder or name for name, buffer in table.items()}
        self.sizes = {name: held_bytes(table[name]) for name in {*self.root.values()} & table.keys()}
        for name in program.inputs:
            self.sizes.pop(name, None)  # held by the caller in every order
        self.tasks = tuple(self._tasks())
        self.base = self._base()

    def one_each_way(self) -> tuple[int, int]:
        """Return the bytes of the largest gather, and of the largest other collective."""
        gathers = (e.nbytes for e in self.tasks if e.is_gather)
        return max(gathers, default=0), max((e.nbytes for e in self.tasks if not e.is_gather), default=0)

    def _tasks(self) -> Iterator[CollectiveTask]:
        """Yield the collectives in the order of the program."""
        steps = self.program.steps
        firsts = edges(steps, ordered_starts=False)
        starts = {step.bucket: n for n, step in enumerate(steps) if isinstance(step, Collective)}
        numbers = {n: number for number, n in enumerate(starts.values())}
        waits = {step.bucket: n for n, step in enumerate(steps) if isinstance(step, Wait)}
        low = self._earliest_starts(firsts)
        high = self._latest_waits(firsts)
        behind = _waited_for(steps, firsts, {waits[bucket]: numbers[n] for bucket, n in starts.items()})
        table = self.program.table
        for bucket, n in starts.items():
            start = steps[n]
            assert isinstance(start, Collective)
            held = start.writes - start.reads if start.call is not None else start.reads | start.writes
            roots = {self.root[name] for name in held if name in self.root}
            nbytes = sum(self.sizes.get(name, 0) for name in roots)
            if start.gathers_parameters:
                nbytes = min(nbytes, collective_bytes(start, table))
            yield CollectiveTask(
                numbers[n], start, n, waits[bucket], low[n], high[waits[bucket]], nbytes, frozenset(behind[n])
            )

    def _earliest_starts(self, firsts: Sequence[frozenset[int]]) -> dict[int, int]:
        """Return the first place of each start and wait; no start passes a collective among library calls."""
        place = {n: position for position, n in enumerate(self.computing)}
        low: dict[int, int] = {}
        fence = 0
        for n, step in enumerate(self.program.steps):
            if n in place:
                fence = place[n] + 1 if communicates(step) else fence
                continue
            low[n] = max((place[f] + 1 if f in place else low[f] for f in firsts[n]), default=0)
            if isinstance(step, Collective):
                low[n] = max(low[n], fence)
        return low

    def _latest_waits(self, firsts: Sequence[frozenset[int]]) -> dict[int, int]:
        """Return the last place of each start and wait."""
        place = {n: position for position, n in enumerate(self.computing)}
        high: dict[int, int] = {}
        fence = end = len(self.computing)
        for n in reversed(range(len(self.program.steps))):
            step = self.program.steps[n]
            here = place.get(n, high.get(n, end))
            if n in place:
                fence = here if communicates(step) else fence
            else:
                here = min(here, fence) if isinstance(step, Collective) else here
                high[n] = here
            for first in firsts[n]:
                if first not in place:
                    high[first] = min(high.get(first, end), here)
        return high

    # --- memory ---

    def _base(self) -> np.ndarray:
        """Return the live bytes at each computing step, of buffers touched by computing steps."""
        count = len(self.computing)
        first, last = dict[str, int](), dict[str, int]()
        for place, n in enumerate(self.computing):
            step = self.program.steps[n]
            for name in {self.root[name] for name in step.reads | step.writes if name in self.root}:
                first.setdefault(name, place)
                last[name] = place
        for name in self.program.returned:
            if self.root[name] in first:
                last[self.root[name]] = count - 1
        change = np.zeros(count + 1, np.int64)
        for name, begin in first.items():
            change[begin] += self.sizes.get(name, 0)
            change[last[name] + 1] -= self.sizes.get(name, 0)
        return np.cumsum(change)

    def held_steps(self, task: CollectiveTask, start: int, wait: int) -> slice:
        """Return the computing steps during which a collective holds memory that they do not hold themselves."""
        return slice(start, task.high) if task.is_gather or task.fills else slice(task.low, wait)

    def load(self, places: CollectivePlaces) -> np.ndarray:
        """Return the live bytes at each computing step."""
        load = self.base.copy()
        for e in self.tasks:
            load[self.held_steps(e, places.starts[e.number], places.waits[e.number])] += e.nbytes
        return load

    def peak(self, places: CollectivePlaces) -> int:
        """Return the peak of live bytes."""
        return int(self.load(places).max(initial=0))

    # --- sequences ---

    def places(self) -> CollectivePlaces:
        """Return the current places of starts and waits."""
        starts, waits, place = dict[int, int](), dict[int, int](), 0
        by_start = {e.start_step: e.number for e in self.tasks}
        by_wait = {e.wait_step: e.number for e in self.tasks}
        for n in range(len(self.program.steps)):
            if n in by_start:
                starts[by_start[n]] = place
            elif n in by_wait:
                waits[by_wait[n]] = place
            else:
                place += 1
        return CollectivePlaces(starts, waits)

    def sequence(self, order: Sequence[CollectiveTask], places: CollectivePlaces) -> Iterator[Step]:
        """Yield the steps with starts and waits at their places; at one place, waits free memory first."""
        steps = self.program.steps
        starting: dict[int, list[CollectiveTask]] = {}
        ending: dict[int, list[CollectiveTask]] = {}
        for e in order:
            starting.setdefault(places.starts[e.number], []).append(e)
            ending.setdefault(places.waits[e.number], []).append(e)
        for place in range(len(self.computing) + 1):
            ended = [e for e in ending.get(place, ()) if places.starts[e.number] < place]
            yield from (steps[e.wait_step] for e in ended)
            through = {e.number for e in ended}
            for e in starting.get(place, ()):
                here = [other for other in ending.get(place, ()) if other.number in e.before - through]
                yield from (steps[other.wait_step] for other in here)
                through |= {other.number for other in here}
                yield steps[e.start_step]
            yield from (steps[e.wait_step] for e in ending.get(place, ()) if e.number not in through)
            if place < len(self.computing):
                yield steps[self.computing[place]]


def held_bytes(buffer: Buffer) -> int:
    """Return the bytes that a program holds for a buffer; 0 for gradient buckets, which exist in every order."""
    return buffer.typical_bytes if buffer.bucket is None else 0


def _waited_for(steps: Sequence[Step], firsts: Sequence[Iterable[int]], waits: Mapping[int, int]) -> list[set[int]]:
    """Return, for each step, the collectives whose waits it depends on. `waits`: step of a wait -> its collective."""
    found: list[set[int]] = []
    for n in range(len(steps)):
        mine = set[int]().union(*(found[first] for first in firsts[n]))
        found.append(mine | {waits[n]} if n in waits else mine)
    return found
