"""Offsets in one piece of memory, given from when to when each part of it is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dcompile.ir.index import Size, as_index, as_size, floordiv, is_nonnegative, typical

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of memory that is needed from step `first` to step `last`."""

    first: int
    last: int
    nbytes: Size


def place(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Offsets such that blocks needed at the same time do not overlap, and the total size.

    The problem is NP-hard. Largest first is good for nets of a few sizes, longest-lived first for skip connections and
    what is saved for later, first-come for chains; the best of the three was within 10% of the peak of live bytes on
    random lifetimes (tests/codegen/schedule/memory/test_plan.py holds it to 30%).
    """
    sizes = [typical(block.nbytes) for block in blocks]
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda n: (-sizes[n], blocks[n].first, n),
        lambda n: (-sizes[n] * (blocks[n].last - blocks[n].first + 1), blocks[n].first, n),
        lambda n: (blocks[n].first, -blocks[n].last, n),
    )
    plans = [_place_in_order(blocks, sorted(range(len(blocks)), key=order)) for order in orders]
    return min(plans, key=lambda plan: plan[1])


def align_size(nbytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _place_in_order(blocks: Sequence[Block], order: Sequence[int]) -> tuple[list[int], int]:
    """Put each block, in turn, into the smallest gap among the placed blocks that it meets in time."""
    count = len(blocks)
    first, last, start, end = (np.zeros(count, np.int64) for _ in range(4))
    offsets = [0] * count
    for done, number in enumerate(order):
        block = blocks[number]
        size = align_size(typical(block.nbytes))
        meets = (first[:done] <= block.last) & (last[:done] >= block.first)
        offsets[number] = best_gap(start[:done][meets], end[:done][meets], size)
        first[done], last[done] = block.first, block.last
        start[done], end[done] = offsets[number], offsets[number] + size
    return offsets, int(end.max(initial=0))


def best_gap(start: np.ndarray, end: np.ndarray, size: int) -> int:
    """The offset of the smallest gap of at least `size` bytes; behind everything if there is none."""
    if not len(start):
        return 0
    by_start = start.argsort(kind="stable")
    reached = np.maximum.accumulate(end[by_start])
    gaps = start[by_start]
    gaps[1:] -= reached[:-1]
    fitting = np.flatnonzero(gaps >= max(size, 1))
    if not len(fitting):
        return int(reached[-1])
    best = int(fitting[gaps[fitting].argmin()])
    return int(reached[best - 1]) if best else 0


@dataclass(slots=True)
class _SymbolicSlot:
    """Memory that blocks of symbolic size take turns in, those of the largest size first."""

    nbytes: Size
    blocks: list[Block]

    def takes(self, block: Block) -> bool:
        """Is it free, and known to be large enough whatever the sizes are?"""
        free = all(block.first > other.last or block.last < other.first for other in self.blocks)
        return free and is_nonnegative(as_index(self.nbytes) - block.nbytes, {})


def place_symbolic(blocks: Sequence[Block], start: Size) -> tuple[list[Size], Size]:
    """Offsets of blocks of symbolic size behind `start`, and where the last one ends.

    A block joins a slot whose size is provably enough; slots lie one after another, so that their offsets are sums of
    sizes, which a call works out when it begins.
    """
    slots: list[_SymbolicSlot] = []
    member: dict[int, _SymbolicSlot] = {}
    order = sorted(range(len(blocks)), key=lambda n: (-typical(blocks[n].nbytes), blocks[n].first, n))
    for number in order:
        fitting = [slot for slot in slots if slot.takes(blocks[number])]
        if fitting:
            slot = min(fitting, key=lambda slot: typical(slot.nbytes))
        else:
            slot = _SymbolicSlot(blocks[number].nbytes, [])
            slots.append(slot)
        slot.blocks.append(blocks[number])
        member[number] = slot
    offsets: dict[int, Size] = {}
    for slot in slots:
        offsets[id(slot)] = start
        start = as_size(as_index(start) + _align_symbolic(slot.nbytes))
    return [offsets[id(member[number])] for number in range(len(blocks))], start


def _align_symbolic(nbytes: Size) -> Size:
    """Rounded up to whole cache lines."""
    return as_size(floordiv(as_index(nbytes) + ALIGNMENT - 1, ALIGNMENT, {}) * ALIGNMENT)
