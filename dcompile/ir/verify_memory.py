"""Rule 10 of well-formed programs: planned memory, in which no two live buffers overlap (see `verify`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from dcompile.ir.analysis import takes_over
from dcompile.ir.buffers import IN_BUCKET, IN_DONOR, ITEMSIZE, WITHIN, Buffer
from dcompile.ir.index import Size
from dcompile.ir.nodes import Extern, Program
from dcompile.ir.verify_loop import BrokenRule, require

_PLANNED = frozenset(("arena", "out", "input", "library"))


def check_memory(program: Program, table: Mapping[str, Buffer]) -> None:
    """Check that every buffer of a planned program has a place, and that buffers alive together do not overlap."""
    if not any(buffer.storage in _PLANNED for buffer in program.buffers):
        return
    capacity: dict[str, Size] = {"arena": program.arena_bytes}
    capacity |= {IN_BUCKET + b.name: b.numel * ITEMSIZE[b.dtype] for b in program.buckets}
    hosts = [buffer for buffer in program.buffers if isinstance(buffer.extent, int) and _may_host(buffer, program)]
    capacity |= {IN_DONOR + buffer.name: buffer.nbytes for buffer in hosts}
    holders = {holder for buffer in program.buffers if (holder := buffer.holder) is not None}
    require(holders <= table.keys(), f"parts of unknown buffers: {', '.join(sorted(holders - table.keys()))}")
    capacity |= {f"{WITHIN}{name}": table[name].nbytes for name in holders}
    escaping = program.returned
    shared: dict[str, list[Buffer]] = defaultdict(list)
    for buffer in program.buffers:
        require(buffer.storage is not None, f"{buffer.name} has no place in memory")
        is_input = buffer.name in program.inputs
        require((buffer.storage == "input") == is_input, f"{buffer.name} cannot lie in {buffer.storage}")
        has_donor = buffer.donor is not None
        inside = buffer.storage == "arena" or has_donor
        over = has_donor and _is_over_saved(buffer, program, table)
        hidden = not inside or over or buffer.name not in escaping
        require(hidden, f"output {buffer.name} lies in the {buffer.storage}")
        require(not has_donor or buffer.storage in capacity, f"{buffer.name} may not lie in {buffer.storage}")
        if buffer.storage in capacity:
            shared[buffer.storage].append(buffer)
            offset, size = buffer.offset, capacity[buffer.storage]
            if isinstance(offset, int) and isinstance(buffer.extent, int) and isinstance(size, int):
                inside = offset >= 0 and offset + buffer.nbytes <= size and offset % ITEMSIZE[buffer.dtype] == 0
                require(inside, f"{buffer.name} lies outside {buffer.storage}, or not on an element")
    lives = _lives(program)
    for storage, buffers in shared.items():
        host = table.get(storage.removeprefix(IN_DONOR)) if storage.startswith(IN_DONOR) else None
        _check_overlaps(program, buffers if host is None else [replace(host, offset=0), *buffers], lives)


def _is_over_saved(buffer: Buffer, program: Program, table: Mapping[str, Buffer]) -> bool:
    """Whether a buffer covers the whole of a donated input."""
    host = buffer.donor
    return host in program.donated and buffer.offset == 0 and buffer.extent == table[host].extent


def _may_host(buffer: Buffer, program: Program) -> bool:
    return buffer.storage in ("out", "library") or buffer.name in program.donated


def _lives(program: Program) -> dict[str, tuple[int, int]]:
    """First and last step that touch each buffer. An output lives until the end; a wait touches its buffers, too.

    A fallback's result may be a view of its arguments. A functional collective reads its arguments until the wait for
    its result. So such arguments live as long as the results.
    """
    lives: dict[str, tuple[int, int]] = {}
    holders = {buffer.name: holder for buffer in program.buffers if (holder := buffer.holder) is not None}
    for position, step in enumerate(program.steps):
        names = step.reads | step.writes
        for name in names.union(holders[name] for name in names if name in holders):
            lives[name] = (lives.get(name, (position, position))[0], position)
    for name in program.inputs:
        if name in lives:
            lives[name] = (-1, lives[name][1])
    for name in program.returned & lives.keys():
        lives[name] = (lives[name][0], len(program.steps))
    for step in reversed(program.steps):
        if isinstance(step, Extern) and step.holds:
            end = max((lives[name][1] for name in step.writes), default=0)
            for name in step.reads:
                lives[name] = (lives[name][0], max(lives[name][1], end))
    return lives


def _check_overlaps(program: Program, buffers: list[Buffer], lives: Mapping[str, tuple[int, int]]) -> None:
    """Sweep over the steps with the set of live byte ranges, of which few are live at once."""
    live: list[Buffer] = []
    known = [b for b in buffers if b.name in lives and isinstance(b.extent, int) and isinstance(b.offset, int)]
    for buffer in sorted((b for b in known if b.nbytes), key=lambda b: lives[b.name][0]):
        first = lives[buffer.name][0]
        live = [other for other in live if lives[other.name][1] >= first]
        for other in live:
            here, there = _place(buffer), _place(other)
            apart = there + other.nbytes <= here or here + buffer.nbytes <= there
            if not apart and not _replaces(program, other, buffer, lives):
                raise BrokenRule(f"{other.name} and {buffer.name} are alive together and overlap in {buffer.storage}")
        live.append(buffer)


def _place(buffer: Buffer) -> int:
    assert isinstance(buffer.offset, int), f"{buffer.name} lies at a symbolic place"
    return buffer.offset


def _replaces(program: Program, old: Buffer, new: Buffer, lives: Mapping[str, tuple[int, int]]) -> bool:
    """Whether `new` reuses the memory of `old` in place, in the last step that reads `old`."""
    at = lives[new.name][0]
    if at >= len(program.steps) or lives[old.name][1] != at or old.offset != new.offset:
        return False
    step = program.steps[at]
    return new.name not in step.reads and takes_over(step, old, new)
