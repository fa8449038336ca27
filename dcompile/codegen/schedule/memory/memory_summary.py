"""Summarize a planned program's memory: its arena, its peak, the holders of the peak, and buffers placed in donors.

Symbolic sizes count with their typical values. Inputs that stay the caller's are not counted, nor is host memory in a
program of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcompile.codegen.schedule.memory.plan import escaping_buffers, held_by_results, live_ranges
from dcompile.codegen.schedule.memory.reuse_external import workspaces
from dcompile.device_traits import main_device
from dcompile.ir.diagram import bytes_text
from dcompile.ir.index import typical
from dcompile.ir.nodes import Collective, Extern, Loop, Program, Step

MAX_HOLDERS = 8
"""Holders of the peak listed by name, the largest first."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Memory held at the peak: a buffer, the arena, or the workspace of a library call."""

    name: str
    kind: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlacedBuffer:
    """A buffer placed in another buffer's memory."""

    name: str
    donor: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """The memory plan of one program, in bytes."""

    arena_bytes: int
    in_arena: int
    """Number of buffers in the arena."""
    peak_bytes: int
    peak_step: int
    holders: tuple[Holder, ...]
    """Memory held at the peak, the largest holder first."""
    placed: tuple[PlacedBuffer, ...]
    separate: tuple[str, ...]
    """Temporaries with an allocation of their own."""
    donated: tuple[str, ...]
    """Inputs whose memory the program may reuse after their last read."""
    held: tuple[int, ...]
    """Bytes held in each step, the arena included."""


def summarize_memory(planned: Program) -> MemorySummary:
    """Return sizes, peak and placements of a program after memory planning."""
    kinds = _kinds(planned)
    spans = _spans(planned, kinds)
    table, steps = planned.table, len(planned.steps)
    change = np.zeros(steps + 1, np.int64)
    for name, (first, last) in spans.items():
        change[first] += table[name].typical_bytes
        change[last + 1] -= table[name].typical_bytes
    own = np.cumsum(workspaces(planned)[:-1])
    held = np.cumsum(change[:-1]) + own
    at = int(held.argmax()) if steps else 0
    arena = typical(planned.arena_bytes)
    holders = [Holder(name, kinds[name], table[name].typical_bytes) for name, (a, b) in spans.items() if a <= at <= b]
    holders.append(Holder("arena", "temporaries", arena))
    holders += [Holder(_step_name(planned.steps[at]), "workspace of a library call", int(own[at]))] if steps else []
    return MemorySummary(
        arena,
        sum(buffer.storage == "arena" for buffer in planned.buffers),
        arena + int(held.max(initial=0)),
        at,
        tuple(sorted((holder for holder in holders if holder.nbytes), key=lambda h: (-h.nbytes, h.name))),
        tuple(
            PlacedBuffer(buffer.name, buffer.donor, buffer.typical_bytes)
            for buffer in planned.buffers
            if buffer.donor is not None
        ),
        tuple(name for name, kind in kinds.items() if kind == "separate allocation"),
        planned.donated,
        tuple(arena + int(count) for count in held),
    )


def _kinds(planned: Program) -> dict[str, str]:
    """Return what each buffer outside the arena with memory of its own is, in words for people."""
    kept, found = escaping_buffers(planned), dict[str, str]()
    device = main_device(buffer.device for buffer in planned.buffers)
    for buffer in (buffer for buffer in planned.buffers if buffer.device == device):
        storage = buffer.storage or ""
        if buffer.name in planned.donated:
            found[buffer.name] = "donated input"
        elif buffer.bucket is not None:
            found[buffer.name] = "gradient bucket"
        elif storage == "library":
            found[buffer.name] = "result of the library"
        elif storage == "out":
            found[buffer.name] = "result" if buffer.name in kept else "separate allocation"
    return {name: kind for name, kind in found.items() if planned.table[name].is_tensor}


def _spans(planned: Program, kinds: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Return the first and last step that holds each of these buffers, for itself or for a buffer placed in it."""
    lives, end = live_ranges(planned, held_by_results(planned)), len(planned.steps) - 1
    kept = escaping_buffers(planned)
    for buffer in planned.buffers:
        donor = buffer.donor
        if donor is not None and donor in kinds and buffer.name in lives:
            first, last = lives[buffer.name]
            begin, until = lives.get(donor, (first, last))
            lives[donor] = min(first, begin), max(last, until)
    spans = {}
    for name in kinds.keys() & lives.keys():
        first, last = lives[name]
        stays = name in kept or kinds[name] == "gradient bucket"
        spans[name] = 0 if kinds[name] == "donated input" else first, end if stays else last
    return spans


def _step_name(step: Step) -> str:
    match step:
        case Extern(op=name) | Loop(name=name) | Collective(bucket=name):
            return name
        case _:
            return f"wait for {step.bucket}"


def memory_headline(planned: Program) -> str:
    """Format the memory plan as one line."""
    found = summarize_memory(planned)
    at = f" at step {found.peak_step} ({_step_name(planned.steps[found.peak_step])})" if planned.steps else ""
    return (
        f"arena {bytes_text(found.arena_bytes)} with {found.in_arena} buffers, "
        f"peak {bytes_text(found.peak_bytes)}{at}, {len(found.placed)} buffers placed in donors, "
        f"{len(found.separate)} allocated separately, {len(found.donated)} donated inputs"
    )


def holder_lines(found: MemorySummary) -> Iterator[str]:
    """Yield a line for each of the largest holders of the peak, and one for all others."""
    for holder in found.holders[:MAX_HOLDERS]:
        yield f"{bytes_text(holder.nbytes)} of {holder.name} ({holder.kind})"
    if more := found.holders[MAX_HOLDERS:]:
        yield f"{bytes_text(sum(holder.nbytes for holder in more))} of {len(more)} more"


def memory_lines(planned: Program) -> Iterator[str]:
    """Yield a line for each holder of the peak and each buffer in a donor, then the donated inputs."""
    found = summarize_memory(planned)
    yield from (f"at the peak: {line}" for line in holder_lines(found))
    for placed in found.placed:
        yield f"{placed.name} ({bytes_text(placed.nbytes)}) is placed in {placed.donor}"
    if found.separate:
        yield f"allocated separately: {', '.join(found.separate)}"
    if found.donated:
        yield f"donated inputs: {', '.join(found.donated)}"
