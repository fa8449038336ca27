"""Temporaries in memory that is there anyway: in results not written yet, and in saved tensors no longer needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from dcompile.codegen.schedule.placing import Block, aligned, best_gap, place
from dcompile.ir.nodes import Buffer, Collective, Program, View, Wait, holder_of

SMALLEST_HOST, SMALLEST_GUEST = 1 << 12, 1 << 8
"""Bytes: an address that each call works out anew costs more than less memory gains."""
STEPS_OF_CAP = 8
WORTH = 1 << 16
"""Bytes that must be saved at least."""


@dataclass(frozen=True, slots=True)
class Host:
    """A buffer that others may lie in: until step `edge` writes it (`early`), or after step `edge` has read it.

    The step `edge` itself may hand its memory over in place, as `heirs` of `lodge` says.
    """

    name: str
    nbytes: int
    edge: int
    early: bool

    def open_for(self, block: Block, in_place: bool) -> bool:
        """Is it free throughout the block's life?"""
        if self.early:
            return block.last < self.edge + in_place
        return block.first > self.edge - in_place


@dataclass(frozen=True, slots=True)
class Lodging:
    """For each block the host it lies in (None: the arena) and its offset there; the arena's size; the peak of all."""

    places: list[tuple[str | None, int]]
    arena_bytes: int
    peak: int


def hosts_of(program: Program, storages: Mapping[str, str], lives: Mapping[str, tuple[int, int]]) -> list[Host]:
    """Buffers on the CPU whose memory is the call's before they are written, or becomes its own after they are read.

    Before: results. After: saved tensors that the program may overwrite (`Program.donated`), and what the library
    allocates and nobody else gets to see. Whether nobody refers to them is looked at again in each call.
    """
    shown = {output.buffer for output in program.outputs if isinstance(output, View)}
    barred = in_flight(program)
    written = frozenset().union(*(step.writes for step in program.steps))
    found = []
    for buffer in program.buffers:
        if not is_known(buffer) or buffer.name in barred or buffer.name not in lives:
            continue
        kind, (first, last) = storages[buffer.name], lives[buffer.name]
        given = buffer.name in program.donated and buffer.name not in written
        if kind == "out":
            found.append(Host(buffer.name, buffer.nbytes, first, early=True))
        elif buffer.name not in shown and (given or kind == "library"):
            found.append(Host(buffer.name, buffer.nbytes, last, early=False))
    return found


def in_flight(program: Program) -> frozenset[str]:
    """Buffers that collectives work on, in part or as a whole; they stay where the run time expects them."""
    holders = {buffer.name: holder for buffer in program.buffers if (holder := holder_of(buffer)) is not None}
    return frozenset(
        found
        for step in program.steps
        if isinstance(step, (Collective, Wait))
        for name in step.reads | step.writes
        for found in (name, holders.get(name, name))
    )


def is_known(buffer: Buffer) -> bool:
    """Whether it is memory of the CPU of a size known now, and large enough to share."""
    if buffer.device != "cpu" or buffer.dtype in ("symint", "object") or not isinstance(buffer.extent, int):
        return False
    return buffer.nbytes >= SMALLEST_HOST


def held_bytes(program: Program, storages: Mapping[str, str], lives: Mapping[str, tuple[int, int]]) -> np.ndarray:
    """At each step, what results, the library's tensors and donated inputs hold if nothing lies in them."""
    steps = len(program.steps)
    change = np.zeros(steps + 1, np.int64)
    shown = {output.buffer for output in program.outputs if isinstance(output, View)}
    for buffer in program.buffers:
        kind = storages[buffer.name]
        donated = buffer.name in program.donated
        if not (kind in ("out", "library") or donated) or buffer.name not in lives or not is_known(buffer):
            continue
        first, last = lives[buffer.name]
        change[0 if donated else first] += buffer.nbytes
        change[steps if buffer.name in shown or kind == "out" else last + 1] -= buffer.nbytes
    return np.cumsum(change[:-1])


def lodge(
    blocks: Sequence[Block], hosts: Sequence[Host], heirs: Mapping[int, Set[str]], held: np.ndarray, bound: Set[int]
) -> Lodging:
    """Places for blocks, in the arena or in hosts, such that arena and `held` together peak low.

    `heirs` says which hosts hand their memory to a block in place, or take it over from it; blocks of `bound` stay in
    the arena. The arena is kept between calls, so its size counts at every step. Tries several sizes for it, and puts
    what does not fit where it prolongs a host's life least: at first only where that raises no peak of `held`.
    """
    offsets, total = place(blocks)
    before = int(held.max(initial=0))
    usual = best = Lodging([(None, offset) for offset in offsets], total, total + before)
    if not hosts or not blocks:
        return usual
    for raises in (False, True):
        for eighths in range(STEPS_OF_CAP):
            cap = total * eighths // STEPS_OF_CAP
            if cap + before >= best.peak:
                break
            most = best.peak - cap if raises else before
            found = _Attempt(blocks, hosts, heirs, held, most).run(cap, bound)
            best = min(best, found, key=lambda lodging: lodging.peak)
    return best if best.peak + WORTH <= usual.peak else usual


