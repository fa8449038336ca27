"""Temporaries on a GPU that are allocated when they are needed, beside the arena.

An arena counts from the first step to the last, also when what the forward saved is most. On the CPU what would make
it large lies in other memory (`lodging.py`), since pages that were used before are cheap. PyTorch's allocator on GPUs
hands memory out again in a microsecond, in stream order: so there large temporaries are allocated by themselves and let
go after their last use, and the first gradients lie in the saved tensor that they are computed from. A few small ones
follow where they alone make the arena larger than it has to be at the peak: what is alive beside the largest one, but
not when most is held, or what lies there from a step behind the peak to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from dcompile.codegen.schedule.memory.offsets import Block
from dcompile.codegen.schedule.memory.reuse_external import in_flight
from dcompile.device_traits import traits_of
from dcompile.ir.analysis import takes_over
from dcompile.ir.nodes import Buffer, Program

MIN_BLOCK_BYTES = 1 << 20
"""Bytes: an allocation costs about as much time as a small kernel."""
MIN_PEAK_FRACTION = 16384
"""Nothing is done for less than this part of the peak."""
BYTES_PER_ALLOCATION = 262144
"""An allocation more must save this part of the peak: kilobytes of gigabytes, for a microsecond of the host's time."""

MIN_SMALL_BLOCK_BYTES = 1 << 16
"""Bytes that each block must save that lies apart although it is small."""
MAX_SMALL_BLOCKS = 12
"""Blocks that are tried for that, one after another; the planner's time goes with their number."""


@dataclass(frozen=True, slots=True)
class SeparateAllocations:
    """Blocks outside of the arena: in the memory of the input that is named, or (None) in memory of their own."""

    hosts: Mapping[int, str | None]


def fits(buffer: Buffer) -> bool:
    """Whether it is memory of a GPU of a size known now."""
    return traits_of(buffer.device).has_caching_allocator and isinstance(buffer.extent, int) and buffer.is_tensor


def movable(program: Program, groups: Sequence[Sequence[Buffer]]) -> frozenset[int]:
    """Groups of buffers in one place that may lie outside of the arena: on a GPU, and no collective works on them."""
    flying = in_flight(program)
    return frozenset(n for n, group in enumerate(groups) if all(fits(b) and b.name not in flying for b in group))


def heirs_of(
    program: Program,
    groups: Sequence[Sequence[Buffer]],
    lives: Mapping[str, tuple[int, int]],
    numbers: Set[int],
    kept: Set[str],
) -> dict[int, str]:
    """Groups whose first buffer may take over a donated input in place, in the step that reads it for the last time.

    `kept`: buffers whose memory results show, or may show.
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
    """Which of these blocks to keep out of the arena, such that it and `held` (bytes at each step) peak low.

    What is larger goes first, since it saves most for each allocation; then what makes the arena large for others.
    """
    sides = _Sides(blocks, heirs, held)
    _move_large(sides)
    _move_crowding(sides)
    return SeparateAllocations({number: heirs.get(number) for number in sorted(sides.apart)})


class _Sides:
    """Bytes at each step in the arena and outside of it, as blocks move out one after another."""

    def __init__(self, blocks: Mapping[int, Block], heirs: Mapping[int, str], held: np.ndarray) -> None:
        self.blocks, self.heirs = blocks, heirs
        self.sizes = {number: int(block.nbytes) for number, block in blocks.items()}  # type: ignore[arg-type]
        self.inside, self.outside = np.zeros(len(held), np.int64), held.astype(np.int64)
        self.apart: list[int] = []
        for number, block in blocks.items():
            self.inside[block.first : block.last + 1] += self.sizes[number]

    def move(self, number: int) -> None:
        """Out of the arena."""
        self.apart.append(number)
        self._add(number, self.sizes[number])

    def keep(self, count: int) -> None:
        """So many of those that moved first; the others move back."""
        while len(self.apart) > count:
            number = self.apart.pop()
            self._add(number, -self.sizes[number])

    def _add(self, number: int, nbytes: int) -> None:
        block = self.blocks[number]
        self.inside[block.first : block.last + 1] -= nbytes
        self.outside[block.first + (number in self.heirs) : block.last + 1] += nbytes

    def peak_without(self, number: int) -> int:
        """The peak if this block moved, too."""
        self.move(number)
        peak = self.peak
        self.keep(len(self.apart) - 1)
        return peak

    @property
    def peak(self) -> int:
        """The arena counts at every step."""
        return int(self.inside.max(initial=0)) + int(self.outside.max(initial=0))

    def fullest(self) -> list[int]:
        """The blocks in the arena at the first step that makes it as large as it is."""
        step = int(self.inside.argmax()) if self.inside.any() else -1
        alive = (number for number, block in self.blocks.items() if block.first <= step <= block.last)
        return [number for number in alive if self.sizes[number] and number not in self.apart]


def _move_large(sides: _Sides) -> None:
    """All blocks from some size on, or none."""
    usual, sizes = sides.peak, sides.sizes
    peaks, costs = [usual], {usual + 1: usual}  # the smallest size that lies apart -> peak and price
    for count, number in enumerate(sorted(sizes, key=lambda n: (-sizes[n], n)), 1):
        if sizes[number] < MIN_BLOCK_BYTES:
            break
        sides.move(number)
        peaks.append(sides.peak)
        costs[sizes[number]] = peaks[-1] + count * (usual // BYTES_PER_ALLOCATION)
    smallest = min(costs, key=lambda size: (costs[size], -size))
    worth = usual - min(peaks) >= max(usual // MIN_PEAK_FRACTION, MIN_BLOCK_BYTES)
    sides.keep(sum(sizes[number] >= smallest for number in sides.apart) if worth else 0)


def _move_crowding(sides: _Sides) -> None:
    """What lies in the arena where that is largest, whatever its size, if something else makes the peak."""
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
