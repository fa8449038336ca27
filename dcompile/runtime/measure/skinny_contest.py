"""Measure products of few rows on a GPU: kernels of dcompile's with different tiles, and the library's GEMM.

Their matrices are read from memory, as in a model that reads many: calls take turns on copies that no cache holds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Tile, View
from dcompile.runtime.measure.autotune import (
    FINAL_ROUNDS,
    FINAL_S,
    MAX_TIME_RATIO,
    SCREENING_ROUNDS,
    SCREENING_S,
    CandidateLaunch,
    launch_calls,
    medians,
    random_input,
    without_user_modes,
)

Memory = Mapping[str, torch.Tensor]
COLD_BYTES = 256 << 20
"""Bytes of all copies of a product's buffers: several times a GPU's L2 cache."""
MAX_COPIES = 64
MAX_FINALISTS = 3
"""Candidates that are measured again."""


@dataclass(frozen=True, slots=True)
class LibraryMatmul:
    """One product of a contest as the library computes it."""

    left: View
    right: View
    out: str


@dataclass(frozen=True, slots=True)
class SkinnyContest:
    """Candidates for products of few rows and what follows them."""

    buffers: tuple[Buffer, ...]
    matmuls: tuple[LibraryMatmul, ...]
    """The products; none where the library cannot compute them with one rounding."""
    separate: tuple[CandidateLaunch, ...]
    """Launches of the loop that follows the library's products."""
    rivals: Mapping[Tile, tuple[CandidateLaunch, ...]]


def fastest_skinny(contest: SkinnyContest, usual: Tile, launcher: Path, device: torch.device) -> Tile | None:
    """Tile of the fastest kernel, `usual` unless another is faster by more than noise; None: the library is."""
    with without_user_modes(device):
        calls = contest_calls(contest, make_copies(contest, device), launcher, torch.cuda.current_device())
        if usual not in calls:
            usual = next(tile for tile in calls if tile is not None)
        screened = medians(calls, SCREENING_ROUNDS, SCREENING_S)
        best = sorted(calls, key=lambda tile: screened[tile])[:MAX_FINALISTS]
        final = medians({tile: calls[tile] for tile in dict.fromkeys((usual, *best))}, FINAL_ROUNDS, FINAL_S)
        chosen = min(final, key=lambda tile: final[tile])
        return chosen if final[chosen] <= MAX_TIME_RATIO * final[usual] else usual


def make_copies(contest: SkinnyContest, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Make the buffers of a contest so many times that no cache holds all."""
    count = copy_count(contest.buffers)
    return [{buffer.name: random_input(buffer, device) for buffer in contest.buffers} for _ in range(count)]


def contest_calls(
    contest: SkinnyContest, copies: Sequence[Memory], launcher: Path, index: int
) -> dict[Tile | None, Callable[[], object]]:
    """Calls by tile, None for the library, each after a first call. Kernels fit shared memory."""
    calls: dict[Tile | None, Callable[[], object]] = {}
    if contest.matmuls:
        calls[None] = rotate(library_call(contest, memory, launcher, index) for memory in copies)
    for tile, rows in contest.rivals.items():
        made = [launch_calls(rows, memory, launcher, index) for memory in copies]
        if None not in made:
            calls[tile] = rotate(call for call in made if call is not None)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    return calls


def copy_count(buffers: Iterable[Buffer]) -> int:
    """Return how many copies of some buffers no cache holds."""
    nbytes = sum(buffer.nbytes for buffer in buffers)
    return min(max(-(-COLD_BYTES // nbytes), 1), MAX_COPIES)


def rotate(calls: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """Return a call that makes the given ones in turn."""
    turns = itertools.cycle(list(calls))
    return lambda: next(turns)()


def library_call(contest: SkinnyContest, memory: Memory, launcher: Path, index: int) -> Callable[[], object]:
    """Call of the library's products and the loop that follows."""
    products = []
    for matmul in contest.matmuls:
        left, right = (
            memory[view.buffer].as_strided(view.shape, view.strides, view.offset)  # type: ignore[arg-type]
            for view in (matmul.left, matmul.right)
        )
        out = memory[matmul.out].view(left.shape[0], right.shape[1])
        products.append(functools.partial(torch.mm, left, right, out=out))
    loop = launch_calls(contest.separate, memory, launcher, index) if contest.separate else None

    def call() -> None:
        for product in products:
            product()
        if loop is not None:
            loop()

    return call
