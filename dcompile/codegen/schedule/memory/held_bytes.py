"""Bytes of buffers that a program holds while its steps run, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Program


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
