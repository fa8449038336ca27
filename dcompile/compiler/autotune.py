"""max_autotune: measure candidates for a program, once for each model. The choices enter plans as values.

Candidates for a GEMM are cuBLASLt's algorithms. Where a loop follows, they are also dcompile's kernels with the loop as
an epilogue; for few rows, dcompile's kernels with different tiles. The GPU is as warm as a training step makes it.
Matrices with few rows are read from memory, as in a model that reads many: calls take turns on copies that no cache
holds.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from dcompile.codegen.emit.host.extern_calls import geometry, measurable_geometries
from dcompile.codegen.emit.select_target import emit_loop
from dcompile.codegen.emit.target import KernelSource
from dcompile.codegen.nest.contraction import candidate_tiles, choose_tile
from dcompile.codegen.schedule.fusion.matmul_epilogue import (
    LIBRARY,
    EpilogueCandidate,
    LibraryForm,
    contraction_of,
    epilogues,
    library_form,
    skinny_loops,
    with_tile,
)
from dcompile.compat.tensors import real_tensors
from dcompile.errors import BuildError
from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import Algorithm, Chosen, Geometry
from dcompile.ir.nodes import Extern, Loop, Program, Tile, View
from dcompile.runtime.program import cuda_launch
from dcompile.runtime.program.argument_table import Address, library
from dcompile.runtime.program.cublaslt import GemmCall, GemmDescription

Name = TypeVar("Name", bound=Hashable)
Memory = Mapping[str, torch.Tensor]

SCREENING_S, FINAL_S = 0.02, 0.06
"""Seconds that an algorithm runs at a time: in the first round with all of them, and in the second with the best."""
SCREENING_ROUNDS, FINAL_ROUNDS = 2, 5
MAX_TIME_RATIO = 0.98
"""Ratio to the present time that a candidate must not exceed to be chosen: smaller gains may be noise."""
COLD_BYTES = 256 << 20
"""Bytes of all copies of a product's buffers: several times a GPU's L2 cache."""
MAX_COPIES = 64
MAX_FINALISTS = 4
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
    return winner(calls, ()) or None


def winner(calls: Mapping[Name, Callable[[], object]], usual: Name) -> Name:
    """Name of the fastest call: `usual`, unless another is faster by more than noise. Takes a second."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    screened = medians(calls, SCREENING_ROUNDS, SCREENING_S)
    best = sorted(calls, key=lambda name: screened[name])[:MAX_FINALISTS]
    final = medians({name: calls[name] for name in dict.fromkeys((usual, *best))}, FINAL_ROUNDS, FINAL_S)
    chosen = min(final, key=lambda name: final[name])
    return chosen if final[chosen] <= MAX_TIME_RATIO * final[usual] else usual


