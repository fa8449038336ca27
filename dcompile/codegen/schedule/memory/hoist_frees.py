"""Run loops that free memory as early as possible, for devices whose allocator takes memory back at once.

What a forward saves is computed behind its last step, since nothing else needs it. Float8 training by rows saves
activations in 8 bits, scaled by columns: all activations in 16 bits would be held until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.schedule.order.dependences import edges
from dcompile.ir.nodes import Loop, Program, Step, View

MIN_SAVED_BYTES = 1 << 20
"""Bytes of peak that the other order must save to be chosen."""


def hoist_frees(program: Program) -> Program:
    """Move each loop that frees more bytes than it takes to where it can first run, if that lowers the peak.

    Guarantees: bitwise-equal values; all other steps keep their order.
    """
    freed, taken = _freed_bytes(program), _taken_bytes(program)
    moved = _hoisted(program.steps, freed, taken)
    if _peak(moved, freed, taken) + MIN_SAVED_BYTES > _peak(program.steps, freed, taken):
        return program
    return replace(program, steps=moved)


def _freed_bytes(program: Program) -> Mapping[str, int]:
    """Return the bytes of each buffer that is freed after its last use."""
    shown = {output.buffer for output in program.outputs if isinstance(output, View)}
    kept = shown | set(program.inputs) - set(program.donated)
    return {name: nbytes for name, nbytes in _sizes(program).items() if name not in kept}


def _taken_bytes(program: Program) -> Mapping[str, int]:
    """Return the bytes of each buffer that is allocated before its first use."""
    return {name: nbytes for name, nbytes in _sizes(program).items() if name not in program.inputs}


def _sizes(program: Program) -> dict[str, int]:
    return {b.name: b.nbytes for b in program.buffers if b.is_tensor and isinstance(b.extent, int)}


def _hoisted(steps: Sequence[Step], freed: Mapping[str, int], taken: Mapping[str, int]) -> tuple[Step, ...]:
    """Return the steps in order, but loops that free memory as soon as they are ready."""
    before = edges(steps)
    after: list[list[int]] = [[] for _ in steps]
    users: dict[str, set[int]] = {}
    for number, step in enumerate(steps):
        for first in before[number]:
            after[first].append(number)
        for name in step.reads | step.writes:
            users.setdefault(name, set()).add(number)
    waiting = [len(firsts) for firsts in before]
    done = [False] * len(steps)
    order: list[int] = []

    def frees(number: int) -> bool:
        step = steps[number]
        if not isinstance(step, Loop) or waiting[number] or done[number]:
            return False
        names = step.reads | step.writes
        gain = sum(freed.get(name, 0) for name in names if users[name] == {number})
        return gain > sum(taken.get(name, 0) for name in step.writes)

    def run(number: int) -> None:
        queue = [number]
        while queue:
            now = queue.pop(0)
            if done[now]:
                continue
            done[now] = True
            order.append(now)
            touched = steps[now].reads | steps[now].writes
            for name in touched:
                users[name].discard(now)
            for later in after[now]:
                waiting[later] -= 1
            last = {next(iter(users[name])) for name in touched if len(users[name]) == 1}
            queue += sorted(number for number in {*after[now], *last} if frees(number))

    for number in range(len(steps)):
        run(number)
    return tuple(steps[number] for number in order)


def _peak(steps: Sequence[Step], freed: Mapping[str, int], taken: Mapping[str, int]) -> int:
    """Return the most bytes held at once, above those of inputs that nothing frees."""
    last = {name: number for number, step in enumerate(steps) for name in step.reads | step.writes}
    held = sum(nbytes for name, nbytes in freed.items() if name not in taken)
    peak, there = held, set[str]()
    for number, step in enumerate(steps):
        names = step.reads | step.writes
        held += sum(taken.get(name, 0) for name in names - there)
        there |= names
        peak = max(peak, held)
        held -= sum(freed.get(name, 0) for name in names if last[name] == number)
    return peak
