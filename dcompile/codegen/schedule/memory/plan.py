"""Memory planning: live ranges over the final order of steps, then offsets in the arena or placements in donors.

On GPUs, large temporaries are allocated separately from the arena, when they are needed. An arena counts from the first
step to the last, even while the forward's saved tensors are at their peak. On CPUs, temporaries reuse external memory
instead (`reuse_external.py`), since pages that were used before are cheap. PyTorch's GPU allocator reuses memory in a
microsecond, in stream order. So large temporaries are allocated separately and freed after their last use; the first
gradients overwrite the saved tensor that they are computed from. A few small temporaries follow if they alone make the
arena larger than its need at the peak. Such a block is alive with the largest one but not at the peak, or lives from a
step after the peak to the end.

The arena outlives the program: a model's backward has the forward's, beside all saved tensors, and so has the caller
between two steps. So large blocks, such as logits, leave it even if that does not lower the program's own peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from dcompile.codegen.schedule.memory.offsets import Block, place_symbolic
from dcompile.codegen.schedule.memory.reuse_external import (
    SEPARATE,
    DonorBuffer,
    held_bytes,
    hosts_of,
    in_flight,
    is_known,
    place_in_donors,
)
from dcompile.device_traits import main_device, traits_of
from dcompile.ir.analysis import takes_over
from dcompile.ir.buffers import IN_DONOR, ITEMSIZE, Buffer
from dcompile.ir.index import Size, as_index, as_size
from dcompile.ir.nodes import Collective, Extern, Loop, Program
from dcompile.ir.symbols import late_symbols

Life = tuple[int, int]
"""First and last step that touch a buffer."""


def plan_memory(program: Program, saves: bool = False) -> Program:
    """Assign a storage and an offset to every buffer.

    Guarantees: the same steps. Buffers alive at the same time do not overlap, with two exceptions. A loop may
    overwrite, element by element, a buffer that it reads for the last time. On CPUs a result may also overwrite a saved
    tensor. Buffers that have a storage already keep it.
    Arena, results, library tensors and donated inputs peak no higher together than with all temporaries in the arena.
    For that, temporaries may reuse external memory (`reuse_external.py`) or have separate allocations
    (`plan.py` on GPUs).
    `saves`: whether results are held while another program runs, as a forward's are while its backward runs.
    Relies on: no later pass changes the order of steps.
    """
    behind = held_by_results(program)
    lives = live_ranges(program, behind)
    kept = _escaping_names(program, behind)
    storages = _storages(program, kept)
    over = _over_saved(program, lives, storages, kept)
    lives |= {old: (lives[old][0], len(program.steps) - 1) for old in over.values()}
    storages |= dict.fromkeys(over, "over")
    arena = [buffer for buffer in program.buffers if storages[buffer.name] == "arena"]
    groups = _in_place_groups(program, arena, lives)
    into = _passed_to_results(program, groups, lives, storages)
    for n, name in into.items():
        lives[name] = min(lives[buffer.name][0] for buffer in groups[n] if buffer.name in lives), lives[name][1]
    blocks = [_block(group, lives) for group in groups]
    may_move = movable(program, groups) - into.keys()
    apart = set_apart(
        {n: blocks[n] for n in sorted(may_move)},
        heirs_of(program, groups, lives, may_move, kept),
        held_bytes(program, storages, lives, fits, kept),
    ).hosts
    fixed = [n for n, block in enumerate(blocks) if isinstance(block.nbytes, int) and n not in {*apart, *into}]
    hosts = [host for host in hosts_of(program, storages, lives, kept) if host.name not in over.values()]
    held = held_bytes(program, storages, lives, is_known, kept)
    beside = int(held[-1:].sum()) if saves else int(held[:1].sum()) if program.donated else None
    own = [groups[n] for n in fixed]
    heirs, bound = _heirs_by_group(program, own, hosts, lives), _bound_to_arena(program, own)
    placement = place_in_donors([blocks[n] for n in fixed], hosts, heirs, held, bound, beside)
    places: dict[int, tuple[str | None, Size]] = {}
    for n, (within, offset) in zip(fixed, placement.places, strict=True):
        places[n] = (groups[fixed[within]][0].name if isinstance(within, int) else within), offset
    symbolic = [n for n, block in enumerate(blocks) if not isinstance(block.nbytes, int)]
    slotted, arena_bytes = place_symbolic([blocks[n] for n in symbolic], placement.arena_bytes)
    places |= {n: (None, offset) for n, offset in zip(symbolic, slotted, strict=True)}
    where = _places_of_buffers(groups, places, apart, storages)
    where |= {buffer.name: (name, 0) for n, name in into.items() for buffer in groups[n]}
    where |= {new: (old, 0) for new, old in over.items()}
    buffers = tuple(
        buffer if buffer.storage is not None else _settle(buffer, storages[buffer.name], where.get(buffer.name))
        for buffer in program.buffers
    )
    return replace(program, buffers=buffers, arena_bytes=arena_bytes)


def _heirs_by_group(
    program: Program, groups: Sequence[Sequence[Buffer]], hosts: Sequence[DonorBuffer], lives: Mapping[str, Life]
) -> dict[int, frozenset[str]]:
    """Map each group to the donors whose memory passes to it or from it in place (see `_heirs`)."""
    ending: dict[int, list[DonorBuffer]] = defaultdict(list)
    for host in hosts:
        ending[host.edge].append(host)
    table = program.table
    return {n: _heirs(program, table, group, lives, ending) for n, group in enumerate(groups)}


def _bound_to_arena(program: Program, groups: Sequence[Sequence[Buffer]]) -> set[int]:
    """Return the groups that stay in the arena: buffers in flight, or where an allocator keeps memory anyway."""
    flying = in_flight(program)
    return {
        n
        for n, group in enumerate(groups)
        if any(b.name in flying or traits_of(b.device).has_caching_allocator for b in group)
    }


def _places_of_buffers(
    groups: Sequence[Sequence[Buffer]],
    places: Mapping[int, tuple[str | None, Size]],
    apart: Mapping[int, str | None],
    storages: dict[str, str],
) -> dict[str, tuple[str | None, Size]]:
    """Return each buffer's (donor or None, offset). Marks separate allocations in `storages`."""
    where = {buffer.name: places[n] for n, group in enumerate(groups) if n in places for buffer in group}
    own = {n: None for n, (host, _) in places.items() if host == SEPARATE}
    for n, given in {**apart, **own}.items():
        head = groups[n][0].name
        where |= {buffer.name: (given or head, 0) for buffer in groups[n]}
        if given is None:  # a separate allocation, which the rest of its group shares
            del where[head]
            storages[head] = "out"
    return where


