"""Place temporaries in memory allocated anyway: results not written yet, and saved tensors past their last read.

A temporary may get a separate allocation instead, if it would enlarge the arena and its life misses the peak. The
allocation is made before its first use and freed after its last. A small remaining arena may move into such an
allocation as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from dcompile.codegen.schedule.memory.offsets import Block, align_size, best_gap, place
from dcompile.device_traits import traits_of
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Collective, Extern, Program, Step, View, Wait

SMALLEST_HOST, SMALLEST_GUEST = 1 << 12, 1 << 8
"""Bytes: below these, computing an address in each call costs more than the saved memory gains."""
STEPS_OF_CAP = 8
MIN_SAVED_BYTES = 1 << 16
"""Bytes that placements must save at least."""
MIN_SEPARATE_BYTES = 1 << 17
MIN_SAVING_DIVISOR = 100
"""Divisor of the peak: separate allocations must save 1/100 of it. Fresh pages made steps up to 7 % slower (Llama,
LSTM; a busy machine, with a lower limit than this)."""
SMALL_ARENA = 1 << 16
"""Bytes: a smaller arena may be placed as a whole in a separate allocation whose block is past its last use."""
BYTES_PER_DONOR = 1024
"""Divisor of the peak: each further separate allocation must save 1/1024 of it."""
SEPARATE = ""
"""Memory of a block that has a separate allocation."""
Place = tuple[str | int | None, int]
"""A block's memory and its offset there. The memory is None (the arena), a donor's name, `SEPARATE`, or the number of a
block that has a separate allocation."""


@dataclass(frozen=True, slots=True)
class DonorBuffer:
    """A buffer that may hold others: until step `edge` writes it (`early`), or after step `edge` has read it.

    At step `edge` itself, memory may change hands in place, for the pairs in `heirs` of `place_in_donors`.
    """

    name: str
    nbytes: int
    edge: int
    early: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of each block, the size of the arena, and the peak of all memory, in bytes."""

    places: list[Place]
    arena_bytes: int
    peak: int


def hosts_of(
    program: Program, storages: Mapping[str, str], lives: Mapping[str, tuple[int, int]], kept: Set[str]
) -> list[DonorBuffer]:
    """Return donor buffers on the CPU: results before their first write, and dead saved or library tensors.

    Saved tensors must be in `Program.donated`; library tensors must not escape. Each call checks again that nobody else
    refers to them.
    `kept`: buffers whose memory results are views of, or may be.
    """
    barred = in_flight(program)
    written = frozenset().union(*(step.writes for step in program.steps))
    found = []
    for buffer in program.buffers:
        if not is_known(buffer) or buffer.name in barred or buffer.name not in lives:
            continue
        kind, (first, last) = storages[buffer.name], lives[buffer.name]
        given = buffer.name in program.donated and buffer.name not in written
        if kind == "out":
            found.append(DonorBuffer(buffer.name, buffer.nbytes, first, early=True))
        elif buffer.name not in kept and (given or kind == "library"):
            found.append(DonorBuffer(buffer.name, buffer.nbytes, last, early=False))
    return found


def in_flight(program: Program, host_copies: bool = True) -> frozenset[str]:
    """Return the buffers that collectives use, in part or as a whole; their storage is what the runtime expects.

    `host_copies`: whether copies to and from host memory count, which may use any memory.
    """
    holders = {buffer.name: holder for buffer in program.buffers if (holder := buffer.holder) is not None}
    copied = {step.bucket for step in program.steps if isinstance(step, Collective) and step.copies_by_host}
    return frozenset(
        found
        for step in program.steps
        if isinstance(step, (Collective, Wait)) and (host_copies or step.bucket not in copied)
        for name in step.reads | step.writes
        for found in (name, holders.get(name, name))
    )


def is_known(buffer: Buffer) -> bool:
    """Return whether a buffer is CPU memory of static size, large enough to share."""
    if traits_of(buffer.device).has_caching_allocator or not buffer.is_tensor or not isinstance(buffer.extent, int):
        return False
    return buffer.nbytes >= SMALLEST_HOST


