"""Start all-reduces as early and wait for them as late as dependences allow."""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.schedule.order.dependences import communicates, touches
from dcompile.ir.nodes import Collective, Program, Step, Wait


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