@dataclass(slots=True)
class _Bin:
    """What is placed in one piece of memory."""

    placed: list[tuple[int, int, int, int]] = field(default_factory=list)
    """First and last step, start and end."""

    def gap(self, block: Block, size: int) -> int:
        """The offset of the smallest gap for `size` bytes among what lives when the block does."""
        first, last, start, end = np.array(self.placed, np.int64).reshape(-1, 4).T
        meets = (first <= block.last) & (last >= block.first)
        return best_gap(start[meets], end[meets], size)

    def put(self, block: Block, at: int, size: int) -> None:
        self.placed.append((block.first, block.last, at, at + size))


class _Attempt:
    """One way to place all blocks, such that hosts never hold more than `most` bytes together."""

    def __init__(
        self,
        blocks: Sequence[Block],
        hosts: Sequence[Host],
        heirs: Mapping[int, Set[str]],
        held: np.ndarray,
        most: int,
    ) -> None:
        self.blocks, self.hosts, self.heirs = blocks, hosts, heirs
        self.held, self.most = held.copy(), most
        self.sizes = [aligned(int(block.nbytes)) for block in blocks]  # type: ignore[arg-type]
        self.arena = _Bin()
        self.bins = {host.name: _Bin() for host in hosts}
        self.edges = {host.name: host.edge for host in hosts}
        """How far each host's life goes by now, to the front or to the back."""
        self.room = np.array([host.nbytes for host in hosts], np.int64)

    def run(self, cap: int, bound: Set[int]) -> Lodging:
        places: list[tuple[str | None, int]] = [(None, 0)] * len(self.blocks)
        reached = 0
        options = {n: [] if n in bound else self._options(n) for n in range(len(self.blocks))}
        # first those that have no choice
        for number in sorted(options, key=lambda n: (bool(options[n]), -self.sizes[n], self.blocks[n].first, n)):
            block, size = self.blocks[number], self.sizes[number]
            at, place = self.arena.gap(block, size), None
            if at + size > max(cap, reached):
                place = self._host_for(number, options[number])
            if place is None:
                self.arena.put(block, at, size)
                reached = max(reached, at + size)
            places[number] = place or (None, at)
        return Lodging(places, reached, reached + int(self.held.max(initial=0)))

    def _options(self, number: int) -> list[Host]:
        block = self.blocks[number]
        if int(block.nbytes) < SMALLEST_GUEST:  # type: ignore[arg-type]
            return []
        large = np.flatnonzero(self.room >= block.nbytes)  # type: ignore[operator]
        heirs = self.heirs.get(number, frozenset())
        found = [self.hosts[int(k)] for k in large]
        return [host for host in found if host.open_for(block, host.name in heirs)]

    def _host_for(self, number: int, options: Sequence[Host]) -> tuple[str, int] | None:
        """The host that lives longer by the fewest byte-steps, if one has a gap; and where."""
        block = self.blocks[number]
        costs = [(self._more(host, block) * host.nbytes, host.nbytes, k) for k, host in enumerate(options)]
        for _, _, k in sorted(costs):
            host = options[k]
            nbytes = int(block.nbytes)  # type: ignore[arg-type]
            at = 0 if host.name in self.heirs.get(number, ()) else self.bins[host.name].gap(block, nbytes)
            if at + nbytes > host.nbytes or not self._is_free(host, block, at, nbytes):
                continue
            span = self._span(host, block)
            if self.held[span].max(initial=0) + host.nbytes > self.most and span.start < span.stop:
                continue
            self.held[span] += host.nbytes
            self.edges[host.name] = self._edge(host, block)
            self.bins[host.name].put(block, at, aligned(nbytes))
            return host.name, at
        return None

    def _is_free(self, host: Host, block: Block, at: int, nbytes: int) -> bool:
        return all(
            last < block.first or first > block.last or end <= at or at + nbytes <= start
            for first, last, start, end in self.bins[host.name].placed
        )

    def _edge(self, host: Host, block: Block) -> int:
        now = self.edges[host.name]
        return min(now, block.first) if host.early else max(now, block.last)

    def _more(self, host: Host, block: Block) -> int:
        return abs(self._edge(host, block) - self.edges[host.name])

    def _span(self, host: Host, block: Block) -> slice:
        """The steps by which the host lives longer."""
        now, then = self.edges[host.name], self._edge(host, block)
        return slice(then, now) if host.early else slice(now + 1, then + 1)
