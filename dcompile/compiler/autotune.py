"""max_autotune: measure candidates for a program, once for each model. The choices enter plans as values.

Choose the fastest GEMM by measuring on a GPU as warm as a training step makes it.

Candidates are cuBLASLt's algorithms. Where a loop follows, they are dcompile's kernels with the loop as an epilogue.

Products of few rows come last: kernels of dcompile's with different tiles, and the library's GEMM. Their matrices are
read from memory, as in a model that reads many: calls take turns on copies that no cache holds.
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
            try:
                self._tiles |= self._contests(program, new, device, arch, build, notes)
            except BuildError as error:
                self._tiles |= dict.fromkeys(new)
                reason = str(error).strip().splitlines()[0]
                notes.append(f"max_autotune: no epilogue is fused, since kernels to measure failed: {reason}")
        chosen = {kind: tile for kind in kinds if (tile := self._tiles[kind]) is not None}
        return chosen, [*notes, *receipt_notes(kinds, chosen)]

    def _contests(
        self,
        program: Program,
        new: Mapping[Loop, EpilogueCandidate],
        device: torch.device,
        arch: int,
        build: Build,
        notes: list[str],
    ) -> dict[Loop, Tile | None]:
        """Compile all candidates, then run those of each kind alternately with the library's GEMM and separate loop."""
        properties, table = torch.cuda.get_device_properties(device), program.table
        tried = tiles(arch, properties.multi_processor_count)
        loops = {kind: _separate(program, ending) for kind, ending in new.items()}
        own = {
            kind: {tile: emit_loop(with_tile(ending.joint, tile), table) for tile in tried}
            for kind, ending in new.items()
        }
        archives = build([*loops.values(), *(source for found in own.values() for source in found.values())])
        result: dict[Loop, Tile | None] = {}
        for kind, ending in new.items():
            product, buffers = ending.joint.product, ending.joint.reads | ending.joint.writes
            assert product is not None, "an ending has a product"
            shape = _geometry(program, ending)
            contest = EpilogueContest(
                tuple(table[name] for name in sorted(buffers | {product.out})),
                product.call.views,
                product.out,
                (shape, found) if shape is not None and (found := self._algorithms[shape]) is not None else None,
                _candidate_launch(loops[kind], archives),
                {tile: _candidate_launch(source, archives) for tile, source in own[kind].items()},
            )
            try:
                result[kind] = fastest_ending(contest, archives[cuda_launch.LAUNCHER], device)
            except torch.OutOfMemoryError:  # the model's own step may have room
                result[kind] = None
                notes.append(f"max_autotune: the GPU has no room to measure what {_shape(kind)} ends in")
        torch.cuda.empty_cache()
        return result

    def skinny(
        self, program: Program, device: torch.device, arch: int, build: Build
    ) -> tuple[dict[Loop, Tile], list[str]]:
        """Choose the tile of each kind of product of few rows. Return them with lines for the receipt."""
        kinds = skinny_loops(program)
        new = {kind: found[0] for kind, found in kinds.items() if kind not in self._skinny}
        notes: list[str] = []
        if new:
            try:
                self._skinny |= _skinny_choices(program, new, device, build, notes)
            except BuildError as error:
                reason = str(error).strip().splitlines()[0]
                notes.append(f"max_autotune: products of few rows keep their tiles, since kernels failed: {reason}")
        chosen = {kind: self._skinny[kind] for kind in kinds if kind in self._skinny}
        return chosen, [*notes, *skinny_notes(kinds, chosen)]


def _skinny_choices(
    program: Program, new: Mapping[Loop, Loop], device: torch.device, build: Build, notes: list[str]
) -> dict[Loop, Tile]:
    """Compile all candidates, then run those of each kind alternately with the library's GEMM."""
    table = program.table
    prepared = {kind: SkinnyCandidates(loop, table) for kind, loop in new.items()}
    archives = build([source for found in prepared.values() for source in found.sources])
    result: dict[Loop, Tile] = {}
    for kind, found in prepared.items():
        contest, launcher = found.contest(archives), archives[cuda_launch.LAUNCHER]
        try:
            result[kind] = fastest_skinny(contest, found.usual, launcher, device) or LIBRARY
        except torch.OutOfMemoryError:  # the model's own step may have room
            notes.append(f"max_autotune: the GPU has no room to measure {_skinny_shape(kind)}")
    torch.cuda.empty_cache()
    return result


class SkinnyCandidates:
    """Kernels with different tiles for a loop of products of few rows, and the library's calls with a separate loop."""

    def __init__(self, loop: Loop, table: Mapping[str, Buffer]) -> None:
        found = contraction_of(loop)
        assert found is not None, f"{loop.name} is no product of few rows"
        self.usual = choose_tile(found)
        self.own = {t: emit_loop(replace(loop, tile=t), table) for t in candidate_tiles(found)}
        self.library = library_form(loop, table)
        made = () if self.library is None else self.library.buffers
        whole = {**table, **{buffer.name: buffer for buffer in made}}
        rest = None if self.library is None else self.library.rest
        self.rest = None if rest is None else emit_loop(rest, whole)
        self._buffers = tuple(whole[name] for name in sorted(loop.reads | loop.writes | {b.name for b in made}))

    @property
    def sources(self) -> list[KernelSource]:
        """All kernels."""
        return [*self.own.values(), *([] if self.rest is None else [self.rest])]

    def contest(self, archives: Mapping[str, Path]) -> SkinnyContest:
        """Return what is measured, with compiled kernels."""
        matmuls = []
        for call in () if self.library is None else self.library.calls:
            left, right = call.views
            assert call.outs[0] is not None, "a product has a result"
            matmuls.append(LibraryMatmul(left, right, call.outs[0]))
        return SkinnyContest(
            self._buffers,
            tuple(matmuls),
            () if self.rest is None else _candidate_launch(self.rest, archives),
            {tile: _candidate_launch(source, archives) for tile, source in self.own.items()},
        )


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


def _separate(program: Program, ending: EpilogueCandidate) -> KernelSource:
    """Kernel of the loop alone."""
    loop = program.steps[ending.position]
    assert isinstance(loop, Loop), "products end in loops"
    return emit_loop(loop, program.table)


def _candidate_launch(source: KernelSource, archives: Mapping[str, Path]) -> tuple[CandidateLaunch, ...]:
    """Launches of a kernel by itself."""
    given: tuple[str | int, ...] = (*source.arguments, *source.numbers)
    found = []
    for launch in source.launches:
        assert isinstance(launch.grid, int), "loops of known size"
        names = tuple(given[place] for place in launch.arguments)
        found.append(CandidateLaunch(archives[source.name], launch.function, launch.grid, names))
    return tuple(found)
