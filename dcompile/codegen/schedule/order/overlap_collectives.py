"""Choose the place of each collective's start and wait, by the cost model and within a memory budget.

The order of starts comes first, from program and parameters alone. Ranks whose batches differ in size have other costs,
but must start the same collectives in the same order. Costs decide only how early each start comes and how late each
wait, which may differ between ranks.

Computing steps keep their order. Places are counted between them: 0 is before the first one. Without costs, all-reduces
start as early and are waited for as late as dependences allow.

Copies to and from host memory are placed afterwards, by the same rules, between all other steps. So they do not change
the order in which ranks start collectives. A load is placed like a gather, and an offload like a reduction: its memory
is held on the device until its wait.

A summary gives each collective's start and wait, the computation that hides it, and its exposed time. Times are the
cost model's, for the final order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from dcompile.codegen.schedule.order.cost_model import (
    PredictedSpan,
    collective_bytes,
    durations,
    is_copied_gather,
    lane_of,
    timeline,
)
from dcompile.codegen.schedule.order.dependences import communicates, edges, touches
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Step, Wait
from dcompile.machine_model import Figures, GroupSize


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
    free: int
    """First place from which no computing step holds that memory."""

    @property
    def is_gather(self) -> bool:
        """Whether its operand is there from the start, so that it may start as early as memory allows.

        These are gathers of parameters and loads from host memory. The model's own gather results.
        """
        return self.start.gathers_parameters or self.start.kind == "load"

    @property
    def fills(self) -> bool:
        """Whether it is one of the model's own and writes buffers that it does not read."""
        is_own = self.start.call is not None and not self.start.copies_by_host
        return is_own and bool(self.start.writes - self.start.reads)


@dataclass(frozen=True, slots=True)
class CollectivePlaces:
    """Place of the start and of the wait of each collective, by number."""

    starts: Mapping[int, int]
    waits: Mapping[int, int]


