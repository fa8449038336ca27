"""Temporaries on a GPU that are allocated when they are needed, beside the arena.

An arena counts from the first step to the last, also when what the forward saved is most. On the CPU what would make
it large lies in other memory (`lodging.py`), since pages that were used before are cheap. PyTorch's allocator on GPUs
hands memory out again in a microsecond, in stream order: so there large temporaries are allocated by themselves and let
go after their last use, and the first gradients lie in the saved tensor that they are computed from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from dcompile.codegen.schedule.lodging import in_flight
from dcompile.codegen.schedule.placing import Block
from dcompile.ir.analysis import takes_over
from dcompile.ir.nodes import Buffer, Program

SMALLEST = 1 << 20
"""Bytes: an allocation costs about as much time as a small kernel."""
WORTH = 16384
"""Nothing is done for less than this part of the peak."""
PRICE = 262144
"""An allocation more must save this part of the peak: kilobytes of gigabytes, for a microsecond of the host's time."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Blocks outside of the arena: in the memory of the input that is named, or (None) in memory of their own."""

    hosts: Mapping[int, str | None]


def fits(buffer: Buffer) -> bool:
    """Whether it is memory of a GPU of a size known now."""
    return buffer.device != "cpu" and isinstance(buffer.extent, int) and buffer.dtype not in ("symint", "object")


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


def set_apart(blocks: Mapping[int, Block], heirs: Mapping[int, str], held: np.ndarray) -> Apart:
    """Which of these blocks to keep out of the arena, such that it and `held` (bytes at each step) peak low.

    What is larger goes first, since it saves most for each allocation.
    """
    sizes = {number: int(block.nbytes) for number, block in blocks.items()}  # type: ignore[arg-type]
    inside, outside = np.zeros(len(held), np.int64), np.zeros(len(held), np.int64)
    for number, block in blocks.items():
        inside[block.first : block.last + 1] += sizes[number]
    usual = int(inside.max(initial=0)) + int(held.max(initial=0))
    price = usual // PRICE
    peaks, costs = [usual], {usual + 1: usual}  # the smallest size that lies apart -> peak and price
    for count, number in enumerate(sorted(sizes, key=lambda n: (-sizes[n], n)), 1):
        if sizes[number] < SMALLEST:
            break
        block = blocks[number]
        inside[block.first : block.last + 1] -= sizes[number]
        outside[block.first + (number in heirs) : block.last + 1] += sizes[number]
        peaks.append(int(inside.max(initial=0)) + int((held + outside).max(initial=0)))
        costs[sizes[number]] = peaks[-1] + count * price
    if usual - min(peaks) < max(usual // WORTH, SMALLEST):
        return Apart({})
    smallest = min(costs, key=lambda size: (costs[size], -size))
    return Apart({number: heirs.get(number) for number, size in sorted(sizes.items()) if size >= smallest})
