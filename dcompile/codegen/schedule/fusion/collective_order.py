"""Keep the order in which a program first reads sharded parameters, and in which it finishes their gradients.

All-gathers and reduce-scatters follow that order. Ranks with other batch sizes have other programs of one graph: sizes
may be numbers on one rank and symbols on another, and loops merge differently. Before fusion their steps are the same.
So fusion may not swap the steps where collectives belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TypeAlias

from dcompile.ir.nodes import Loop, Program, View

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
