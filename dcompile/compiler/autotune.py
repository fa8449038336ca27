"""max_autotune: measure candidates for a program, once for each model. The choices enter plans as values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

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
from dcompile.errors import BuildError
from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import Algorithm, Chosen, Geometry
from dcompile.ir.nodes import Extern, Loop, Program, Tile
from dcompile.runtime.measure import autotune
from dcompile.runtime.program import cuda_launch

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
            self._algorithms |= dict.fromkeys(new) | autotune.choose(new, device)

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
            contest = autotune.EpilogueContest(
                tuple(table[name] for name in sorted(buffers | {product.out})),
                product.call.views,
                product.out,
                (shape, found) if shape is not None and (found := self._algorithms[shape]) is not None else None,
                _candidate_launch(loops[kind], archives),
                {tile: _candidate_launch(source, archives) for tile, source in own[kind].items()},
            )
            try:
                result[kind] = autotune.fastest_ending(contest, archives[cuda_launch.LAUNCHER], device)
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
            result[kind] = autotune.fastest_skinny(contest, found.usual, launcher, device) or LIBRARY
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

    def contest(self, archives: Mapping[str, Path]) -> autotune.SkinnyContest:
        """Return what is measured, with compiled kernels."""
        matmuls = []
        for call in () if self.library is None else self.library.calls:
            left, right = call.views
            assert call.outs[0] is not None, "a product has a result"
            matmuls.append(autotune.LibraryMatmul(left, right, call.outs[0]))
        return autotune.SkinnyContest(
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


def _candidate_launch(source: KernelSource, archives: Mapping[str, Path]) -> tuple[autotune.CandidateLaunch, ...]:
    """Launches of a kernel by itself."""
    given: tuple[str | int, ...] = (*source.arguments, *source.numbers)
    found = []
    for launch in source.launches:
        assert isinstance(launch.grid, int), "loops of known size"
        names = tuple(given[place] for place in launch.arguments)
        found.append(autotune.CandidateLaunch(archives[source.name], launch.function, launch.grid, names))
    return tuple(found)