def workspace_bytes(step: Step, table: Mapping[str, Buffer]) -> int:
    """Return the bytes that a library call allocates and frees by itself, for calls whose large workspace is known.

    The only such call is oneDNN's gradient of convolution filters. It holds the filters in row-major order, their
    gradient in the library's layout, and that gradient converted to row-major order, which is the result. Depthwise
    filters larger than 3 x 3 are summed in dense blocks of 16 x 16 channels (seen in torch 2.13, for every image size).
    """
    if not isinstance(step, Extern) or step.op != "aten.convolution_backward.default" or step.outs[1] is None:
        return 0
    filters = step.args[2]
    buffer = table[filters.buffer] if isinstance(filters, View) else None
    if buffer is None or not traits_of(buffer.device).aten.converts_filters or not isinstance(buffer.extent, int):
        return 0
    depthwise = len(buffer.shape) == 4 and buffer.shape[0] == step.args[9] and buffer.shape[1] == 1
    return buffer.nbytes * (259 if depthwise and buffer.extent > 9 * int(step.args[9]) else 3)  # type: ignore[arg-type]


def workspaces(program: Program) -> np.ndarray:
    """Return the change of workspace bytes at each step, and at the end."""
    table = program.table
    return np.diff([0, *(workspace_bytes(step, table) for step in program.steps), 0])


def held_bytes(
    program: Program,
    storages: Mapping[str, str],
    lives: Mapping[str, tuple[int, int]],
    counts: Callable[[Buffer], bool],
    kept: Set[str],
) -> np.ndarray:
    """Return the bytes that results, library tensors and donated inputs hold at each step if nothing is placed in them.

    `kept`: buffers whose memory results are views of, or may be. `counts` filters the buffers.
    """
    steps = len(program.steps)
    change = workspaces(program)
    for buffer in program.buffers:
        kind = storages[buffer.name]
        donated = buffer.name in program.donated
        if not (kind in ("out", "library") or donated) or buffer.name not in lives or not counts(buffer):
            continue
        first, last = lives[buffer.name]
        change[0 if donated else first] += buffer.nbytes
        change[steps if buffer.name in kept or kind == "out" else last + 1] -= buffer.nbytes
    return np.cumsum(change[:-1])


