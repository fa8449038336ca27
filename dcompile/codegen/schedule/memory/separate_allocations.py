"""Allocate large temporaries on GPUs separately from the arena, when they are needed.

An arena counts from the first step to the last, even while the forward's saved tensors are at their peak. On CPUs,
temporaries reuse external memory instead (`reuse_external.py`), since pages that were used before are cheap. PyTorch's
GPU allocator reuses memory in a microsecond, in stream order. So large temporaries are allocated separately and freed
after their last use; the first gradients overwrite the saved tensor that they are computed from. A few small
temporaries follow if they alone make the arena larger than its need at the peak. Such a block is alive with the largest
one but not at the peak, or lives from a step after the peak to the end.

The arena outlives the program: a model's backward has the forward's, beside all saved tensors, and so has the caller
between two steps. So large blocks, such as logits, leave it even if that does not lower the program's own peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from dcompile.codegen.schedule.memory.offsets import Block
from dcompile.codegen.schedule.memory.reuse_external import in_flight
from dcompile.device_traits import traits_of
from dcompile.ir.analysis import takes_over
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Program

MIN_BLOCK_BYTES = 1 << 20
"""Bytes: an allocation costs about as much time as a small kernel."""
MIN_PEAK_FRACTION = 16384
"""Divisor of the peak: separate allocations must save 1/16384 of it."""
BYTES_PER_ALLOCATION = 262144
"""Divisor of the peak: each allocation must save 1/262144 of it. That is kilobytes of gigabytes, for a microsecond of
host time."""

LASTING_FRACTION = 1024
"""Divisor of the peak: an allocation must make the arena, which outlives the program, smaller by 1/1024 of it."""
RISE_FRACTION = 128
"""Divisor of the peak: it may rise by 1/128 where the arena shrinks by more."""
MIN_SMALL_BLOCK_BYTES = 1 << 16
"""Bytes that each separately allocated small block must save."""
MAX_SMALL_BLOCKS = 12
"""Small blocks tried, one after another; the planner's time grows with their number."""


@dataclass(frozen=True, slots=True)
class SeparateAllocations:
    """Blocks outside the arena: each in the memory of the named input, or (None) in an allocation of its own."""

    hosts: Mapping[int, str | None]


def fits(buffer: Buffer) -> bool:
    """Return whether a buffer is GPU memory of static size."""
    return traits_of(buffer.device).has_caching_allocator and isinstance(buffer.extent, int) and buffer.is_tensor


def movable(program: Program, groups: Sequence[Sequence[Buffer]]) -> frozenset[int]:
    """Return the in-place groups that may leave the arena: on a GPU, and used by no collective."""
    flying = in_flight(program)
    return frozenset(n for n, group in enumerate(groups) if all(fits(b) and b.name not in flying for b in group))


def heirs_of(
    program: Program,
    groups: Sequence[Sequence[Buffer]],
    lives: Mapping[str, tuple[int, int]],
    numbers: Set[int],
    kept: Set[str],
) -> dict[int, str]:
    """Map groups to the donated input that their first buffer may overwrite in place, in the step of its last read.

    `kept`: buffers whose memory results are views of, or may be.
    """
    written = frozenset().union(*(step.writes for step in program.steps))
    table, barred = program.table, written | kept
    given = [table[name] for name in program.donated if name in lives and name not in barred]
    dying: dict[int, list[Buffer]] = {}
    for buffer in filter(fits, given):
        dying.setdefault(lives[buffer.name][1], []).append(buffer)
    found: dict[int, str] = {}
    for number in sorted(numbers):
        head = groups[number][0]
        first = lives[head.name][0] if head.name in lives else -1
        for old in dying.get(first, ()):
            if takes_over(program.steps[first], old, head):
                found[number] = old.name
                dying[first].remove(old)
                break
    return found


def set_apart(blocks: Mapping[int, Block], heirs: Mapping[int, str], held: np.ndarray) -> SeparateAllocations:
    """Choose the blocks to keep out of the arena, such that arena and `held` (bytes at each step) have a low peak.

    Larger blocks go first, since they save most for each allocation; then the blocks at the arena's fullest step.
    """
    sides = _Sides(blocks, heirs, held)
    _move_large(sides)
    _move_lasting(sides)
    _move_crowding(sides)
    return SeparateAllocations({number: heirs.get(number) for number in sorted(sides.apart)})


