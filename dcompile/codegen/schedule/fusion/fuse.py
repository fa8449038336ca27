"""Fuse loops into kernels: pairs are merged greedily, those that save the most memory traffic first.

Fusion keeps the order in which a program first reads sharded parameters, and in which it finishes their gradients.
All-gathers and reduce-scatters follow it. Ranks with other batch sizes have other programs of one graph: sizes
may be numbers on one rank and symbols on another, and loops merge differently. Before fusion their steps are the same.
So fusion may not swap the steps where collectives belong.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TypeAlias

from dcompile.codegen.nest.gpu_tiling import scatters_bytes, sums_overflow
from dcompile.codegen.schedule.fusion.iteration_space import canonical
from dcompile.codegen.schedule.fusion.merge import LoopMerger, without
from dcompile.codegen.schedule.order.dependences import edges
from dcompile.device_traits import loop_traits, traits_of
from dcompile.ir.analysis import takes_over
from dcompile.ir.nodes import Loop, Program, Step, View

Group: TypeAlias = "tuple[int, str, str]"
"""Key of units that share collectives: number, dtype on the wire, device."""
Access: TypeAlias = "tuple[int, Group]"
"""(position among a program's inputs or outputs, group of the sharded parameter)."""
Label: TypeAlias = "tuple[str, Group]"
"""(kind of collective, group)."""


@dataclass(frozen=True, slots=True)
class CollectiveEvent:
    """Where a collective belongs: before the first of the steps that read a group of units, or after the last of those
    that finish their gradients. Units that are in use again after another group's are another event.
    """

    label: Label
    run: tuple[int, ...]
    fixed: frozenset[int]
    """Steps among them that no other step merges with."""

    @property
    def gathers(self) -> bool:
        return self.label[0] == "gather"

    @property
    def place(self) -> int:
        """The step that decides, before anything is fused."""
        return self.run[0] if self.gathers else self.run[-1]

    @property
    def ends(self) -> tuple[int, ...]:
        """Steps that may decide once others have merged: those up to a fixed one."""
        order = self.run if self.gathers else self.run[::-1]
        count = next((at for at, step in enumerate(order, 1) if step in self.fixed), len(order))
        return order[:count]

    def last_behind(self, step: int) -> int:
        """Return a step of these that stays after another one: the last fixed one, or else the last."""
        return max((one for one in self.run if one in self.fixed and one > step), default=self.run[-1])


def collective_events(program: Program, reads: Sequence[Access], results: Sequence[Access]) -> list[CollectiveEvent]:
    """Return a program's events, in order.

    `reads`: inputs that are sharded parameters. `results`: outputs that are their gradients. A group has an event for
    each time that it is in use: the root holds the first layer and the last.
    """
    if not reads and not results:
        return []
    readers, last = dict[str, list[int]](), dict[str, int]()
    for number, step in enumerate(program.steps):
        for name in step.reads:
            readers.setdefault(name, []).append(number)
        last |= dict.fromkeys(step.writes, number)
    outputs = [output.buffer if isinstance(output, View) else "" for output in program.outputs]
    gathers = [(readers[name], group) for at, group in reads if (name := program.inputs[at]) in readers]
    reductions = [([last[name]], group) for at, group in results if (name := outputs[at]) in last]
    fixed = frozenset(number for number, step in enumerate(program.steps) if not isinstance(step, Loop))
    found = [*_events("gather", gathers, fixed), *_events("reduce", reductions, fixed)]
    return sorted(found, key=lambda event: (event.place, event.label))


def first_reads(program: Program, reads: Sequence[Access]) -> dict[int, frozenset[str]]:
    """Return the sharded parameters that each step is the first to read: were they read later, a gather would move."""
    left = {program.inputs[at] for at, _ in reads}
    found: dict[int, frozenset[str]] = {}
    for number, step in enumerate(program.steps):
        if here := left & step.reads:
            found[number] = frozenset(here)
            left -= here
    return found


def _events(kind: str, used: Iterable[tuple[list[int], Group]], fixed: frozenset[int]) -> Iterator[CollectiveEvent]:
    order = sorted(used, key=lambda entry: (entry[0][0], entry[1]))
    for group, members in groupby(order, key=lambda entry: entry[1]):
        run = sorted({step for steps, _ in members for step in steps})
        yield CollectiveEvent((kind, group), tuple(run), fixed.intersection(run))


def ordered_pairs(events: Sequence[CollectiveEvent]) -> Iterator[tuple[int, int]]:
    """Yield (step, later step) of steps that must keep their order, so that these events keep theirs."""
    for one, other in pairwise(events):
        before = (one.place,) if one.gathers else one.run
        after = other.run if other.gathers else (other.last_behind(one.place),)
        yield from ((early, late) for early in before for late in after if early < late)


def events_by_step(events: Sequence[CollectiveEvent]) -> dict[int, tuple[CollectiveEvent, ...]]:
    """Return the events that may come to belong to each step, in order."""
    found: dict[int, tuple[CollectiveEvent, ...]] = {}
    for event in events:
        for step in event.ends:
            found[step] = (*found.get(step, ()), event)
    return found


def may_share_a_step(events: Iterable[CollectiveEvent]) -> bool:
    """Return whether events that belong to one step are in the order in which it has their collectives.

    Gathers come before the step, in the order of their groups. Reductions come after it, in the opposite order, as a
    backward goes from the last layer to the first (`collectives/fsdp_units.py`). On another rank, each of them may
    belong to a step of its own.
    """
    labels = [event.label for event in dict.fromkeys(events)]
    gathers = sorted({label for label in labels if label[0] == "gather"})
    reductions = sorted({label for label in labels if label[0] == "reduce"}, reverse=True)
    return labels == [*gathers, *reductions]


BRIEF_BYTES = 1 << 16
"""Bytes that a GPU kernel moves within its launch time, 5 us: a smaller kernel joins another with a common input."""
LARGE_BYTES, MAX_LOOPS_BETWEEN = 1 << 20, 4
"""Two loops whose merge saves `LARGE_BYTES` also merge up to `MAX_LOOPS_BETWEEN` loops that stand between them."""
MIN_SHARED_BYTES = 4096  # a smaller shared read is in L1 anyway, and merging siblings only lengthens the kernel


def fuse(program: Program, reads: Sequence[Access] = (), results: Sequence[Access] = ()) -> Program:
    """Merge loops that share memory, and remove the buffers that then exist in registers only.

    `reads`, `results`: inputs that are sharded parameters, and outputs that are their gradients. The steps where their
    collectives belong keep their order, whatever is merged.

    Guarantees: bitwise-equal outputs (every value keeps its rounding); collectives and calls with effects keep their
    order.
    """
    steps = [canonical(step) if isinstance(step, Loop) else step for step in program.steps]
    graph = _StepGraph(steps, program, collective_events(program, reads, results))
    queue = [entry for pair in graph.pairs() for entry in graph.entry(*pair)]
    heapq.heapify(queue)
    while queue:
        _, _, a, b = heapq.heappop(queue)
        if a not in graph.alive or b not in graph.alive:
            continue
        for number in (*graph.small_between(a, b), b):
            merged = graph.joined(a, number)
            if merged is None:
                break
            a = graph.replace_pair(a, number, merged)
            for other in graph.neighbours(a):
                for entry in graph.entry(*graph.in_order(a, other)):
                    heapq.heappush(queue, entry)
    return drop_internal(replace(program, steps=tuple(graph.ordered())))


def drop_internal(program: Program) -> Program:
    """Remove stores that no other step and no output reads."""
    escaping = program.returned.union(program.inputs)
    readers: dict[str, set[int]] = {}
    for number, step in enumerate(program.steps):
        for name in step.reads | (frozenset() if isinstance(step, Loop) else step.writes):
            readers.setdefault(name, set()).add(number)
    steps: list[Step] = []
    for number, step in enumerate(program.steps):
        if not isinstance(step, Loop):
            steps.append(step)
            continue
        dead = frozenset(name for name in step.writes - escaping if not readers.get(name, set()) - {number})
        kept = without(step, dead)
        if kept is not None:
            steps.append(canonical(kept))
    used = {name for step in steps for name in step.reads | step.writes} | escaping
    return replace(program, steps=tuple(steps), buffers=tuple(b for b in program.buffers if b.name in used))


class _StepGraph:
    """Steps under merging, with dependences as bit sets over the numbers of the original steps.

    A merged step has the bits of all its original steps; another step's set contains all of them or none.
    """

    def __init__(self, steps: list[Step], program: Program, events: Sequence[CollectiveEvent] = ()) -> None:
        self.steps: dict[int, Step] = dict(enumerate(steps))
        self.merge = LoopMerger()
        self.reads = {number: step.reads for number, step in self.steps.items()}  # cached: computed at each access
        self.writes = {number: step.writes for number, step in self.steps.items()}
        self.alive = set(self.steps)
        self.members = {number: 1 << number for number in self.steps}
        self.living = list(self.steps)
        """The current step that contains each original one."""
        self.nbytes = {buffer.name: buffer.typical_bytes for buffer in program.buffers}
        self.table, self.donated = program.table, frozenset(program.donated)
        self.devices = {buffer.name: buffer.device for buffer in program.buffers}
        self.parts = dict(program.parts)
        self.kept = program.returned.union(program.inputs)
        self.first = {number: number for number in self.steps}  # original position: keeps the order stable
        self.before: dict[int, int] = {}
        self.after: dict[int, int] = dict.fromkeys(self.steps, 0)
        self.events = events_by_step(events)
        depends = list(enumerate(_with_order(edges(steps), events)))
        for number, previous in depends:
            bits = 0
            for p in previous:
                bits |= self.before[p] | 1 << p
            self.before[number] = bits
        for number, previous in reversed(depends):
            for p in previous:
                self.after[p] |= self.after[number] | 1 << number
        self.touching: dict[str, set[int]] = {}
        for number in self.steps:
            for name in self.reads[number] | self.writes[number]:
                self.touching.setdefault(name, set()).add(number)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of loops that touch a common buffer, in order."""
        seen: set[tuple[int, int]] = set()
        for members in self.touching.values():
            loops = sorted(n for n in members if isinstance(self.steps[n], Loop))
            for k, a in enumerate(loops):
                for b in loops[k + 1 : k + 9]:  # a weight read by hundreds of kernels is no reason to join them all
                    if (a, b) not in seen:
                        seen.add((a, b))
                        yield a, b

    def neighbours(self, number: int) -> list[int]:
        """Return the remaining loops that share a buffer with this one, nearest first."""
        names = self.reads[number] | self.writes[number]
        found = {n for name in names for n in self.touching[name] if n in self.alive}
        loops = [n for n in found - {number} if isinstance(self.steps[n], Loop)]
        return sorted(loops, key=lambda n: (abs(self.first[n] - self.first[number]), n))[:24]

    def in_order(self, a: int, b: int) -> tuple[int, int]:
        """Return the pair in its execution order: by dependence, else by original position."""
        if self.before[a] & self.members[b]:
            return b, a
        if self.before[b] & self.members[a]:
            return a, b
        return (a, b) if self.first[a] <= self.first[b] else (b, a)

    def entry(self, a: int, b: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield a queue entry if merging saves anything: most bytes first, then nearest."""
        saved = self._saved(a, b)
        if saved > 0:
            yield -saved, abs(self.first[a] - self.first[b]), a, b

    def _saved(self, a: int, b: int) -> int:
        total = 0
        for name in self.writes[a] & self.reads[b]:
            internal = name not in self.kept and not (self.touching[name] & self.alive) - {a, b}
            total += self.nbytes[name] * (2 if internal else 1) + 1  # even a scalar saves a launch
        shared = sum(self.nbytes[name] for name in self.reads[a] & (self.reads[b] | self.writes[b]))
        if not total and shared < MIN_SHARED_BYTES:
            return 1 if shared and (self._is_brief(a) or self._is_brief(b)) else 0
        return total + shared

    def _is_brief(self, number: int) -> bool:
        """Whether starting the loop takes longer than running it."""
        names = self.reads[number] | self.writes[number]
        started = all(traits_of(self.devices[name]).many_threads for name in self.writes[number])
        return started and sum(self.nbytes[name] for name in names) <= BRIEF_BYTES

    def small_between(self, a: int, b: int) -> list[int]:
        """Return the steps between two loops that share much, in order, if all of them can become one loop.

        Each of them saves little and so merges late. Until then, two of its dependences may have merged for a few KiB,
        and would separate the large loops for good.
        """
        bits = self.after[a] & self.before[b] & ~(self.members[a] | self.members[b])
        if not bits or self._saved(a, b) < LARGE_BYTES:
            return []
        between = sorted(self._living(bits), key=lambda n: (self.before[n].bit_count(), self.first[n]))
        loops = [step for n in (a, *between, b) if isinstance(step := self.steps[n], Loop)]
        if len(between) > MAX_LOOPS_BETWEEN or len(loops) < len(between) + 2:
            return []
        one: Loop | None = loops[0]
        for loop in loops[1:]:
            one = None if one is None else self.merge(one, loop)
        return between if one is not None else []

    def joined(self, a: int, b: int) -> Loop | None:
        """Merge two loops into one, or return None where that is not allowed."""
        first, second = self.steps[a], self.steps[b]
        if not self.may_join(a, b):
            return None
        assert isinstance(first, Loop) and isinstance(second, Loop)
        merged = self.merge(first, second)
        refused = merged is None or self.ends_takeover(a, b, merged) or self.suits_no_program(merged)
        return None if refused else merged

    def may_join(self, a: int, b: int) -> bool:
        """Return whether no third step must run between, and b need not run before a.

        They also must touch at most one part of memory, and one step must leave their collectives in order.
        """
        if self.before[a] & self.members[b] or (self.parts and len(self._parts(a) | self._parts(b)) > 1):
            return False
        if self.events and not may_share_a_step(self._events(a, b)):
            return False
        return not self.after[a] & self.before[b] & ~(self.members[a] | self.members[b])

    def _events(self, a: int, b: int) -> tuple[CollectiveEvent, ...]:
        return (*self.events.get(a, ()), *self.events.get(b, ()))

    def _parts(self, number: int) -> set[int]:
        return {self.parts[name] for name in self.reads[number] | self.writes[number] if name in self.parts}

    def suits_no_program(self, merged: Loop) -> bool:
        """Return whether a GPU's program would combine columns of rows too long for its registers, or scatter bytes."""
        many_threads = loop_traits(merged, self.table).many_threads
        return many_threads and (sums_overflow(merged) or scatters_bytes(merged))

    def ends_takeover(self, a: int, b: int, merged: Loop) -> bool:
        """Return whether merging loses in-place reuse of more bytes than it saves.

        The gradient of a Llama's logits overwrites the logits, 0.5 GiB. It could not if the loop also counted tokens,
        which would save one read of the tokens.
        """
        if self.writes[a] & self.reads[b]:
            return False
        saved, before = self._saved(a, b), self.before[a] | self.before[b]
        handed = sum(self._handed_on(self.steps[n], {n}, self.before[n], saved) for n in (a, b))
        return handed > 0 and handed - self._handed_on(merged, {a, b}, before, saved) > saved

    def _handed_on(self, step: Step, numbers: set[int], before: int, least: int) -> int:
        """Return the bytes of buffers above `least` that the step reads last and may overwrite with results."""
        total, heirs = 0, sorted(name for name in step.writes if self.nbytes[name] > least)
        for name in sorted(step.reads) if heirs else ():
            others = (self.touching[name] & self.alive) - numbers
            lasts = (name not in self.kept or name in self.donated) and all(before & self.members[n] for n in others)
            heir = next((new for new in heirs if lasts and takes_over(step, self.table[name], self.table[new])), None)
            if heir is not None:
                heirs.remove(heir)
                total += self.nbytes[name]
        return total

    def replace_pair(self, a: int, b: int, merged: Loop) -> int:
        """Replace both loops by the merged one; return its number."""
        new, own = len(self.steps), self.members[a] | self.members[b]
        for one, other in ((a, b), (b, a)):  # steps that depend on one of them now depend on both
            for n in self._living(self.after[one] & ~self.after[other] & ~own):
                self.before[n] |= self.before[other] | self.members[other]
            for n in self._living(self.before[one] & ~self.before[other] & ~own):
                self.after[n] |= self.after[other] | self.members[other]
        self.steps[new], self.reads[new], self.writes[new] = merged, merged.reads, merged.writes
        self.alive -= {a, b}
        self.alive.add(new)
        self.first[new], self.members[new] = min(self.first[a], self.first[b]), own
        if events := self._events(a, b):
            self.events[new] = events
        self.before[new] = (self.before[a] | self.before[b]) & ~own
        self.after[new] = (self.after[a] | self.after[b]) & ~own
        for n in _bits(own):
            self.living[n] = new
        for name in self.reads[new] | self.writes[new]:
            self.touching[name].add(new)
        for old in (a, b):
            for name in self.reads[old] | self.writes[old]:
                self.touching[name].discard(old)
        return new

    def ordered(self) -> list[Step]:
        """Return all remaining steps, each as early as its original position and its dependences allow."""
        awaited: dict[int, list[int]] = {}  # step -> steps to check again for readiness after it
        ready: list[tuple[int, int]] = []
        result: list[Step] = []
        done, asked = 0, sorted(self.alive)
        while asked or ready:
            for n in asked:
                left = self.before[n] & ~done
                if left:
                    awaited.setdefault(self.living[left.bit_length() - 1], []).append(n)
                else:
                    heapq.heappush(ready, (self.first[n], n))
            if not ready:
                break
            _, number = heapq.heappop(ready)
            result.append(self.steps[number])
            done |= self.members[number]
            asked = awaited.pop(number, [])
        assert len(result) == len(self.alive), "fusion made a cycle"
        return result

    def _living(self, bits: int) -> set[int]:
        """Return the current steps that contain these original ones."""
        return {self.living[n] for n in _bits(bits)}


def _with_order(depends: Sequence[frozenset[int]], events: Sequence[CollectiveEvent]) -> Iterator[frozenset[int]]:
    """Yield, for each step, what it depends on, and the steps that must stay before it for the order of events."""
    ordered: dict[int, set[int]] = {}
    for before, after in ordered_pairs(events):
        ordered.setdefault(after, set()).add(before)
    for number, previous in enumerate(depends):
        yield previous | ordered.get(number, frozenset())


def _bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
