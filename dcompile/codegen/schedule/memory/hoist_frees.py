"""Run loops that free memory as early as possible, for devices whose allocator takes memory back at once.

What a forward saves is computed behind its last step, since nothing else needs it. Float8 training by rows saves
activations in 8 bits, scaled by columns: all activations in 16 bits would be held until then.
"""

from __future__ import annotations

from dataclasses import replace

from dcompile.codegen.schedule.memory.held_bytes import HeldBytes, peak_above_start
from dcompile.codegen.schedule.order.dependences import edges
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Loop, Program

MIN_SAVED_BYTES = 1 << 20
"""Bytes of peak that the other order must save to be chosen."""


def hoist_frees(program: Program) -> Program:
    """Move each loop that frees more bytes than it takes to where it can first run, if that lowers the peak.

    Guarantees: bitwise-equal values; all other steps keep their order.
    """
    order = _HoistedOrder(program).find()
    before, after = (peak_above_start(program, steps, _counts) for steps in (range(len(order)), order))
    if after + MIN_SAVED_BYTES > before:
        return program
    return replace(program, steps=tuple(program.steps[number] for number in order))


def _counts(buffer: Buffer) -> bool:
    return buffer.is_tensor and isinstance(buffer.extent, int)


class _HoistedOrder:
    """Steps in order, but loops that free memory as soon as they are ready."""

    def __init__(self, program: Program) -> None:
        self._steps = program.steps
        self._memory = HeldBytes(program, _counts)
        before = edges(program.steps)
        self._waiting = [len(firsts) for firsts in before]
        self._after: list[list[int]] = [[] for _ in before]
        self._users: dict[str, set[int]] = {}
        """Buffer -> steps that touch it and have not run."""
        for number, firsts in enumerate(before):
            for first in firsts:
                self._after[first].append(number)
            for name in self._memory.touched[number]:
                self._users.setdefault(name, set()).add(number)
        self._order: dict[int, None] = {}

    def find(self) -> list[int]:
        """Return the numbers of all steps."""
        for number in range(len(self._steps)):
            queue = [number]
            while queue:
                now = queue.pop(0)
                if now not in self._order:
                    queue += self._run(now)
        return [*self._order]

    def _run(self, number: int) -> list[int]:
        """Run a step. Return the loops that would now free memory and may have become ready, or the last user."""
        self._order[number] = None
        self._memory.run(number)
        touched = self._memory.touched[number]
        for name in touched:
            self._users[name].discard(number)
        for later in self._after[number]:
            self._waiting[later] -= 1
        last = {next(iter(self._users[name])) for name in touched if len(self._users[name]) == 1}
        return sorted(later for later in {*self._after[number], *last} if self._frees(later))

    def _frees(self, number: int) -> bool:
        ready = not self._waiting[number] and number not in self._order
        return ready and isinstance(self._steps[number], Loop) and self._memory.change(number) < 0