class _Sides:
    """Bytes at each step inside and outside the arena, as blocks move out one after another."""

    def __init__(self, blocks: Mapping[int, Block], heirs: Mapping[int, str], held: np.ndarray) -> None:
        self.blocks, self.heirs = blocks, heirs
        self.sizes = {number: int(block.nbytes) for number, block in blocks.items()}  # type: ignore[arg-type]
        self.inside, self.outside = np.zeros(len(held), np.int64), held.astype(np.int64)
        self.apart: list[int] = []
        for number, block in blocks.items():
            self.inside[block.first : block.last + 1] += self.sizes[number]

    def move(self, number: int) -> None:
        """Move a block out of the arena."""
        self.apart.append(number)
        self._add(number, self.sizes[number])

    def keep(self, count: int) -> None:
        """Keep the first `count` moved blocks outside, and move the others back."""
        while len(self.apart) > count:
            number = self.apart.pop()
            self._add(number, -self.sizes[number])

    def _add(self, number: int, nbytes: int) -> None:
        block = self.blocks[number]
        self.inside[block.first : block.last + 1] -= nbytes
        self.outside[block.first + (number in self.heirs) : block.last + 1] += nbytes

    def peak_without(self, number: int) -> int:
        """Return the peak if this block moved out, too."""
        self.move(number)
        peak = self.peak
        self.keep(len(self.apart) - 1)
        return peak

    @property
    def peak(self) -> int:
        """Peak bytes; the arena counts at every step."""
        return self.arena + int(self.outside.max(initial=0))

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        return int(self.inside.max(initial=0))

    def fullest(self) -> list[int]:
        """Return the blocks in the arena at the first step at which it is fullest."""
        step = int(self.inside.argmax()) if self.inside.any() else -1
        alive = (number for number, block in self.blocks.items() if block.first <= step <= block.last)
        return [number for number in alive if self.sizes[number] and number not in self.apart]


def _move_large(sides: _Sides) -> None:
    """Move out all blocks above the best size limit, or none."""
    usual, sizes = sides.peak, sides.sizes
    peaks, costs = [usual], {usual + 1: usual}  # the smallest size that is allocated separately -> its cost
    for count, number in enumerate(sorted(sizes, key=lambda n: (-sizes[n], n)), 1):
        if sizes[number] < MIN_BLOCK_BYTES:
            break
        sides.move(number)
        peaks.append(sides.peak)
        costs[sizes[number]] = peaks[-1] + count * (usual // BYTES_PER_ALLOCATION)
    smallest = min(costs, key=lambda size: (costs[size], -size))
    worth = usual - min(peaks) >= max(usual // MIN_PEAK_FRACTION, MIN_BLOCK_BYTES)
    sides.keep(sum(sizes[number] >= smallest for number in sides.apart) if worth else 0)


def _move_lasting(sides: _Sides) -> None:
    """Move out the largest blocks that are left, as long as the arena gets much smaller.

    The arena may then be fullest at another step, and the program's peak higher by less than the arena shrinks.
    """
    price, sizes = max(sides.peak // LASTING_FRACTION, MIN_BLOCK_BYTES), sides.sizes
    left = [n for n in sorted(sizes, key=lambda n: (-sizes[n], n)) if n not in sides.apart and sizes[n] >= price]
    limit, kept = sides.peak + sides.peak // RISE_FRACTION, len(sides.apart)
    best = sides.peak + sides.arena
    for count, number in enumerate(left, 1):
        sides.move(number)
        if sides.peak <= limit and (cost := sides.peak + sides.arena + count * price) < best:
            best, kept = cost, len(sides.apart)
    sides.keep(kept)


def _move_crowding(sides: _Sides) -> None:
    """Move out up to `MAX_SMALL_BLOCKS` blocks at the arena's fullest step, if that lowers the peak enough."""
    best = sides.peak
    price, kept = max(best // BYTES_PER_ALLOCATION, MIN_SMALL_BLOCK_BYTES), len(sides.apart)
    for count in range(1, MAX_SMALL_BLOCKS + 1):
        alive = sides.fullest()
        if not alive:
            break
        sides.move(min(alive, key=lambda n: (sides.peak_without(n), -sides.sizes[n], n)))
        if (cost := sides.peak + count * price) < best:
            best, kept = cost, len(sides.apart)
    sides.keep(kept)