class OverlapProblem:
    """The scheduling problem of one program: computing steps, collectives with bounds, durations, and live bytes.

    `moves`: the buckets of the collectives to place. Others count among the computing steps, and take no time.
    """

    def __init__(
        self,
        program: Program,
        seconds: Sequence[float],
        groups: Mapping[str, GroupSize],
        moves: frozenset[str] | None = None,
    ) -> None:
        self.program, self.seconds, self.groups = program, seconds, groups
        flying = {n: step for n, step in enumerate(program.steps) if isinstance(step, (Collective, Wait))}
        self.moving = {n: step for n, step in flying.items() if moves is None or step.bucket in moves}
        self.computing = [n for n in range(len(program.steps)) if n not in self.moving]
        taken = [0.0 if n in flying else seconds[n] for n in self.computing]
        self.times = np.concatenate(([0.0], np.cumsum(taken)))
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
        starts = {step.bucket: n for n, step in self.moving.items() if isinstance(step, Collective)}
        numbers = {n: number for number, n in enumerate(starts.values())}
        waits = {step.bucket: n for n, step in self.moving.items() if isinstance(step, Wait)}
        _, last = self._touched()
        low = self._earliest_starts(firsts)
        high = self._latest_waits(firsts)
        behind = _waited_for(steps, firsts, {waits[bucket]: numbers[n] for bucket, n in starts.items()})
        table = self.program.table
        for bucket, n in starts.items():
            start = steps[n]
            assert isinstance(start, Collective)
            held = start.writes - start.reads if start.call is not None else start.reads | start.writes
            held = start.reads if start.kind == "offload" else held
            roots = {self.root[name] for name in held if name in self.root}
            nbytes = sum(self.sizes.get(name, 0) for name in roots)
            if start.gathers_parameters:
                nbytes = min(nbytes, collective_bytes(start, table))
            free = max((last.get(name, -1) + 1 for name in roots), default=0) if start.kind == "offload" else 0
            yield CollectiveTask(
                numbers[n],
                start,
                n,
                waits[bucket],
                low[n],
                high[waits[bucket]],
                nbytes,
                frozenset(behind[n]),
                max(free, low[n]),
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
        first, last = self._touched()
        for name in self.program.returned:
            if self.root[name] in first:
                last[self.root[name]] = count - 1
        change = np.zeros(count + 1, np.int64)
        for name, begin in first.items():
            change[begin] += self.sizes.get(name, 0)
            change[last[name] + 1] -= self.sizes.get(name, 0)
        return np.cumsum(change)

    def _touched(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the first and the last computing step that touches each buffer."""
        first, last = dict[str, int](), dict[str, int]()
        for place, n in enumerate(self.computing):
            step = self.program.steps[n]
            for name in {self.root[name] for name in step.reads | step.writes if name in self.root}:
                first.setdefault(name, place)
                last[name] = place
        return first, last

    def held_steps(self, task: CollectiveTask, start: int, wait: int) -> slice:
        """Return the computing steps during which a collective holds memory that they do not hold themselves."""
        return slice(start, task.high) if task.is_gather or task.fills else slice(task.free, wait)

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


# --- places -----------------------------------------------------------------------------------------------------------


SAFETY_FACTOR = 1.0
"""Slack in multiples of a collective's duration, since figures from a table are easily off by that much. A gather
should arrive so much before its first use; a reduction may take so much longer before its wait."""


COPY_SAFETY = 3.0
"""The same slack for gathers by peer copies: a rank's own part waits for room beside matmuls (two H200: 470 us of a
predicted 184)."""


def overlap_collectives(
    program: Program, figures: Figures, groups: Mapping[str, GroupSize], early_bytes: int | None = None
) -> Program:
    """Start collectives early enough to hide them behind computation, and wait for them as late as memory allows.

    `early_bytes` is how much this may add to the peak of live bytes. None: the largest gather plus the largest
    reduce-scatter, so that one unit arrives and one leaves while another is computed.

    Guarantees: the same steps; computing steps in their old order; bitwise-equal values. Live bytes stay within their
    old peak plus the budget. Buckets are listed in the order of their starts, which depends neither on `figures` nor on
    `groups`. If that order is the old one, the predicted time is no longer than before; otherwise the old places are
    kept. Ranks compare buckets in their order, so it is that of starts in either case.
    Relies on: nothing touches a buffer between the start and the wait of its collective.
    """
    started = [step for step in program.steps if isinstance(step, Collective)]
    for by_host in (False, True):
        moves = frozenset(step.bucket for step in started if step.copies_by_host == by_host)
        program = _moved(program, figures, groups, early_bytes, moves) if moves else program
    return program


def _moved(
    program: Program,
    figures: Figures,
    groups: Mapping[str, GroupSize],
    early_bytes: int | None,
    moves: frozenset[str],
) -> Program:
    """Move the starts and waits of these collectives, between all other steps in their order."""
    given = OverlapProblem(program, durations(program, figures, groups), groups, moves)
    incoming, outgoing = given.one_each_way() if early_bytes is None else (early_bytes, 0)
    order = start_order(given, incoming)
    budget = given.peak(given.places()) + incoming + outgoing
    places = _place(given, order, budget)
    if given.peak(places) > budget:  # late waits left no memory for gathers that had to start late
        places = _place(given, order, budget, tight=True)
    steps = tuple(given.sequence(order, places))
    table = {bucket.name: bucket for bucket in program.buckets}
    buckets = tuple(table[task.start.bucket] for task in order if task.start.bucket in table) or program.buckets
    seconds = dict(zip(map(id, program.steps), given.seconds, strict=True))
    old = timeline(program.steps, given.seconds, groups)
    new = timeline(steps, [seconds[id(step)] for step in steps], groups)
    worse = new.total > old.total or given.peak(places) > budget
    # costs may keep a rank's places, but not an order of starts that other ranks do not have
    if worse and order == list(given.tasks):
        return replace(program, buckets=buckets)
    return replace(program, steps=steps, buckets=buckets)


def predict_schedule(
    program: Program, figures: Figures, groups: Mapping[str, GroupSize]
) -> tuple[list[tuple[str, str, float, float, float]], float, float]:
    """Predict the timeline of a program, in microseconds.

    Returns (name, resource, start, duration, exposed time) of each step, the total time, and the exposed time.
    """
    found = timeline(program.steps, durations(program, figures, groups), groups, figures.interference, figures.crowding)
    rows = []
    for span in found.spans:
        start, duration, held_up = (round(1e6 * time, 3) for time in (span.start, span.duration, span.held_up))
        rows.append((step_label(program.steps[span.step]), span.resource, start, duration, held_up))
    return rows, round(1e6 * found.total, 3), round(1e6 * found.exposed, 3)


def step_label(step: Step) -> str:
    match step:
        case Collective(bucket=name):
            return name
        case Extern(op=name) | Loop(name=name):
            return name
        case _:
            raise AssertionError("a wait takes no time of its own")


def start_order(given: OverlapProblem, allowed: int) -> list[CollectiveTask]:
    """Return the order in which collectives start: the program's, but gathers may overtake reductions.

    A gather that waited for the previous unit's reductions would arrive long after that unit's computation. So gathers
    go first, as long as those ahead hold at most `allowed` bytes together. A unit's own gather always goes before its
    reduction: which of them a program comes to first depends on how a layer's operations were lowered, and that may
    differ between ranks.
    """
    gathers = [e for e in given.tasks if e.is_gather]
    units = {bucket.name: frozenset(bucket.units) for bucket in given.program.buckets}

    def is_of_same_units(gather: CollectiveTask, task: CollectiveTask) -> bool:
        return not units.get(gather.start.bucket, frozenset()).isdisjoint(units.get(task.start.bucket, ()))

    order: list[CollectiveTask] = []
    done: set[int] = set()
    for task in given.tasks:
        if task.number in done:
            continue
        if not task.is_gather:
            others = (e for e in order if e.is_gather and not is_of_same_units(e, task))
            ahead = sum(e.nbytes for e in others if e.high >= task.low)
            for gather in (e for e in gathers if e.number not in done):
                needed = gather.high < task.low or is_of_same_units(gather, task)
                ahead += 0 if needed else gather.nbytes
                if gather.before - done or gather.low > task.high or not (needed or ahead <= allowed):
                    break
                order.append(gather)
                done.add(gather.number)
        order.append(task)
        done.add(task.number)
    return order


def _place(
    given: OverlapProblem, order: Sequence[CollectiveTask], budget: int, tight: bool = False
) -> CollectivePlaces:
    """Choose starts as early and waits as late as they help within the budget, one collective after another in `order`.

    `tight`: gathers start late enough for the reductions after them to start at once; waits follow their starts at
    once.
    """
    latest = _latest_starts(given, order)
    caps = _caps(order)
    until = {e.number: e.high for e in order}
    """Last place for each wait: another collective may have to start after it."""
    for at, task in enumerate(order):
        until |= {other: min(until[other], caps[at]) for other in task.before}
    load = given.base.copy()
    times = given.times.copy()  # advances with waits
    free: dict[str, float] = {}
    starts, waits = dict[int, int](), dict[int, int]()
    previous = 0
    for at, task in enumerate(order):
        number = task.number
        seconds = given.seconds[task.start_step]
        place = max(task.low, previous, *(waits[other] for other in task.before), 0)
        if task.is_gather:
            reduction = next((e.low for e in order[at:] if not e.is_gather), inf)
            early = (COPY_SAFETY if is_copied_gather(task.start, given.groups) else SAFETY_FACTOR) * seconds
            in_time = int(np.searchsorted(given.times, latest[number] - early, side="right")) - 1
            wished = reduction if tight else max(min(in_time, reduction), _first_fit(load, task, budget))
            place = max(place, int(min(wished, caps[at])))
        starts[number] = previous = place
        lane = lane_of(task.start, given.groups)
        through = free[lane] = max(free.get(lane, 0.0), times[place]) + seconds
        limit = until[number]
        if task.is_gather:
            waits[number] = limit
        else:
            waits[number] = place if tight else _last_fit(load, times, task, place, limit, through, budget)
        load[given.held_steps(task, place, waits[number])] += task.nbytes
        times[waits[number] :] += max(through - times[waits[number]], 0.0)
    return CollectivePlaces(starts, waits)


def _latest_starts(given: OverlapProblem, order: Sequence[CollectiveTask]) -> dict[int, float]:
    """Return the time by which each collective must start for nothing to be late, with undelayed computation."""
    latest: dict[int, float] = {}
    following = dict[str, float]()
    for task in reversed(order):
        lane, seconds = lane_of(task.start, given.groups), given.seconds[task.start_step]
        due = given.times[task.high] if task.is_gather or task.high < len(given.computing) else inf
        latest[task.number] = following[lane] = min(due, following.get(lane, inf)) - seconds
    return latest


def _caps(order: Sequence[CollectiveTask]) -> list[int]:
    """Return the last place for each start: the smallest bound of this collective and those that start after it."""
    caps: list[int] = []
    for task in reversed(order):
        caps.append(min(task.high, caps[-1] if caps else task.high))
    return caps[::-1]


def _first_fit(load: np.ndarray, task: CollectiveTask, budget: int) -> int:
    """Return the first place from which a gather's memory fits into the budget until its own bound."""
    over = np.flatnonzero(load[: task.high] + task.nbytes > budget)
    return int(over[-1]) + 1 if len(over) else 0


def _last_fit(
    load: np.ndarray, times: np.ndarray, task: CollectiveTask, start: int, limit: int, through: float, budget: int
) -> int:
    """Return the place of a reduction's wait: when it is certainly complete, or where the budget needs its memory."""
    if not task.nbytes:
        return limit
    sure = through + SAFETY_FACTOR * (through - times[start])
    wished = min(int(np.searchsorted(times, sure)), limit)
    alone = max(start, task.free)
    over = np.flatnonzero(load[alone:wished] + task.nbytes > budget)
    return alone + int(over[0]) if len(over) else max(wished, start)


def start_early_wait_late(program: Program) -> Program:
    """Start each all-reduce right after the last step that touches its buffers, and wait just before the next.

    So does any kind that works in place: it holds no memory of its own.

    The others stay where they are: starting early and waiting late holds their memory longer.

    Guarantees: the same steps; all but starts and waits in their old order; bitwise-equal values. Collectives start in
    their old order, which is the same on every rank.
    Relies on: nothing touches a buffer between the start and the wait of its collective.
    """
    steps = list(program.steps)
    if not any(isinstance(step, Collective) for step in steps):
        return program
    touched = dict(zip(map(id, steps), touches(steps), strict=True))  # equal steps may differ in what they alias
    return replace(program, steps=tuple(_start_early(_wait_late(steps, touched), touched)))


def _wait_late(steps: list[Step], touched: dict[int, frozenset[str]]) -> list[Step]:
    """Delay each wait until just before a step that touches the buffers it guards."""
    result: list[Step] = []
    pending: list[Wait] = []
    in_place = {step.bucket for step in steps if isinstance(step, Collective) and step.in_place}
    for step in steps:
        if isinstance(step, Wait) and step.bucket in in_place:
            pending.append(step)
            continue
        due = [wait for wait in pending if touched[id(step)].intersection(wait.buffers) or communicates(step)]
        pending = [wait for wait in pending if wait not in due]
        result += [*due, step]
    return result + pending


def _start_early(steps: list[Step], touched: dict[int, frozenset[str]]) -> list[Step]:
    """Move each start up to the last step that touches its buffers, or to the previous start."""
    result: list[Step] = []
    for step in steps:
        place = len(result)
        if isinstance(step, Collective) and step.in_place:
            while place and not isinstance(result[place - 1], Collective):
                if communicates(result[place - 1]) or touched[id(result[place - 1])].intersection(step.buffers):
                    break
                place -= 1
        result.insert(place, step)
    return result


MAX_NAMES = 3
"""Names shown of a list."""
MIN_OVERLAP_S = 1e-9
"""Seconds: a shorter overlap is rounding."""


@dataclass(frozen=True, slots=True)
class CollectiveSummary:
    """One collective: the places of its start and wait, and its times in seconds."""

    bucket: str
    kind: str
    group: str
    earliest_start: int
    """First place at which its inputs are complete."""
    start: int
    wait: int
    latest_wait: int
    """The last place for its wait: before the first step that needs its result."""
    seconds: float
    exposed_seconds: float
    """Seconds by which its wait delays later steps."""
    hidden_behind: tuple[str, ...]
    """Kernels and library calls that run at the same time."""


def summarize_overlap(
    program: Program, figures: Figures, groups: Mapping[str, GroupSize]
) -> tuple[CollectiveSummary, ...]:
    """Summarize every collective that is a step of the program, in the order of their starts."""
    problem = OverlapProblem(program, durations(program, figures, groups), groups)
    places = problem.places()
    found = timeline(program.steps, problem.seconds, groups, figures.interference, figures.crowding)
    spans = {span.step: span for span in found.spans}
    computing = [span for span in found.spans if span.resource == "compute"]
    return tuple(
        CollectiveSummary(
            task.start.bucket,
            task.start.kind,
            task.start.group,
            task.low,
            places.starts[task.number],
            places.waits[task.number],
            task.high,
            spans[task.start_step].duration,
            spans[task.start_step].held_up,
            _hidden_behind(program, spans[task.start_step], computing),
        )
        for task in problem.tasks
    )


def _hidden_behind(program: Program, own: PredictedSpan, computing: list[PredictedSpan]) -> tuple[str, ...]:
    """Return labels of the computing steps that run between the start and the end of a collective."""
    end = own.start + own.duration
    return tuple(
        step_label(program.steps[span.step])
        for span in computing
        if min(end, span.start + span.duration) - max(own.start, span.start) > MIN_OVERLAP_S
    )


def overlap_lines(program: Program, figures: Figures, groups: Mapping[str, GroupSize]) -> Iterator[str]:
    """Yield a line for each collective."""
    names = [step_label(step) for step in program.steps if not isinstance(step, (Collective, Wait))]
    for found in summarize_overlap(program, figures, groups):
        yield (
            f"{found.kind} {found.bucket} over {found.group}: "
            f"may start {_shown_place(found.earliest_start, names)}, starts {_shown_place(found.start, names)}, "
            f"is waited for {_shown_place(found.wait, names)}, is needed {_shown_place(found.latest_wait, names)}; "
            f"{1e6 * found.seconds:.1f} us, {1e6 * found.exposed_seconds:.1f} us exposed, "
            f"hidden behind {_names(found.hidden_behind)}"
        )


def _shown_place(place: int, names: list[str]) -> str:
    return f"before step {place} ({names[place]})" if place < len(names) else "at the end"


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more if names else "nothing"
