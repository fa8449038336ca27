"""Where every buffer lies: lifetimes over the final order, then offsets in one arena that is kept between calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcompile.ir.analysis import can_overwrite
from dcompile.ir.index import Size, as_index, as_size, floordiv, is_nonnegative, typical
from dcompile.ir.nodes import ITEMSIZE, Buffer, Extern, Loop, Program, View
from dcompile.ir.symbols import late_symbols

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register

Life = tuple[int, int]
"""First and last step that touch a buffer."""


def plan_memory(program: Program) -> Program:
    """Give every buffer a place.

    Guarantees: the same steps; buffers that are alive at the same time do not overlap, except that a loop may write
    over a buffer that it reads for the last time, element by element. Buffers that have a place already keep it.
    Relies on: nothing changes the order of steps afterwards.
    """
    behind = _held_by_results(program)
    lives = live_ranges(program, behind)
    storages = _storages(program, behind)
    arena = [buffer for buffer in program.buffers if storages[buffer.name] == "arena"]
    groups = _in_place_groups(program, arena, lives)
    blocks = [_block(group, lives) for group in groups]
    fixed = [n for n, block in enumerate(blocks) if isinstance(block.nbytes, int)]
    offsets: dict[int, Size] = {}
    placed, static_bytes = place([blocks[n] for n in fixed])
    offsets |= zip(fixed, placed, strict=True)
    symbolic = [n for n, block in enumerate(blocks) if not isinstance(block.nbytes, int)]
    slotted, arena_bytes = place_symbolic([blocks[n] for n in symbolic], static_bytes)
    offsets |= zip(symbolic, slotted, strict=True)
    where = {buffer.name: offsets[n] for n, group in enumerate(groups) for buffer in group}
    buffers = tuple(
        buffer
        if buffer.storage is not None
        else replace(buffer, storage=storages[buffer.name], offset=where.get(buffer.name, 0))
        for buffer in program.buffers
    )
    return replace(program, buffers=buffers, arena_bytes=arena_bytes)


def live_ranges(program: Program, behind: Mapping[str, frozenset[str]]) -> dict[str, Life]:
    """First and last touch of each buffer; `behind` names what else a buffer's readers may see.

    A wait touches the buffers of its collective, so they live while it is in flight.
    """
    lives: dict[str, Life] = {}
    for position, step in enumerate(program.steps):
        names = step.reads | step.writes
        for name in names.union(*(behind[name] for name in names if name in behind)):
            lives[name] = (lives.get(name, (position, position))[0], position)
    return lives


def _held_by_results(program: Program) -> dict[str, frozenset[str]]:
    """What must live as long as each result of a library allocation: arguments that it may be a view of.

    That is so for fallbacks, about which nothing is known, and for calls with effects: a functional collective goes on
    reading its argument until the wait on its result.
    """
    behind: dict[str, frozenset[str]] = {}
    for step in program.steps:
        if isinstance(step, Extern) and step.mode == "alloc" and (step.fallback or step.effect):
            seen = step.reads.union(*(behind[name] for name in step.reads if name in behind))
            behind |= dict.fromkeys(step.writes, seen)
    return behind


def _storages(program: Program, behind: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """The kind of memory of each buffer."""
    shown = {output.buffer for output in program.outputs if isinstance(output, View)}
    escaping = shown.union(*(behind[name] for name in shown if name in behind))
    library = {
        name
        for step in program.steps
        if isinstance(step, Extern) and step.mode == "alloc"
        for name in step.outs
        if name is not None
    }
    late = late_symbols(program)
    device = next((buffer.device for buffer in program.buffers if buffer.device != "cpu"), "cpu")
    storages: dict[str, str] = {}
    for buffer in program.buffers:
        if buffer.storage is not None:
            storages[buffer.name] = "placed"
        elif buffer.name in program.inputs:
            storages[buffer.name] = "input"
        elif buffer.name in library:
            storages[buffer.name] = "library"
        elif buffer.name in escaping or _is_late(buffer, late) or buffer.device != device:
            storages[buffer.name] = "out"  # besides what escapes: sizes or devices that the one arena cannot serve
        else:
            storages[buffer.name] = "arena"
    return storages


def _is_late(buffer: Buffer, late: frozenset[str]) -> bool:
    """Is the size known only in the middle of a call?"""
    return any(not late.isdisjoint(as_index(size).variables) for size in (*buffer.shape, *buffer.strides))


def _in_place_groups(program: Program, arena: Sequence[Buffer], lives: Mapping[str, Life]) -> list[list[Buffer]]:
    """Buffers that take over one another's memory, in order of time; most groups have one member."""
    table = {buffer.name: buffer for buffer in arena}
    dying: dict[int, list[Buffer]] = defaultdict(list)
    for buffer in arena:
        if buffer.name in lives:
            dying[lives[buffer.name][1]].append(buffer)
    group_of: dict[str, list[Buffer]] = {buffer.name: [buffer] for buffer in arena}
    for position, step in enumerate(program.steps):
        if not isinstance(step, Loop):
            continue
        for name in sorted(step.writes & table.keys()):
            new = table[name]
            for old in dying[position]:
                if old.name in step.reads and _fits(old, new) and can_overwrite(step, old.name, name):
                    dying[position].remove(old)
                    group_of[name] = group_of[old.name]
                    group_of[name].append(new)
                    break
    return list({id(group): group for group in group_of.values()}.values())