def place_in_donors(
    blocks: Sequence[Block],
    hosts: Sequence[DonorBuffer],
    heirs: Mapping[int, Set[str]],
    held: np.ndarray,
    bound: Set[int],
    beside: int | None = None,
) -> Placement:
    """Place blocks in the arena or in donors (`hosts`), such that arena and `held` together have a low peak.

    `heirs` maps a block to the donors whose memory passes to it or from it in place. Blocks of `bound` stay in the
    arena, which is kept between calls, so its size counts at every step. Several arena sizes are tried. A block that
    does not fit goes to the donor whose life it extends least. At first this is allowed only where the peak of `held`
    stays as it is. Remaining blocks get separate allocations if that saves enough.
    `beside`: bytes held while the other program of a training step runs. The arena exists then, too, and that program
    is assumed to need as much as this one would in an arena alone.
    """
    offsets, total = place(blocks)
    before = int(held.max(initial=0))
    usual = Placement([(None, offset) for offset in offsets], total, total + before)
    if not blocks:
        return usual
    options = _options(blocks, hosts, heirs, bound) if hosts else [np.zeros(0, np.int64)] * len(blocks)

    def cost(placement: Placement) -> int:
        count = sum(host == SEPARATE for host, _ in placement.places)
        later = 0 if beside is None else beside + total + placement.arena_bytes
        return max(placement.peak, later) + count * (usual.peak // BYTES_PER_DONOR)

    def best_of(best: Placement, barred: Set[int]) -> Placement:
        for raises in (False, True):
            for eighths in range(STEPS_OF_CAP):
                cap = total * eighths // STEPS_OF_CAP
                if cap + before >= cost(best):
                    break
                most = cost(best) - cap if raises else before
                # arena and held bytes only grow: an attempt ends where they cost as much as the best one
                limit = cost(best), cost(best) if beside is None else cost(best) - beside - total
                found = _PlacementAttempt(blocks, hosts, heirs, options, held, most, barred, bound).run(cap, *limit)
                best = best if found is None else min(best, found, key=cost)
        return best

    everything = range(len(blocks))
    within = best_of(usual, frozenset(everything)) if hosts else usual
    within = within if cost(within) + MIN_SAVED_BYTES <= cost(usual) else usual
    small = {n for n in everything if int(blocks[n].nbytes) < MIN_SEPARATE_BYTES}  # type: ignore[arg-type]
    apart = best_of(within, bound | small)
    return apart if cost(apart) + max(MIN_SAVED_BYTES, within.peak // MIN_SAVING_DIVISOR) <= cost(within) else within


def _options(
    blocks: Sequence[Block], hosts: Sequence[DonorBuffer], heirs: Mapping[int, Set[str]], bound: Set[int]
) -> list[np.ndarray]:
    """Return, for each block, the numbers of the donors that are large enough and free during its whole life."""
    room, edge = (np.array(column, np.int64) for column in zip(*((h.nbytes, h.edge) for h in hosts), strict=True))
    early = np.array([host.early for host in hosts])
    numbers = {host.name: number for number, host in enumerate(hosts)}
    found = []
    for number, block in enumerate(blocks):
        nbytes = int(block.nbytes)  # type: ignore[arg-type]
        if number in bound or nbytes < SMALLEST_GUEST:
            found.append(np.zeros(0, np.int64))
            continue
        in_place = np.zeros(len(hosts), np.int64)
        in_place[[numbers[name] for name in heirs.get(number, ()) if name in numbers]] = 1
        is_open = np.where(early, block.last < edge + in_place, block.first > edge - in_place)
        found.append(np.flatnonzero(is_open & (room >= nbytes)))
    return found


class _DonorSpace:
    """Blocks placed in one memory region, as rows of (first step, last step, start, end)."""

    def __init__(self) -> None:
        self.rows, self.count = np.zeros((8, 4), np.int64), 0

    def _met(self, block: Block) -> np.ndarray:
        placed = self.rows[: self.count]
        return placed[(placed[:, 0] <= block.last) & (placed[:, 1] >= block.first)]

    def gap(self, block: Block, size: int) -> int:
        """Return the offset of the smallest gap for `size` bytes among blocks alive at the same time."""
        met = self._met(block)
        return best_gap(met[:, 2], met[:, 3], size)

    def is_free(self, block: Block, at: int, nbytes: int) -> bool:
        """Are these bytes free of blocks alive at the same time?"""
        met = self._met(block)
        return bool(np.all((met[:, 3] <= at) | (at + nbytes <= met[:, 2])))

    def put(self, block: Block, at: int, size: int) -> None:
        if self.count == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[self.count] = block.first, block.last, at, at + size
        self.count += 1


class _PlacementAttempt:
    """One placement of all blocks, such that donors and separate allocations never hold more than `most` bytes."""

    def __init__(
        self,
        blocks: Sequence[Block],
        hosts: Sequence[DonorBuffer],
        heirs: Mapping[int, Set[str]],
        options: Sequence[np.ndarray],
        held: np.ndarray,
        most: int,
        barred: Set[int],
        bound: Set[int],
    ) -> None:
        self.blocks, self.hosts, self.heirs, self.options = blocks, hosts, heirs, options
        self.held, self.most, self.barred, self.bound = held.copy(), most, barred, bound
        self.high = int(held.max(initial=0))
        self.sizes = [align_size(int(block.nbytes)) for block in blocks]  # type: ignore[arg-type]
        self.arena = _DonorSpace()
        self.bins: dict[str, _DonorSpace] = defaultdict(_DonorSpace)
        self.edges = np.array([host.edge for host in hosts], np.int64)
        """Current end of each donor's life: its first step if `early`, else its last."""
        self.early = np.array([host.early for host in hosts])
        self.room = np.array([host.nbytes for host in hosts], np.int64)

    def run(self, cap: int, peak: int, arena: int) -> Placement | None:
        """Place all blocks with an arena of about `cap` bytes; return None once `peak` or `arena` bytes are reached."""
        places: list[Place] = [(None, 0)] * len(self.blocks)
        reached = 0
        has_choice = [len(found) > 0 or number not in self.barred for number, found in enumerate(self.options)]
        # blocks that can only be in the arena come first
        order = sorted(range(len(places)), key=lambda n: (has_choice[n], -self.sizes[n], self.blocks[n].first, n))
        for number in order:
            block, size = self.blocks[number], self.sizes[number]
            at, place = self.arena.gap(block, size), None
            if at + size > max(cap, reached):
                place = self._donor_for(number) or self._allocate_separately(number)
            if place is None:
                self.arena.put(block, at, size)
                reached = max(reached, at + size)
            places[number] = place or (None, at)
            if (stays := self._stays(reached)) + self.high >= peak or stays >= arena:
                return None
        reached = 0 if self._follows(places, reached) else reached
        return Placement(places, reached, reached + self.high)

    def _stays(self, nbytes: int) -> int:
        """Return the bytes of the arena that are certain to remain one."""
        return 0 if nbytes < SMALL_ARENA and len(self.barred) < len(self.blocks) else nbytes

    def _follows(self, places: list[Place], nbytes: int) -> bool:
        """Move a small arena into the separate allocation of a block that ends before, if its life can be extended.

        An LSTM's head needs 8 KB after its last cell; as an arena, these would count beside all tensors saved by the
        cells.
        """
        inside = [number for number, (host, _) in enumerate(places) if host is None]
        if not 0 < nbytes < SMALL_ARENA or not self.bound.isdisjoint(inside):
            return False
        first = min(self.blocks[number].first for number in inside)
        last = max(self.blocks[number].last for number in inside)
        apart = [(number, self.blocks[number]) for number, (host, _) in enumerate(places) if host == SEPARATE]
        # the allocation's exact bytes, not rounded up to a cache line as `sizes` are
        before = [n for n, block in apart if block.last < first and int(block.nbytes) >= nbytes]  # type: ignore[arg-type]
        if not before:
            return False
        host = max(before, key=lambda number: (self.blocks[number].last, -self.sizes[number]))
        longer = slice(self.blocks[host].last + 1, last + 1)
        if self.held[longer].max(initial=0) + self.sizes[host] > self.most:
            return False
        self._hold(longer, self.sizes[host])
        for number in inside:
            places[number] = host, places[number][1]
        return True

    def _hold(self, span: slice, nbytes: int) -> None:
        self.held[span] += nbytes
        self.high = max(self.high, int(self.held[span].max(initial=0)))

    def _donor_for(self, number: int) -> tuple[str, int] | None:
        """Return the donor with a gap whose life grows by the fewest byte-steps, and the offset; None without one."""
        block, options = self.blocks[number], self.options[number]
        costs = np.abs(self._edges(options, block) - self.edges[options]) * self.room[options]
        for k in options[np.lexsort((self.room[options], costs))]:  # on ties, the first
            host = self.hosts[k]
            nbytes = int(block.nbytes)  # type: ignore[arg-type]
            at = 0 if host.name in self.heirs.get(number, ()) else self.bins[host.name].gap(block, nbytes)
            if at + nbytes > host.nbytes or not self.bins[host.name].is_free(block, at, nbytes):
                continue
            now, then = int(self.edges[k]), int(self._edges(k, block))
            span = slice(then, now) if host.early else slice(now + 1, then + 1)  # steps added to its life
            if self.held[span].max(initial=0) + host.nbytes > self.most and span.start < span.stop:
                continue
            self._hold(span, host.nbytes)
            self.edges[k] = then
            self.bins[host.name].put(block, at, align_size(nbytes))
            return host.name, at
        return None

    def _allocate_separately(self, number: int) -> tuple[str, int] | None:
        """Give the block a separate allocation, if the budget has room during its life."""
        block, size = self.blocks[number], self.sizes[number]
        span = slice(block.first, block.last + 1)
        if number in self.barred or self.held[span].max(initial=0) + size > self.most:
            return None
        self._hold(span, size)
        return SEPARATE, 0

    def _edges(self, numbers: np.ndarray | np.intp, block: Block) -> np.ndarray:
        """Return the ends of the donors' lives if the block were placed there."""
        now, early = self.edges[numbers], self.early[numbers]
        moved: np.ndarray = np.where(early, np.minimum(now, block.first), np.maximum(now, block.last))
        return moved