def _over_saved(
    program: Program, lives: Mapping[str, Life], storages: Mapping[str, str], kept: Set[str]
) -> dict[str, str]:
    """Map results on the CPU to the saved tensor that each may overwrite, in the step that reads it for the last time.

    Each call checks that nobody else holds the tensor, as it does for every placement in saved tensors.
    """
    found: dict[str, str] = {}
    table, flying = program.table, in_flight(program)
    barred = flying | kept
    left = [name for name in program.donated if name in lives and name not in barred and is_known(table[name])]
    for new in (buffer for buffer in program.buffers if storages[buffer.name] == "out" and is_known(buffer)):
        if new.name not in lives or new.name in flying:
            continue
        at = lives[new.name][0]
        step = program.steps[at]
        for old in left if isinstance(step, Loop) else ():
            if lives[old][1] == at and storages[old] == "input" and takes_over(step, table[old], new):
                found[new.name] = old
                left.remove(old)
                break
    return found


def _passed_to_results(
    program: Program, groups: Sequence[Sequence[Buffer]], lives: Mapping[str, Life], storages: Mapping[str, str]
) -> dict[int, str]:
    """Map sums of matmuls on a GPU to the result that the last matmul writes: all of them accumulate in its memory.

    On CPUs, results before their first write are donors.
    """
    table, flying = program.table, in_flight(program)
    begun: dict[int, list[str]] = defaultdict(list)
    for name, storage in storages.items():
        if storage == "out" and fits(table[name]) and name in lives and name not in flying:
            begun[lives[name][0]].append(name)
    found: dict[int, str] = {}
    for n, group in enumerate(groups):
        tail = max(group, key=lambda buffer: lives.get(buffer.name, (-1, -1))[1])
        at = lives[tail.name][1] if tail.name in lives else -1
        if at < 0 or not isinstance(program.steps[at], Extern) or not all(map(fits, group)):
            continue
        for name in begun.get(at, ()) if flying.isdisjoint(buffer.name for buffer in group) else ():
            if takes_over(program.steps[at], tail, table[name]):
                found[n] = name
                begun[at].remove(name)
                break
    return found


