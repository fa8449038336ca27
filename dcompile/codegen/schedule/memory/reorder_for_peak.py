"""Compute a planned program's peak memory, and reorder its steps to lower it.

For devices whose allocator takes memory back at once, loops that free memory run as early as possible. What a forward
saves is computed after its last step, since nothing else needs it. Float8 training by rows saves activations in 8
bits, scaled by columns: all activations in 16 bits would be held until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from dcompile.codegen.schedule.memory.plan import escaping_buffers, plan_memory
from dcompile.codegen.schedule.memory.reuse_external import is_known, workspace_bytes
from dcompile.codegen.schedule.order.dependences import edges
from dcompile.device_traits import main_device, traits_of
from dcompile.ir.buffers import IN_DONOR, Buffer
from dcompile.ir.nodes import Collective, Loop, Program, Step

WINDOW_STEPS = 6
"""Steps that may run before the one whose turn it is: neighbours share caches, and planning time stays linear."""
MIN_SAVED_BYTES = 1 << 16
"""Bytes of peak that another order must save to be chosen."""


def plan_memory_for_peak(program: Program, saves: bool = False) -> Program:
    """Plan memory for the given order of steps, or for one near it that has a lower peak.

    Guarantees: bitwise-equal values; library calls with effects keep their order.
    Relies on: as `plan_memory`. Programs with collectives keep their order, since it decides which computation hides
    which collective.
    """
    if any(isinstance(step, Collective) for step in program.steps):
        return plan_memory(program, saves)
    if traits_of(main_device(buffer.device for buffer in program.buffers)).has_caching_allocator:
        return plan_memory(hoist_frees(program), saves)
    planned = plan_memory(program, saves)
    planned = _better(planned, reorder_for_frees(program), saves)
    while (moved := delay_peak_call(planned)) is not None:
        better = _better(planned, replace(program, steps=moved), saves)
        if better is planned:
            break
        planned = better
    return planned


def _better(planned: Program, other: Program, saves: bool) -> Program:
    """Return the plan of another order if it saves at least `MIN_SAVED_BYTES`, else the given plan."""
    found = plan_memory(other, saves)
    return found if peak_bytes(found) + MIN_SAVED_BYTES <= peak_bytes(planned) else planned


def peak_bytes(planned: Program) -> int:
    """Return the peak of arena, results, library tensors and donated inputs together; symbolic sizes do not count."""
    arena = planned.arena_bytes if isinstance(planned.arena_bytes, int) else 0
    begun, ended = _held_bytes(planned)
    table = planned.table
    own = [workspace_bytes(step, table) for step in planned.steps]
    return arena + int((_while(begun, ended) + own).max(initial=0))


def _held_bytes(planned: Program) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes outside the arena that each step is the first, and the last, to hold; donated from step 0."""
    storages = {buffer.name: buffer.storage or "" for buffer in planned.buffers}
    guests = {
        name: storage.removeprefix(IN_DONOR) for name, storage in storages.items() if storage.startswith(IN_DONOR)
    }
    spans: dict[str, tuple[int, int]] = dict.fromkeys(planned.donated, (0, 0))
    for position, step in enumerate(planned.steps):
        for name in step.reads | step.writes:
            for held in (name, guests.get(name, name)):
                spans[held] = (spans.get(held, (position, position))[0], position)
    kept = escaping_buffers(planned)
    begun, ended = (np.zeros(len(planned.steps), np.int64) for _ in range(2))
    for buffer in planned.buffers:
        counts = buffer.storage in ("out", "library") or buffer.name in planned.donated
        if counts and buffer.name in spans and is_known(buffer):
            first, last = spans[buffer.name]
            begun[first] += buffer.nbytes
            ended[last] += 0 if buffer.name in kept else buffer.nbytes
    return begun, ended


