"""max_autotune: measure candidates for a program, once for each model. The choices enter plans as values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from dcompile.codegen.emit.host.gemm_geometry import geometry, measurable_geometries
from dcompile.codegen.emit.select_target import emit_loop
from dcompile.codegen.emit.target import KernelSource
from dcompile.codegen.schedule.fusion.matmul_epilogue import EpilogueCandidate, endings, with_tile
from dcompile.errors import BuildError
from dcompile.ir.gemm import Algorithm, Chosen, Geometry
from dcompile.ir.nodes import Extern, Loop, Program, Tile, View
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

    def endings(
        self, program: Program, device: torch.device, arch: int, build: Build
    ) -> tuple[dict[Loop, Tile], list[str]]:
        """Choose the tile for each kind of loop to fuse as an epilogue. Return them with lines for the receipt."""
        kinds = worth_ending(program)
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
                tuple(view for view in product.call.args if isinstance(view, View)),
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


def worth_ending(program: Program) -> dict[Loop, list[EpilogueCandidate]]:
    """Epilogue candidates of a program by kind, without kinds that have a small part of its multiplications."""
    kinds: dict[Loop, list[EpilogueCandidate]] = {}
    for ending in endings(program):
        kinds.setdefault(ending.kind, []).append(ending)
    shapes = (geometry(step, program.table) for step in program.steps if isinstance(step, Extern))
    total = sum(shape.flops for shape in shapes if shape is not None)
    return {kind: found for kind, found in kinds.items() if sum(e.flops for e in found) >= MIN_FLOP_SHARE * total}


def forecast_notes(program: Program) -> list[str]:
    """Lines for a report on a program that is only planned."""
    kinds = worth_ending(program)
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
    *_, left, right = (view for view in kind.product.call.args if isinstance(view, View))
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
