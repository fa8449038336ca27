"""Assign offsets in one memory region to blocks with known lifetimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dcompile.ir.index import Size, as_index, as_size, floordiv, is_nonnegative, typical

ALIGNMENT = 64  # bytes: one cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class Block:
    """A memory region in use from step `first` to step `last`, both included."""

    first: int
    last: int
    nbytes: Size


def place(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Return each block's offset and the total size in bytes; blocks alive at the same time do not overlap.

    The problem is NP-hard, so three greedy orders are tried and the smallest plan wins. Largest first suits nets of few
    sizes; longest-lived first suits skip connections and saved tensors; first-come suits chains. On random lifetimes
    the best was within 10 % of the peak of live bytes; tests/codegen/schedule/memory/test_plan.py holds it to 30 %.
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
    """Round bytes up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _place_in_order(blocks: Sequence[Block], order: Sequence[int]) -> tuple[list[int], int]:
    """Place blocks in this order, each into the smallest gap among placed blocks that are alive at the same time."""
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
    """Return the offset of the smallest gap of at least `size` bytes, or the end of the last block if there is none."""
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
    """Memory shared by blocks of symbolic size with disjoint lifetimes; the first one sets its size."""

    nbytes: Size
    blocks: list[Block]

    def takes(self, block: Block) -> bool:
        """Is the slot free during the block's life, and provably large enough for every value of the symbols?"""
        free = all(block.first > other.last or block.last < other.first for other in self.blocks)
        return free and is_nonnegative(as_index(self.nbytes) - block.nbytes, {})


def place_symbolic(blocks: Sequence[Block], start: Size) -> tuple[list[Size], Size]:
    """Return offsets of blocks of symbolic size from `start` on, and the end of the last one.

    A block joins a slot whose size is provably enough. Slots follow one another, so their offsets are sums of sizes,
    which each call evaluates once at its start.
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
    """Round a symbolic number of bytes up to whole cache lines."""
    return as_size(floordiv(as_index(nbytes) + ALIGNMENT - 1, ALIGNMENT, {}) * ALIGNMENT)