def _while(begun: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the bytes held while each step runs."""
    held: np.ndarray = np.cumsum(begun) - np.cumsum(ended) + ended
    return held


def delay_peak_call(planned: Program) -> tuple[Step, ...] | None:
    """Move the library call at the peak after later steps, if its workspace is large; return None if it cannot move.

    The gradients of a model's last filters come first in its backward, where everything saved is still live. Nothing
    waits for them, and a few steps later the tensors saved by the layer before are freed. The call's inputs are held
    until it runs. The result is None where the peak is at another step, or where the next step needs the call.
    """
    steps, table = planned.steps, planned.table
    own = np.array([workspace_bytes(step, table) for step in steps])
    if own.max(initial=0) < MIN_SAVED_BYTES:
        return None
    begun, ended = _held_bytes(planned)
    held = _while(begun, ended)
    at = int((held + own).argmax())
    before = edges(steps)
    stop = next((n for n in range(at + 1, len(steps)) if at in before[n]), len(steps))
    if own[at] < MIN_SAVED_BYTES or stop == at + 1:
        return None
    meanwhile = (held + own)[at + 1 : stop] + ended[at] - begun[at]
    itself = (held - ended)[at + 1 : stop] + ended[at] + own[at]
    peaks = np.maximum(np.maximum.accumulate(meanwhile), itself)
    to = at + 2 + int(peaks.argmin())
    return (*steps[:at], *steps[at + 1 : to], steps[at], *steps[to:])


def reorder_for_frees(program: Program) -> Program:
    """Pick, among ready steps, the one after which the least memory is held; on ties, the earlier one.

    A weight's gradient, which frees a saved activation, then comes before the activation's gradient, which may reuse
    that memory.
    """
    steps = program.steps
    before = edges(steps)
    after: list[list[int]] = [[] for _ in steps]
    for number, firsts in enumerate(before):
        for first in firsts:
            after[first].append(number)
    memory = HeldBytes(program, is_known)
    waiting = [len(firsts) for firsts in before]
    ready = {number for number, count in enumerate(waiting) if not count}
    done: list[int] = []
    while ready:
        turn = min(ready)
        number = min((n for n in ready if n < turn + WINDOW_STEPS), key=lambda n: (memory.change(n), n))
        ready.remove(number)
        done.append(number)
        memory.run(number)
        for n in after[number]:
            waiting[n] -= 1
            if not waiting[n]:
                ready.add(n)
    return replace(program, steps=tuple(steps[number] for number in done))


MIN_FREED_BYTES = 1 << 20
"""Bytes of peak that the other order must save to be chosen."""


def hoist_frees(program: Program) -> Program:
    """Move each loop that frees more bytes than it takes to where it can first run, if that lowers the peak.

    Guarantees: bitwise-equal values; all other steps keep their order.
    """
    order = _HoistedOrder(program).find()
    before, after = (peak_above_start(program, steps, _counts) for steps in (range(len(order)), order))
    if after + MIN_FREED_BYTES > before:
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


class HeldBytes:
    """Bytes that each step adds to the memory held, given the steps that have run.

    `counts` says which buffers count. Inputs are held from the start; those that are not donated, and results, to the
    end.
    """

    def __init__(self, program: Program, counts: Callable[[Buffer], bool]) -> None:
        kept = program.returned | set(program.inputs) - set(program.donated)
        self._bytes = {buffer.name: buffer.nbytes for buffer in program.buffers if counts(buffer)}
        self._freed = {name: nbytes for name, nbytes in self._bytes.items() if name not in kept}
        self.touched: Sequence[frozenset[str]] = [step.reads | step.writes for step in program.steps]
        """Buffers of each step."""
        self.left: dict[str, int] = {}
        """Number of steps that still touch a buffer."""
        for names in self.touched:
            for name in names:
                self.left[name] = self.left.get(name, 0) + 1
        self._there = set(program.inputs)

    def allocated(self, number: int) -> int:
        """Bytes that are allocated before a step."""
        return sum(self._bytes.get(name, 0) for name in self.touched[number] if name not in self._there)

    def freed(self, number: int) -> int:
        """Bytes that are freed after a step."""
        return sum(self._freed.get(name, 0) for name in self.touched[number] if self.left[name] == 1)

    def change(self, number: int) -> int:
        """Bytes that are held after a step and not before it."""
        return self.allocated(number) - self.freed(number)

    def run(self, number: int) -> None:
        """Note that a step has run."""
        self._there |= self.touched[number]
        for name in self.touched[number]:
            self.left[name] -= 1


def peak_above_start(program: Program, order: Iterable[int], counts: Callable[[Buffer], bool]) -> int:
    """Return the most bytes held at once by steps in this order, above those held before the first one."""
    memory, held, peak = HeldBytes(program, counts), 0, 0
    for number in order:
        held += memory.allocated(number)
        peak = max(peak, held)
        held -= memory.freed(number)
        memory.run(number)
    return peak