def _settle(buffer: Buffer, storage: str, place: tuple[str | None, Size] | None) -> Buffer:
    host, offset = (None, 0) if place is None else place
    return replace(buffer, storage=storage if host is None else IN_DONOR + host, offset=offset)


def live_ranges(program: Program, behind: Mapping[str, frozenset[str]]) -> dict[str, Life]:
    """Return the first and last step that touches each buffer.

    `behind` maps a buffer to others whose memory its readers may see: they live as long. A wait touches the buffers of
    its collective, so they live while it is in flight. A touch of a part counts as a touch of the whole buffer.
    """
    lives: dict[str, Life] = {}
    holders = {buffer.name: holder for buffer in program.buffers if (holder := buffer.holder) is not None}
    for position, step in enumerate(program.steps):
        names = step.reads | step.writes
        names = names.union(holders[name] for name in names if name in holders)
        for name in names.union(*(behind[name] for name in names if name in behind)):
            lives[name] = (lives.get(name, (position, position))[0], position)
    return lives


def held_by_results(program: Program) -> dict[str, frozenset[str]]:
    """Map each result of a library allocation to the arguments that must live as long, since it may be a view of them.

    Fallbacks hold their arguments because nothing is known about them. Calls with effects hold theirs, too: a
    functional collective reads its argument until the wait on its result.
    """
    behind: dict[str, frozenset[str]] = {}
    for step in program.steps:
        if isinstance(step, Extern) and step.holds:
            seen = step.reads.union(*(behind[name] for name in step.reads if name in behind))
            behind |= dict.fromkeys(step.writes, seen)
    return behind


def escaping_buffers(program: Program) -> frozenset[str]:
    """Return the buffers whose memory results are views of, or may be views of."""
    return _escaping_names(program, held_by_results(program))


def _escaping_names(program: Program, behind: Mapping[str, frozenset[str]]) -> frozenset[str]:
    shown = program.returned
    return shown.union(*(behind[name] for name in shown if name in behind))


def _storages(program: Program, escapes: frozenset[str]) -> dict[str, str]:
    """Return the kind of storage of each buffer."""
    library = {
        name
        for step in program.steps
        if isinstance(step, Extern) and step.mode == "alloc"
        for name in step.outs
        if name is not None
    }
    library |= {name for step in program.steps if isinstance(step, Collective) for name in step.made}
    late = late_symbols(program)
    device = main_device(buffer.device for buffer in program.buffers)
    storages: dict[str, str] = {}
    for buffer in program.buffers:
        if buffer.storage is not None:
            storages[buffer.name] = "placed"
        elif buffer.name in program.inputs:
            storages[buffer.name] = "input"
        elif buffer.name in library:
            storages[buffer.name] = "library"
        elif buffer.name in escapes or _is_late(buffer, late) or buffer.device != device:
            storages[buffer.name] = "out"  # escapes, or has a size or device that the arena cannot serve
        else:
            storages[buffer.name] = "arena"
    return storages


def _is_late(buffer: Buffer, late: frozenset[str]) -> bool:
    """Is the size known only in the middle of a call?"""
    return any(not late.isdisjoint(as_index(size).variables) for size in (*buffer.shape, *buffer.strides))


def _in_place_groups(program: Program, arena: Sequence[Buffer], lives: Mapping[str, Life]) -> list[list[Buffer]]:
    """Group buffers that take over one another's memory in place, in order of time; most groups have one member."""
    table = {buffer.name: buffer for buffer in arena}
    dying: dict[int, list[Buffer]] = defaultdict(list)
    for buffer in arena:
        if buffer.name in lives:
            dying[lives[buffer.name][1]].append(buffer)
    group_of: dict[str, list[Buffer]] = {buffer.name: [buffer] for buffer in arena}
    for position, step in enumerate(program.steps):
        for name in sorted(step.writes & table.keys()):
            new = table[name]
            for old in dying[position]:
                if takes_over(step, old, new):
                    dying[position].remove(old)
                    group_of[name] = group_of[old.name]
                    group_of[name].append(new)
                    break
    return list({id(group): group for group in group_of.values()}.values())


