"""Choose the fastest GEMM by measuring on a GPU as warm as a training step makes it.

Candidates are cuBLASLt's algorithms. Where a loop follows, they are dcompile's kernels with the loop as an epilogue.

Products of few rows come last: kernels of dcompile's with different tiles, and the library's GEMM. Their matrices are
read from memory, as in a model that reads many: calls take turns on copies that no cache holds.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from dcompile.compat.tensors import real_tensors
from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import Algorithm, Geometry
from dcompile.ir.nodes import Tile, View
from dcompile.runtime.program import cuda_launch
from dcompile.runtime.program.argument_table import Address, library
from dcompile.runtime.program.cublaslt import GemmCall, GemmDescription

Name = TypeVar("Name", bound=Hashable)
Memory = Mapping[str, torch.Tensor]

SCREENING_S, FINAL_S = 0.02, 0.06
"""Seconds that an algorithm runs at a time: in the first round with all of them, and in the second with the best."""
SCREENING_ROUNDS, FINAL_ROUNDS = 2, 5
MAX_CANDIDATES = 4
MAX_TIME_RATIO = 0.98
"""Ratio to the present time that a candidate must not exceed to be chosen: smaller gains may be noise."""
COLD_BYTES = 256 << 20
"""Bytes of all copies of a product's buffers: several times a GPU's L2 cache."""
MAX_COPIES = 64
MAX_FINALISTS = 3
"""Candidates that are measured again."""


def choose(geometries: Iterable[Geometry], device: torch.device) -> dict[Geometry, Algorithm]:
    """Choose an algorithm for each geometry for which one is faster than ATen's. Takes some two seconds for each."""
    with without_user_modes(device):
        found = {geometry: fastest(geometry, device) for geometry in geometries}
    torch.cuda.empty_cache()
    return {geometry: algorithm for geometry, algorithm in found.items() if algorithm is not None}


def fastest(geometry: Geometry, device: torch.device) -> Algorithm | None:
    """The fastest algorithm of a geometry, or None where ATen's own is as fast."""
    products = GemmDescription(geometry, torch.cuda.current_device())
    left, right, out = operands(geometry, device)
    calls: dict[Algorithm, Callable[[], object]] = {(): functools.partial(torch.mm, left, right, out=out)}
    for algorithm in products.algorithms():
        calls[algorithm] = functools.partial(GemmCall(products, algorithm), left, right, out)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    screened = medians(calls, SCREENING_ROUNDS, SCREENING_S)
    best = sorted(calls, key=lambda algorithm: screened[algorithm])[:MAX_CANDIDATES]
    final = medians({algorithm: calls[algorithm] for algorithm in dict.fromkeys(((), *best))}, FINAL_ROUNDS, FINAL_S)
    chosen = min(final, key=lambda algorithm: final[algorithm])
    return chosen if chosen and final[chosen] <= MAX_TIME_RATIO * final[()] else None