def operands(geometry: Geometry, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make left, right and out of a geometry with random numbers: zeros take less power, and so less time."""
    g, draw = geometry, torch.Generator(device).manual_seed(0)  # not the user's generator
    left = _matrix(g.dtype, g.n, g.k, g.transposed_b, g.lead_b, draw)
    right = _matrix(g.dtype, g.k, g.m, g.transposed_a, g.lead_a, draw)
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


# --- kernels with a matmul -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CandidateLaunch:
    """One launch. Arguments are names of buffers, or numbers."""

    archive: Path
    function: str
    grid: int
    arguments: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LibraryMatmul:
    """One matmul of a contest as the library computes it."""

    factors: tuple[View, ...]
    """Operands left and right, after the addend if there is one."""
    out: str
    algorithm: tuple[Geometry, Algorithm] | None = None
    """The library's algorithm; None: ATen's choice."""


@dataclass(frozen=True, slots=True)
class Contest:
    """Candidates for matmuls and the loop after them: both separately, and kernels that compute all of it."""

    buffers: tuple[Buffer, ...]
    matmuls: tuple[LibraryMatmul, ...]
    """None where the library cannot compute them with one rounding."""
    separate: tuple[CandidateLaunch, ...]
    """Launches of the loop that follows the library's matmuls."""
    rivals: Mapping[Tile, tuple[CandidateLaunch, ...]]
    copies: int
    """How many times the buffers are made, so that calls in turn find no cache that holds all of them."""


def fastest_tile(contest: Contest, usual: Tile | None, launcher: Path, device: torch.device) -> Tile | None:
    """Tile of the fastest kernel, `usual` unless another is faster by more than noise; None: the library is."""
    with without_user_modes(device):
        calls = contest_calls(contest, make_copies(contest, device), launcher, torch.cuda.current_device())
        return winner(calls, usual if usual in calls else next(tile for tile in calls if tile is not None))


def make_copies(contest: Contest, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Make the buffers of a contest, so many times as it says."""
    return [{buffer.name: random_input(buffer, device) for buffer in contest.buffers} for _ in range(contest.copies)]


def contest_calls(
    contest: Contest, copies: Sequence[Memory], launcher: Path, index: int
) -> dict[Tile | None, Callable[[], object]]:
    """Calls by tile, None for the library. Kernels fit shared memory."""
    calls: dict[Tile | None, Callable[[], object]] = {}
    if contest.matmuls:
        calls[None] = rotate(library_call(contest, memory, launcher, index) for memory in copies)
    for tile, rows in contest.rivals.items():
        made = [launch_calls(rows, memory, launcher, index) for memory in copies]
        if None not in made:
            calls[tile] = rotate(call for call in made if call is not None)
    return calls


def random_input(buffer: Buffer, device: torch.device) -> torch.Tensor:
    """Random numbers from a generator of its own; integers and booleans are 0."""
    extent, dtype = buffer.extent, getattr(torch, buffer.dtype)
    assert isinstance(extent, int), "loops of known size"
    if not dtype.is_floating_point:
        return torch.zeros(extent, dtype=dtype, device=device)
    draw = torch.Generator(device).manual_seed(0)
    return torch.randn(extent, dtype=dtype, device=device, generator=draw)


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


def copy_count(buffers: Iterable[Buffer]) -> int:
    """Return how many copies of some buffers no cache holds."""
    nbytes = sum(buffer.nbytes for buffer in buffers)
    return min(max(-(-COLD_BYTES // nbytes), 1), MAX_COPIES)


def rotate(calls: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """Return a call that makes the given ones in turn."""
    turns = itertools.cycle(list(calls))
    return lambda: next(turns)()


def library_call(contest: Contest, memory: Memory, launcher: Path, index: int) -> Callable[[], object]:
    """Call of the library's matmuls and the loop that follows."""
    matmuls = []
    for matmul in contest.matmuls:
        views = [memory[v.buffer].as_strided(v.shape, v.strides, v.offset) for v in matmul.factors]  # type: ignore[arg-type]
        out = memory[matmul.out].view(views[-2].shape[0], views[-1].shape[1])
        run: Callable[..., object] = torch.addmm if len(views) > 2 else torch.mm
        if matmul.algorithm is not None:
            geometry, algorithm = matmul.algorithm
            run = GemmCall(GemmDescription(geometry, index), algorithm)
        matmuls.append(functools.partial(run, *views, out=out))
    loop = launch_calls(contest.separate, memory, launcher, index) if contest.separate else None

    def call() -> None:
        for matmul in matmuls:
            matmul()
        if loop is not None:
            loop()

    return call


DESCRIPTORS = 90
"""Compute capability from which GPUs read tiles through descriptors (TMA)."""
MIN_FLOP_SHARE = 0.02
"""Part of a program's multiplications below which a kind of epilogue is not worth measuring."""
Build: TypeAlias = Callable[[Sequence[KernelSource]], Mapping[str, Path]]
"""Function that compiles kernels: returns name -> archive, including the launcher."""


def tiles(arch: int, processors: int) -> tuple[Tile, ...]:
    """Candidate tiles. The first is the best one for most large GEMMs on an H200 (docs/lab/tried-gpu.md)."""
    if arch < DESCRIPTORS:
        return Tile(128, 128, 32, 4, 3, parts=2), Tile(128, 128, 64, 8, 3), Tile(64, 128, 32, 4, 4)
    return (
        Tile(128, 256, 64, 8, 3, parts=2, programs=processors, flat=True, descriptors=True),
        Tile(128, 128, 64, 4, 3, programs=2 * processors, descriptors=True),
        Tile(128, 128, 64, 8, 4, programs=processors, descriptors=True),
        Tile(128, 128, 64, 4, 3, parts=2),
    )


class Tuner:
    """Measured choices for one model's programs."""

    def __init__(self) -> None:
        self._algorithms: dict[Geometry, Algorithm | None] = {}
        """None: nothing is faster than ATen's."""
        self._tiles: dict[Loop, Tile | None] = {}
        """Tile by kind of epilogue. None: the library's GEMM and a separate loop are as fast."""
        self._skinny: dict[Loop, Tile] = {}
        """Tile by kind of product of few rows, or `LIBRARY`."""

    def algorithms(self, program: Program, device: torch.device) -> tuple[Chosen, str]:
        """Choose algorithms for large GEMMs. Return them with a line for the receipt."""
        counts = measurable_geometries(program)
        self._measure(counts, device)
        chosen = {g: algorithm for g in counts if (algorithm := self._algorithms[g]) is not None}
        other, of = sum(counts[g] for g in chosen), sum(counts.values())
        note = f"max_autotune: {other} of {of} large products by another algorithm than ATen's" if counts else ""
        return chosen, note

    def _measure(self, wanted: Iterable[Geometry], device: torch.device) -> None:
        if new := [g for g in wanted if g not in self._algorithms]:
            self._algorithms |= dict.fromkeys(new) | choose(new, device)

    def epilogues(
        self, program: Program, device: torch.device, arch: int, build: Build
    ) -> tuple[dict[Loop, Tile], list[str]]:
        """Choose the tile for each kind of loop to fuse as an epilogue. Return them with lines for the receipt."""
        kinds = worth_fusing(program)
        notes: list[str] = []
        new = {kind: found[0] for kind, found in kinds.items() if kind not in self._tiles}
        if new:
            self._measure(filter(None, (_geometry(program, ending) for ending in new.values())), device)
            tried = tiles(arch, torch.cuda.get_device_properties(device).multi_processor_count)
            made = {kind: self._ending(program, ending, tried) for kind, ending in new.items()}
            failed = "no epilogue is fused, since kernels to measure failed"
            self._tiles |= dict.fromkeys(new) | _measured(made, device, build, notes, failed)
        chosen = {kind: tile for kind in kinds if (tile := self._tiles[kind]) is not None}
        return chosen, [*notes, *receipt_notes(kinds, chosen)]

    def _ending(self, program: Program, ending: EpilogueCandidate, tried: Iterable[Tile]) -> Candidates:
        """Kernels of a loop as an epilogue, against the library's matmul and the loop alone."""
        product, table, loop = ending.joint.product, program.table, program.steps[ending.position]
        assert product is not None and isinstance(loop, Loop), "matmuls end in loops"
        buffers = (table[name] for name in sorted(ending.joint.reads | ending.joint.writes | {product.out}))
        shape = _geometry(program, ending)
        found = None if shape is None else self._algorithms[shape]
        algorithm = None if shape is None or found is None else (shape, found)
        own = {tile: emit_loop(with_tile(ending.joint, tile), table) for tile in tried}
        matmul = LibraryMatmul(product.call.views, product.out, algorithm)
        name = f"what {_shape(ending.kind)} ends in"
        return Candidates(name, None, tuple(buffers), (matmul,), emit_loop(loop, table), own, copies=1)

    def skinny(
        self, program: Program, device: torch.device, arch: int, build: Build
    ) -> tuple[dict[Loop, Tile], list[str]]:
        """Choose the tile of each kind of matmul of few rows. Return them with lines for the receipt."""
        kinds = skinny_loops(program)
        made = {
            kind: skinny_candidates(found[0], program.table)
            for kind, found in kinds.items()
            if kind not in self._skinny
        }
        notes: list[str] = []
        if made:
            found = _measured(made, device, build, notes, "products of few rows keep their tiles, since kernels failed")
            self._skinny |= {kind: tile or LIBRARY for kind, tile in found.items()}
        chosen = {kind: self._skinny[kind] for kind in kinds if kind in self._skinny}
        return chosen, [*notes, *skinny_notes(kinds, chosen)]


@dataclass(frozen=True, slots=True)
class Candidates:
    """A contest whose kernels are not compiled yet."""

    name: str
    usual: Tile | None
    """Tile that is chosen unless another is faster; None: the library."""
    buffers: tuple[Buffer, ...]
    matmuls: tuple[LibraryMatmul, ...]
    rest: KernelSource | None
    """The loop that follows the library's matmuls."""
    own: Mapping[Tile, KernelSource]
    copies: int

    @property
    def sources(self) -> list[KernelSource]:
        """All kernels."""
        return [*self.own.values(), *([] if self.rest is None else [self.rest])]

    def contest(self, archives: Mapping[str, Path]) -> Contest:
        """Return what is measured, with compiled kernels."""
        return Contest(
            self.buffers,
            self.matmuls,
            () if self.rest is None else _candidate_launch(self.rest, archives),
            {tile: _candidate_launch(source, archives) for tile, source in self.own.items()},
            self.copies,
        )


def _measured(
    candidates: Mapping[Loop, Candidates], device: torch.device, build: Build, notes: list[str], failed: str
) -> dict[Loop, Tile | None]:
    """Compile all candidates, then run those of each kind in turns. Kinds that cannot be measured have no result."""
    try:
        archives = build([source for found in candidates.values() for source in found.sources])
    except BuildError as error:
        notes.append(f"max_autotune: {failed}: {str(error).strip().splitlines()[0]}")
        return {}
    result: dict[Loop, Tile | None] = {}
    for kind, found in candidates.items():
        try:
            result[kind] = fastest_tile(found.contest(archives), found.usual, archives[cuda_launch.LAUNCHER], device)
        except torch.OutOfMemoryError:  # the model's own step may have room
            notes.append(f"max_autotune: the GPU has no room to measure {found.name}")
    torch.cuda.empty_cache()
    return result


def skinny_candidates(loop: Loop, table: Mapping[str, Buffer]) -> Candidates:
    """Kernels with different tiles for a loop of matmuls of few rows, and the library's calls with a separate loop."""
    found = contraction_of(loop)
    assert found is not None, f"{loop.name} is no matmul of few rows"
    own = {t: emit_loop(replace(loop, tile=t), table) for t in candidate_tiles(found)}
    library = library_form(loop, table) or LibraryForm((), None, ())
    whole = {**table, **{buffer.name: buffer for buffer in library.buffers}}
    buffers = tuple(whole[name] for name in sorted(loop.reads | loop.writes | {b.name for b in library.buffers}))
    matmuls = tuple(LibraryMatmul(call.views, name) for call in library.calls for name in call.outs if name is not None)
    separate = None if library.rest is None else emit_loop(library.rest, whole)
    return Candidates(_skinny_shape(loop), choose_tile(found), buffers, matmuls, separate, own, copy_count(buffers))


def skinny_notes(kinds: Mapping[Loop, Sequence[Loop]], chosen: Mapping[Loop, Tile]) -> list[str]:
    """Lines for the receipt: what was chosen for each size of products of few rows."""
    which = [
        f"{len(kinds[kind])} of {_skinny_shape(kind)} by {'the library' if tile == LIBRARY else tile}"
        for kind, tile in chosen.items()
    ]
    return [f"max_autotune: products of few rows: {', '.join(which)}"] if which else []


def _skinny_shape(kind: Loop) -> str:
    """Text of the sizes of products: rows x columns x depth, and their number if there are several."""
    found = contraction_of(kind)
    assert found is not None, "a kind of products"
    times = f"{len(found.products)} times " if len(found.products) > 1 else ""
    return f"{times}{found.row_count}x{found.column_count}x{found.depth}"


def worth_fusing(program: Program) -> dict[Loop, list[EpilogueCandidate]]:
    """Epilogue candidates of a program by kind, without kinds that have a small part of its multiplications."""
    kinds: dict[Loop, list[EpilogueCandidate]] = {}
    for ending in epilogues(program):
        kinds.setdefault(ending.kind, []).append(ending)
    shapes = (geometry(step, program.table) for step in program.steps if isinstance(step, Extern))
    total = sum(shape.flops for shape in shapes if shape is not None)
    return {kind: found for kind, found in kinds.items() if sum(e.flops for e in found) >= MIN_FLOP_SHARE * total}


def forecast_notes(program: Program) -> list[str]:
    """Lines for a report on a program that is only planned."""
    kinds = worth_fusing(program)
    which = [f"{len(found)} of {_shape(kind)} in {_operations(found[0])}" for kind, found in kinds.items()]
    count = sum(map(len, kinds.values()))
    line = f"max_autotune: {count} products may end in the loop behind them, which compiling measures"
    return [f"{line}: {', '.join(which)}"] if which else []


def receipt_notes(kinds: Mapping[Loop, Sequence[EpilogueCandidate]], chosen: Mapping[Loop, Tile]) -> list[str]:
    """Lines for the receipt: the number of GEMMs that could have epilogues, and those that have."""
    if not kinds:
        return []
    counts = Counter({kind: len(found) for kind, found in kinds.items()})
    line = (
        f"max_autotune: {sum(counts[kind] for kind in chosen)} of {counts.total()} products end in the loop behind them"
    )
    which = [
        f"{counts[kind]} of {_shape(kind)} in {_operations(kinds[kind][0])} ({tile})" for kind, tile in chosen.items()
    ]
    return [f"{line}: {', '.join(which)}" if which else line]


def _shape(kind: Loop) -> str:
    """Text of a GEMM's size: rows x columns x depth."""
    assert kind.product is not None, "an ending has a product"
    *_, left, right = kind.product.call.views
    return f"{left.shape[0]}x{right.shape[1]}x{left.shape[1]}"


def _operations(ending: EpilogueCandidate) -> str:
    """Names of the loop's operations, as the user's code was traced."""
    found = (name for text in ending.joint.origin for name in re.findall(r"\baten\.(\w+)", text))
    assert ending.joint.product is not None, "an ending has a product"
    product = ending.joint.product.call.op.split(".")[1]
    return "+".join(dict.fromkeys(name for name in found if name != product)) or "a copy"


def _geometry(program: Program, ending: EpilogueCandidate) -> Geometry | None:
    step = program.steps[ending.product]
    assert isinstance(step, Extern), "products are library calls"
    return geometry(step, program.table)


def _candidate_launch(source: KernelSource, archives: Mapping[str, Path]) -> tuple[CandidateLaunch, ...]:
    """Launches of a kernel by itself."""
    given: tuple[str | int, ...] = (*source.arguments, *source.numbers)
    found = []
    for launch in source.launches:
        assert isinstance(launch.grid, int), "loops of known size"
        names = tuple(given[place] for place in launch.arguments)
        found.append(CandidateLaunch(archives[source.name], launch.function, launch.grid, names))
    return tuple(found)