def _fits(old: Buffer, new: Buffer) -> bool:
    return ITEMSIZE[old.dtype] == ITEMSIZE[new.dtype] and 0 != old.extent == new.extent


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of memory that is needed from step `first` to step `last`."""

    first: int
    last: int
    nbytes: Size


def _block(group: Sequence[Buffer], lives: Mapping[str, Life]) -> Block:
    spans = [lives.get(buffer.name, (0, 0)) for buffer in group]
    # all members have one extent: only an empty buffer could differ, and that joins no group
    nbytes = as_size(group[0].extent * ITEMSIZE[group[0].dtype])
    return Block(min(first for first, _ in spans), max(last for _, last in spans), nbytes)


def place(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Offsets such that blocks needed at the same time do not overlap, and the total size.

    The problem is NP-hard. Largest first is good for nets of a few sizes, longest-lived first for skip connections and
    what is saved for later, first-come for chains; the best of the three was within 10% of the peak of live bytes on
    random lifetimes (tests/codegen/schedule/test_memory.py holds it to 30%).
    """
    sizes = [typical(block.nbytes) for block in blocks]
    orders: tuple[Callable[[int], tuple[int, ...]], ...] = (
        lambda n: (-sizes[n], blocks[n].first, n),
        lambda n: (-sizes[n] * (blocks[n].last - blocks[n].first + 1), blocks[n].first, n),
        lambda n: (blocks[n].first, -blocks[n].last, n),
    )
    plans = [_place_in_order(blocks, sorted(range(len(blocks)), key=order)) for order in orders]
    return min(plans, key=lambda plan: plan[1])


def _place_in_order(blocks: Sequence[Block], order: Sequence[int]) -> tuple[list[int], int]:
    """Put each block, in turn, into the smallest gap among the placed blocks that it meets in time."""
    count = len(blocks)
    first, last, start, end = (np.zeros(count, np.int64) for _ in range(4))
    offsets = [0] * count
    for done, number in enumerate(order):
        block = blocks[number]
        size = -(-typical(block.nbytes) // ALIGNMENT) * ALIGNMENT
        meets = (first[:done] <= block.last) & (last[:done] >= block.first)
        offsets[number] = _best_gap(start[:done][meets], end[:done][meets], size)
        first[done], last[done] = block.first, block.last
        start[done], end[done] = offsets[number], offsets[number] + size
    return offsets, int(end.max(initial=0))


def _best_gap(start: np.ndarray, end: np.ndarray, size: int) -> int:
    """The offset of the smallest gap of at least `size` bytes; behind everything if there is none."""
    by_start = np.argsort(start, kind="stable")
    reached = np.concatenate(([0], np.maximum.accumulate(end[by_start]))).astype(np.int64)
    gaps = start[by_start] - reached[:-1]
    fitting = np.where(gaps >= max(size, 1), gaps, np.iinfo(np.int64).max)
    if not len(gaps) or gaps.max() < max(size, 1):
        return int(reached[-1])
    return int(reached[np.argmin(fitting)])


@dataclass(slots=True)
class _Slot:
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
    slots: list[_Slot] = []
    member: dict[int, _Slot] = {}
    order = sorted(range(len(blocks)), key=lambda n: (-typical(blocks[n].nbytes), blocks[n].first, n))
    for number in order:
        fitting = [slot for slot in slots if slot.takes(blocks[number])]
        if fitting:
            slot = min(fitting, key=lambda slot: typical(slot.nbytes))
        else:
            slot = _Slot(blocks[number].nbytes, [])
            slots.append(slot)
        slot.blocks.append(blocks[number])
        member[number] = slot
    offsets: dict[int, Size] = {}
    for slot in slots:
        offsets[id(slot)] = start
        start = as_size(as_index(start) + _aligned(slot.nbytes))
    return [offsets[id(member[number])] for number in range(len(blocks))], start


def _aligned(nbytes: Size) -> Size:
    """Rounded up to whole cache lines."""
    return as_size(floordiv(as_index(nbytes) + ALIGNMENT - 1, ALIGNMENT, {}) * ALIGNMENT)