def operands(geometry: Geometry, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make left, right and out of a geometry with random numbers: zeros take less power, and so less time."""
    g, draw = geometry, torch.Generator(device).manual_seed(0)  # not the user's generator
    left = _matrix(g.dtype, g.n, g.k, g.turned_b, g.lead_b, draw)
    right = _matrix(g.dtype, g.k, g.m, g.turned_a, g.lead_a, draw)
    return left, right, _matrix(g.dtype, g.n, g.m, False, g.lead_out, draw)


def _matrix(dtype: str, rows: int, columns: int, turned: bool, lead: int, draw: torch.Generator) -> torch.Tensor:
    size = (columns if turned else rows, lead)
    memory = torch.randn(size, device=draw.device, generator=draw).to(getattr(torch, dtype))
    return memory[:, :rows].t() if turned else memory[:, :columns]


def medians(calls: Mapping[Name, Callable[[], object]], rounds: int, seconds: float) -> dict[Name, float]:
    """Median milliseconds of each call, from interleaved runs."""
    taken: dict[Name, list[float]] = {name: [] for name in calls}
    order = [*calls]
    for turn in range(rounds):
        for place in range(len(order)):
            name = order[(turn + place) % len(order)]
            taken[name].append(_time(calls[name], seconds))
    return {name: statistics.median(times) for name, times in taken.items()}


def without_user_modes(device: torch.device) -> AbstractContextManager[object]:
    """Context that disables modes of the user's program: fake tensors, other devices, gradients and autocast."""
    stack = ExitStack()
    for context in (real_tensors(), torch.cuda.device(device), torch.no_grad(), torch.autocast("cuda", enabled=False)):
        stack.enter_context(context)
    return stack


def _time(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds of one call, averaged over as many calls as fill the given seconds."""
    count = max(3, round(seconds * 1e3 / max(_run_candidate(call, 3), 1e-3)))
    return _run_candidate(call, count)


def _run_candidate(call: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


# --- products that end in loops ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CandidateLaunch:
    """One launch. Arguments are names of buffers, or numbers."""

    archive: Path
    function: str
    grid: int
    arguments: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class EpilogueContest:
    """Candidates for a matmul and the loop after it: both separately, and kernels with the loop as an epilogue."""

    buffers: tuple[Buffer, ...]
    factors: tuple[View, ...]
    """Operands left and right, after the addend if there is one."""
    out: str
    algorithm: tuple[Geometry, Algorithm] | None
    """The library's algorithm for the matmul; None: ATen's choice."""
    separate: tuple[CandidateLaunch, ...]
    """Launches of the loop."""
    rivals: Mapping[Tile, tuple[CandidateLaunch, ...]]


def fastest_ending(contest: EpilogueContest, launcher: Path, device: torch.device) -> Tile | None:
    """Tile of the kernel that beats matmul and loop by most, or None. Takes a second."""
    with without_user_modes(device):
        memory = {buffer.name: random_input(buffer, device) for buffer in contest.buffers}
        calls = _calls(contest, memory, launcher, torch.cuda.current_device())
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        screened = medians(calls, SCREENING_ROUNDS, SCREENING_S)
        best = min((tile for tile in calls if tile is not None), key=lambda tile: screened[tile], default=None)
        if best is None:
            return None
        final = medians({tile: calls[tile] for tile in (None, best)}, FINAL_ROUNDS, FINAL_S)
        return best if final[best] <= MAX_TIME_RATIO * final[None] else None


def random_input(buffer: Buffer, device: torch.device) -> torch.Tensor:
    """Random numbers from a generator of its own; integers and booleans are 0."""
    extent, dtype = buffer.extent, getattr(torch, buffer.dtype)
    assert isinstance(extent, int), "loops of known size"
    if not dtype.is_floating_point:
        return torch.zeros(extent, dtype=dtype, device=device)
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(extent, dtype=dtype, device=device, generator=draw)


def _calls(
    contest: EpilogueContest, memory: Mapping[str, torch.Tensor], launcher: Path, device: int
) -> dict[Tile | None, Callable[[], object]]:
    """Calls by tile: None for the library's matmul and the loop, and tiles of kernels that fit shared memory."""
    views = [memory[v.buffer].as_strided(v.shape, v.strides, v.offset) for v in contest.factors]  # type: ignore[arg-type]
    out = memory[contest.out].view(views[-2].shape[0], views[-1].shape[1])
    if contest.algorithm is not None:
        geometry, algorithm = contest.algorithm
        left, right = views
        product: Callable[[], object]
        product = functools.partial(GemmCall(GemmDescription(geometry, device), algorithm), left, right, out)
    else:
        product = functools.partial(torch.addmm if len(views) > 2 else torch.mm, *views, out=out)
    loop = launch_calls(contest.separate, memory, launcher, device)
    assert loop is not None, "loops of their own take little shared memory"

    def both() -> None:
        product()
        loop()

    found = {tile: launch_calls(rows, memory, launcher, device) for tile, rows in contest.rivals.items()}
    return {None: both, **{tile: call for tile, call in found.items() if call is not None}}


def launch_calls(
    rows: Iterable[CandidateLaunch], memory: Mapping[str, torch.Tensor], launcher: Path, device: int
) -> Callable[[], object] | None:
    """Call that makes some launches on the current stream; None if a kernel takes more shared memory than there is."""
    room = int(
        getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", cuda_launch.SHARED_LIMIT)
    )
    table = []
    for row in rows:
        if cuda_launch.read_archive(row.archive)[row.function].shared > room:
            return None
        known = [memory[arg].data_ptr() if isinstance(arg, str) else arg for arg in row.arguments]
        table.append((row.archive, row.function, row.grid, [Address(value) for value in known]))
    stream = cuda_launch.stream_of(device)
    return functools.partial(cuda_launch.launches(library(launcher), device, 0, table), stream)


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