def _heirs(
    program: Program,
    table: Mapping[str, Buffer],
    group: Sequence[Buffer],
    lives: Mapping[str, Life],
    hosts: Mapping[int, Sequence[DonorBuffer]],
) -> frozenset[str]:
    """Return the donors, by edge, whose memory passes in place to this group's first buffer or from its last."""
    spans = [lives.get(buffer.name, (0, 0)) for buffer in group]
    first, last = min(first for first, _ in spans), max(last for _, last in spans)
    head = next(b for b, (begin, _) in zip(group, spans, strict=True) if begin == first)
    tail = next(b for b, (_, end) in zip(reversed(group), reversed(spans), strict=True) if end == last)
    found = set()
    for host in {host.name: host for at in (first, last) for host in hosts.get(at, ())}.values():
        buffer = table[host.name]
        old, new, at = (tail, buffer, last) if host.early else (buffer, head, first)
        if host.edge == at and at < len(program.steps) and takes_over(program.steps[at], old, new):
            found.add(host.name)
    return frozenset(found)


def _block(group: Sequence[Buffer], lives: Mapping[str, Life]) -> Block:
    spans = [lives.get(buffer.name, (0, 0)) for buffer in group]
    # all members have one extent: only an empty buffer could differ, and that joins no group
    nbytes = as_size(group[0].extent * ITEMSIZE[group[0].dtype])
    return Block(min(first for first, _ in spans), max(last for _, last in spans), nbytes)


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
    """Return the in-place groups that may leave the arena: on a GPU, and used by no collective between ranks."""
    flying = in_flight(program, host_copies=False)
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
    return SeparateAllocations({number: heirs.get(number) for number in sorted(sides.separate)})


class _Sides:
    """Bytes at each step inside and outside the arena, as blocks move out one after another."""

    def __init__(self, blocks: Mapping[int, Block], heirs: Mapping[int, str], held: np.ndarray) -> None:
        self.blocks, self.heirs = blocks, heirs
        self.sizes = {number: int(block.nbytes) for number, block in blocks.items()}  # type: ignore[arg-type]
        self.inside, self.outside = np.zeros(len(held), np.int64), held.astype(np.int64)
        self.separate: list[int] = []
        for number, block in blocks.items():
            self.inside[block.first : block.last + 1] += self.sizes[number]

    def move(self, number: int) -> None:
        """Move a block out of the arena."""
        self.separate.append(number)
        self._add(number, self.sizes[number])

    def keep(self, count: int) -> None:
        """Keep the first `count` moved blocks outside, and move the others back."""
        while len(self.separate) > count:
            number = self.separate.pop()
            self._add(number, -self.sizes[number])

    def _add(self, number: int, nbytes: int) -> None:
        block = self.blocks[number]
        self.inside[block.first : block.last + 1] -= nbytes
        self.outside[block.first + (number in self.heirs) : block.last + 1] += nbytes

    def peak_without(self, number: int) -> int:
        """Return the peak if this block moved out, too."""
        self.move(number)
        peak = self.peak
        self.keep(len(self.separate) - 1)
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
        return [number for number in alive if self.sizes[number] and number not in self.separate]


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
    sides.keep(sum(sizes[number] >= smallest for number in sides.separate) if worth else 0)


def _move_lasting(sides: _Sides) -> None:
    """Move out the largest blocks that are left, as long as the arena gets much smaller.

    The arena may then be fullest at another step, and the program's peak higher by less than the arena shrinks.
    """
    price, sizes = max(sides.peak // LASTING_FRACTION, MIN_BLOCK_BYTES), sides.sizes
    left = [n for n in sorted(sizes, key=lambda n: (-sizes[n], n)) if n not in sides.separate and sizes[n] >= price]
    limit, kept = sides.peak + sides.peak // RISE_FRACTION, len(sides.separate)
    best = sides.peak + sides.arena
    for count, number in enumerate(left, 1):
        sides.move(number)
        if sides.peak <= limit and (cost := sides.peak + sides.arena + count * price) < best:
            best, kept = cost, len(sides.separate)
    sides.keep(kept)


def _move_crowding(sides: _Sides) -> None:
    """Move out up to `MAX_SMALL_BLOCKS` blocks at the arena's fullest step, if that lowers the peak enough."""
    best = sides.peak
    price, kept = max(best // BYTES_PER_ALLOCATION, MIN_SMALL_BLOCK_BYTES), len(sides.separate)
    for count in range(1, MAX_SMALL_BLOCKS + 1):
        alive = sides.fullest()
        if not alive:
            break
        sides.move(min(alive, key=lambda n: (sides.peak_without(n), -sides.sizes[n], n)))
        if (cost := sides.peak + count * price) < best:
            best, kept = cost, len(sides.separate)
    sides.keep(kept)
