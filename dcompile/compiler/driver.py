"""Compile an FX graph to a built program: lower, run the loop passes of `pipeline.py`, emit, build."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from dcompile.codegen.emit.build import KernelCompilers, PendingBuild
from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.select_target import architecture, why_no_kernels
from dcompile.codegen.emit.target import Built, EmitRequest, Kernels, KernelSource
from dcompile.codegen.lower.lower import Lowered, lower
from dcompile.codegen.lower.opaque_calls import called_name
from dcompile.codegen.schedule.memory.memory_summary import memory_headline, memory_lines
from dcompile.codegen.schedule.order.cost_model import offloaded_bytes
from dcompile.codegen.schedule.order.overlap_collectives import overlap_lines, predict_schedule
from dcompile.collectives.contract import REGION_LEFT, ProgramReport, Request
from dcompile.collectives.fsdp_all_gather import gathered_bytes
from dcompile.collectives.fsdp_reduce_scatter import copied_bytes
from dcompile.compat import process_state
from dcompile.compat.size_expressions import traced_sizes
from dcompile.compiler.autotune import Tuner
from dcompile.compiler.compute_regions import RegionCompiler, RegionResult
from dcompile.compiler.numerics import weaker_than_bitwise
from dcompile.config import Config
from dcompile.device_traits import main_device, traits_of
from dcompile.ir.diagram import dot, render
from dcompile.ir.functional_collectives import is_own_collective
from dcompile.ir.gemm import Chosen
from dcompile.ir.nodes import CALL, REGION, Collective, Extern, Loop, Program, Tile
from dcompile.ir.symbols import valued_symbols
from dcompile.ir.text import show
from dcompile.ir.verify import verify
from dcompile.logs import doing, dump, dump_change, is_logged, log, log_code
from dcompile.operators import host_copies
from dcompile.operators.random_ops import is_random
from dcompile.passes import LoopPass, check_names, select_rows
from dcompile.pipeline import DYNAMO_PASSES, JOINT_PASSES, launch_passes, loop_passes, nest_passes
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program import cuda_launch
from dcompile.runtime.program.artifact import CompiledGraph, Loadable

Result = TypeVar("Result")
RANDOM = "random numbers are others than eager's, and a seed repeats them: docs/guide/random-numbers.md"
WAITED = "copies to or from host memory are waited for at once: they are library calls in this graph"
EPILOGUES = "fuse_matmul_epilogues"
"""Pass whose choices are measured, on the program right before it."""
Measure: TypeAlias = Callable[[Program], Mapping[Loop, Tile]]
"""Function that measures which loops to fuse as epilogues, and tiles of matmuls with few rows: `Request.epilogues` for
the program before these passes."""


REPRO = '''"""The graph as it came from lowering: run this file to schedule it and see every kernel's loop."""

from math import inf, nan

from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.loop_order import interchange_reductions
from dcompile.ir.index import *
from dcompile.ir.nodes import *
from dcompile.ir.text import show

program = {program!r}
print(show(fuse(interchange_reductions(program))))
'''


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """Plan of a graph, before anything is built."""

    lowered: Lowered
    program: Program
    kernels: Kernels
    report: ProgramReport
    regions: RegionResult | None = None
    """Regions that another compiler has compiled."""


@dataclass(frozen=True, slots=True)
class PendingGraph:
    """A planned graph whose kernels are being built."""

    plan: ProgramPlan
    source: str
    """Its host program."""
    building: PendingBuild

    @property
    def waits(self) -> bool:
        """Whether its kernels are still being built."""
        return self.building.waits


class Pipeline:
    """Compiler of single graphs, as a function of settings and graph. `compiler.py` looks in the cache first."""

    def __init__(self, config: Config, regions: RegionCompiler | None = None) -> None:
        self.config = config
        if regions is None and config.backend is not None:
            regions = RegionCompiler(config, config.backend)
        self._regions = regions
        graphs = (DYNAMO_PASSES, JOINT_PASSES)
        check_names(config, (*graphs, loop_passes(), nest_passes(), launch_passes()))
        self._passes = tuple(row for row in select_rows(config, loop_passes(), graphs) if row.when(config))
        self._decisions = tuple(row.run for row in select_rows(config, nest_passes(), (*graphs, loop_passes())))
        launches = select_rows(config, launch_passes(), (*graphs, loop_passes(), nest_passes()))
        self._launches = tuple(row for row in launches if row.when(config))
        self._numbers = {row.name: number for number, row in enumerate(loop_passes(), 1)}
        launcher = KernelSource(cuda_launch.LAUNCHER, cuda_launch.LAUNCHER_TEXT, (), 1, False)
        self._compilers = KernelCompilers(config, launcher)
        self._tuner = Tuner()

    def plan(self, gm: Any, request: Request, measure: Measure | None = None, arch: int | None = None) -> ProgramPlan:
        """Lower, schedule and emit one FX graph, without building. `measure` selects epilogues.

        `arch`: compute capability of the GPU; without it, kernels are those of a Hopper GPU.
        """
        began = time.perf_counter()
        reason = self._why_aten(gm)
        regions = self._compile_regions(gm, request)
        graph = gm if regions is None else regions.gm
        lowered = self._timed(request, "lower", lambda: self._lower(graph, request, aten=reason is not None))
        sizes = traced_sizes(gm) if self.config.verify else {}
        *_, (_, program) = self.stages(lowered.program, request, sizes, measure)
        kernels = self._timed(request, "emit", lambda: self.emit(program, request, arch))
        report = _report(program, kernels, request)
        if regions is not None:
            report.fallbacks |= self._refused(regions)
        if any(isinstance(step, Collective) for step in program.steps):
            foreseen = predict_schedule(program, request.figures, dict(request.groups))
            report.schedule, report.predicted_us, report.exposed_us = foreseen
        if reason and self.config.kernels != "aten":
            report.notes.append(f"a graph ({request.kind}) runs on ATen kernels: {reason}")
        report.notes += lowered.declined
        if any(isinstance(step, Extern) and step.op in host_copies.KINDS for step in program.steps):
            report.notes.append(WAITED)
        if any(is_random(node.target) for node in gm.graph.nodes):
            report.notes.append(RANDOM)
        took_ms = (time.perf_counter() - began) * 1e3
        steps = f"{len(lowered.program.steps)} -> {len(program.steps)} steps"
        log(self.config, "passes", logging.INFO, f"{request.name}: planned in {took_ms:.1f} ms, {steps}")
        log_plan(self.config, program, request)
        return ProgramPlan(lowered, program, kernels, report, regions)

    def _compile_regions(self, gm: Any, request: Request) -> RegionResult | None:
        """Compile the graph's regions with another compiler, if option `kernels` names one."""
        regions = self._regions
        return None if regions is None else self._timed(request, "regions", lambda: regions.compile(gm, request))

    def _refused(self, regions: RegionResult) -> dict[str, int]:
        """Lines of the receipt for regions that run on dcompile's kernels instead."""
        name = "" if self.config.backend is None else self.config.backend.name
        return {f"{REGION_LEFT} {name}: {reason}": count for reason, count in regions.refused.items()}

    def emit(self, program: Program, request: Request, arch: int | None = None) -> Kernels:
        """Emit the kernels of a program. `arch`: compute capability of its GPU, if it is known."""
        given, kernels = EmitRequest(request.kind, self._decisions, arch), Kernels()
        for number, row in enumerate(self._launches, 1):
            before, run = kernels, functools.partial(row.run, kernels, program, *row.given(given))
            kernels = self._timed(request, row.name, run)
            if self.config.dump:
                file = f"{program.name}/launches/{number:02d}_{row.name}"
                dump_change(self.config, file, before.show(), kernels.show())
        return kernels

    def begin(self, gm: Any, request: Request, cache: KernelCache) -> PendingGraph:
        """Lower, schedule and emit one FX graph, and start building its kernels."""
        arch = self._arch(gm)
        if arch is not None:
            self._compilers.prepare(arch, cache)
        notes: list[str] = []
        measure = None if arch is None else self._epilogues(gm, request, arch, cache, notes)
        with doing(self.config, f"planning {request.kind}"):
            plan = self.plan(gm, request, measure, arch)
        plan.report.notes += notes
        building = self._compilers.begin(plan.kernels, arch, cache)
        recycle = request.kind == "inference"
        measures = self.config.max_autotune and arch is not None
        if self.config.max_autotune and not measures:
            plan.report.notes.append(f"max_autotune has no effect: {self._why_not_tuned(gm)}")
        chosen = self._timed(request, "tune", lambda: self._chosen(plan, gm)) if measures else None
        saved = frozenset(plan.lowered.program.inputs[position] for position in request.saved)
        source = self._timed(
            request,
            "host",
            lambda: host_program.emit(plan.program, plan.kernels, recycle=recycle, chosen=chosen, saved=saved),
        )
        return PendingGraph(plan, source, building)

    def _why_not_tuned(self, gm: Any) -> str:
        if all(traits_of(device.type).is_host for device in _devices(gm)):
            return "it measures matmuls on GPUs, and this graph runs on the CPU"
        return "it measures matmuls together with dcompile's kernels, and this graph runs on ATen's"

    def _chosen(self, plan: ProgramPlan, gm: Any) -> Chosen:
        """Choose algorithms for large GEMMs by measuring, and note the result for the receipt."""
        if torch.are_deterministic_algorithms_enabled():
            plan.report.notes.append("max_autotune: nothing is measured, for another run might choose otherwise")
            return {}
        chosen, note = self._tuner.algorithms(plan.program, _gpu(gm))
        plan.report.notes += [note] if note else []
        return chosen

    def _epilogues(self, gm: Any, request: Request, arch: int, cache: KernelCache, notes: list[str]) -> Measure | None:
        """Function that measures kernels of matmuls, or None if that is not requested. Lines for the receipt go to
        `notes`.
        """
        config = self.config
        if not config.max_autotune or torch.are_deterministic_algorithms_enabled():
            return None

        build = functools.partial(self.build, arch=arch, cache=cache)

        def measure(program: Program) -> Mapping[Loop, Tile]:
            chosen: dict[Loop, Tile] = {}
            for name, tune in (("epilogues", self._tuner.epilogues), ("skinny", self._tuner.skinny)):
                if name == "epilogues" and not config.epilogue_fusion:
                    continue
                found, lines = self._timed(request, name, functools.partial(tune, program, _gpu(gm), arch, build))
                chosen |= found
                notes.extend(lines)
            return chosen

        return measure

    def build(self, sources: Sequence[KernelSource], *, arch: int, cache: KernelCache) -> Mapping[str, Path]:
        """Build kernels to measure; return name -> archive, including the launcher."""
        return self._compilers.begin(Kernels(tuple(sources)), arch, cache).result().libraries

    def finish(self, begun: PendingGraph, gm: Any, request: Request, cache: KernelCache) -> tuple[Loadable, Built]:
        """Wait for the kernels, and make the graph loadable."""
        plan, source, building = begun.plan, begun.source, begun.building
        lowered, program, kernels = plan.lowered, plan.program, plan.kernels
        began = time.perf_counter()
        with doing(self.config, building.progress):
            built = self._timed(request, "build", building.result)
        log_build(self.config, request.name, built, time.perf_counter() - began)
        constants = {name: lowered.constants[name] for name in program.inputs if name in lowered.constants}
        self._show_code(lowered.program, kernels, source)
        self._dump_graph(gm, program)
        arena_bytes = program.arena_bytes if isinstance(program.arena_bytes, int) else 0  # else the source computes it
        written = frozenset().union(*(step.writes for step in program.steps))
        mutated = tuple(position for position, name in enumerate(program.inputs) if name in written)
        device = main_device(buffer.device for buffer in program.buffers)
        late = len(valued_symbols(program))
        graph = CompiledGraph(
            source,
            tuple(constants),
            program.buckets,
            arena_bytes,
            built.keys,
            plan.report,
            mutated,
            device,
            late,
            () if plan.regions is None else tuple(name for name in plan.regions.names if name in constants),
        )
        return Loadable(graph, built.libraries, constants), built

    def load(self, program: Program, request: Request, cache: KernelCache) -> Loadable:
        """Emit and build a program by itself, such as one step of another. It has no constants, and is not dumped."""
        arch = architecture({torch.device(buffer.device) for buffer in program.buffers if buffer.is_tensor})
        if arch is not None:
            self._compilers.prepare(arch, cache)
        kernels = self.emit(program, request, arch)
        plan = ProgramPlan(Lowered(program, {}), program, kernels, _report(program, kernels, request))
        source = host_program.emit(program, kernels, recycle=False)
        return self.finish(
            PendingGraph(plan, source, self._compilers.begin(kernels, arch, cache)), None, request, cache
        )[0]

    def _arch(self, gm: Any) -> int | None:
        """The compute capability that this graph's kernels are for, if it is to have any on a GPU."""
        return None if self._why_aten(gm) is not None else architecture(_devices(gm))

    def begin_products(self, cache: KernelCache) -> None:
        """Have the kernel of matrix products compiled, while a graph that needs it is traced."""
        self._compilers.begin_matmul(cache)

    def _lower(self, gm: Any, request: Request, *, aten: bool) -> Lowered:
        return lower(
            gm,
            request.name,
            request.grads,
            aten=aten,
            own_rows=self.config.matmul != "aten",
            deterministic=torch.are_deterministic_algorithms_enabled(),
            saved_from=request.results if request.kind == "forward" else None,
        )

    def _timed(self, request: Request, stage: str, run: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        result = run()
        took_ms = (time.perf_counter() - began) * 1e3
        log(self.config, "passes", logging.DEBUG, f"{request.name} {stage}: {took_ms:.1f} ms")
        return result

    def _show_code(self, lowered: Program, kernels: Kernels, source: str) -> None:
        """Write generated code to the dump, and to the log if torch's settings request it."""
        if self.config.dump:
            dump(self.config, f"{lowered.name}/host.py", source)
            dump(self.config, f"{lowered.name}/repro.py", REPRO.format(program=lowered))
            for name, text in _commented_kernels(kernels):
                dump(self.config, f"{lowered.name}/kernels/{name}.cpp", text)
        if process_state.is_artifact_enabled(*process_state.CODE_ARTIFACTS):
            for name, text in _commented_kernels(kernels):
                log_code(self.config, f"{lowered.name}: kernel {name}\n{text}")
        if process_state.is_artifact_enabled("output_code"):
            log_code(self.config, f"{lowered.name}: host program\n{source}")

    def _dump_graph(self, gm: Any, program: Program) -> None:
        if self.config.dump:
            dump(self.config, f"{program.name}/graph.py", gm.print_readable(print_output=False))
        if self.config.trace_graph_diagram:
            dump(self.config, f"{program.name}/graph_diagram.dot", text := dot(program))
            if (picture := render(text)) is not None:
                dump(self.config, f"{program.name}/graph_diagram.svg", picture)

    def _why_aten(self, gm: Any) -> str | None:
        """Why this graph is left to ATen as a whole; None if it is not."""
        if self.config.kernels == "aten":
            return 'options={"kernels": "aten"}'
        return why_no_kernels(_devices(gm))

    def stages(
        self,
        program: Program,
        request: Request,
        sizes: Mapping[str, int] | None = None,
        measure: Measure | None = None,
    ) -> Iterator[tuple[str, Program]]:
        """Yield the name of each loop pass and the program after it, first "lower" and the program as it was lowered.

        Matmuls are measured right before the passes that use the choices. `sizes`: values of symbols for verification.
        """
        sizes = sizes or {}
        program = replace(program, donated=tuple(program.inputs[position] for position in request.donated))
        self._inspect("00_lower", program, None, sizes)
        yield "lower", program
        has_loops = any(isinstance(step, Loop) for step in program.steps)
        for row in self._passes:
            if row.needs_loops and not has_loops:
                continue
            if row.name == EPILOGUES and measure is not None:
                request = replace(request, epilogues=tuple(measure(program).items()))
            program = self._run_pass(row, program, request, sizes)
            yield row.name, program

    def _run_pass(self, row: LoopPass, before: Program, request: Request, sizes: Mapping[str, int]) -> Program:
        began = time.perf_counter()
        program: Program = row.run(before, *row.given(request))
        took_ms = (time.perf_counter() - began) * 1e3
        steps = f"{len(before.steps)} -> {len(program.steps)}"
        is_news = is_logged(self.config, "passes", logging.INFO) and show(program) != show(before)
        level = logging.INFO if is_news else logging.DEBUG
        log(self.config, "passes", level, f"{request.name} {row.name}: {took_ms:.1f} ms, {steps}")
        self._inspect(f"{self._numbers[row.name]:02d}_{row.name}", program, before, sizes)
        return program

    def _inspect(self, name: str, program: Program, before: Program | None, sizes: Mapping[str, int]) -> None:
        if self.config.verify:
            verify(program, sizes, before)
        if self.config.dump:
            if before is None:
                dump(self.config, f"{program.name}/{name}.txt", show(program))
            else:
                dump_change(self.config, f"{program.name}/{name}", show(before), show(program))


def _commented_kernels(kernels: Kernels) -> Iterator[tuple[str, str]]:
    """Name and text of each kernel, with comments for the modules that call it and the decisions about it."""
    origins: dict[str, dict[str, None]] = {}
    used = (*kernels.calls, *(product.kernel for product in kernels.products.values()))
    for call in used:  # equal layers share a kernel: name all of them
        origins.setdefault(call.name, {}).update(dict.fromkeys(call.origin))
    for kernel in kernels.sources:
        yield kernel.name, "".join(f"// {line}\n" for line in (*origins[kernel.name], *kernel.plan)) + kernel.text


def _gpu(gm: Any) -> torch.device:
    """GPU of a graph with dcompile's kernels."""
    (found,) = (device for device in _devices(gm) if not traits_of(device.type).is_host)
    return found


def _devices(gm: Any) -> set[torch.device]:
    found = (_tensors(node.meta.get("val")) for node in gm.graph.nodes)
    return {value.device for values in found for value in values}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _report(program: Program, kernels: Kernels, request: Request) -> ProgramReport:
    loops = [step for step in program.steps if isinstance(step, Loop)]
    externs = [step for step in program.steps if isinstance(step, Extern)]
    regions = sum(step.op == REGION for step in externs)
    fallbacks: dict[str, int] = {}
    for step in externs:
        if step.fallback:
            name = called_name(step.args) if step.op == CALL else step.op
            fallbacks[name] = fallbacks.get(name, 0) + 1
    return ProgramReport(
        weaker=weaker_than_bitwise(program, kernels, dict(request.groups)),
        kernels=len(kernels.sources),
        kernel_calls=len(loops) + len(kernels.products),
        library_calls=sum(not step.fallback for step in externs) - len(kernels.products) - regions,
        fallbacks=fallbacks,
        regions=regions,
        collectives=len(program.buckets) + sum(map(is_own_collective, program.steps)),
        bytes_copied=copied_bytes(program),
        bytes_gathered=gathered_bytes(program),
        bytes_offloaded=offloaded_bytes(program),
    )


def log_plan(config: Config, program: Program, request: Request) -> None:
    """Log decisions about collectives and memory."""
    name = program.name
    if any(isinstance(step, Collective) for step in program.steps) and is_logged(config, "overlap", DEBUG):
        _log_all(config, "overlap", name, overlap_lines(program, request.figures, dict(request.groups)))
    if is_logged(config, "memory", INFO):
        log(config, "memory", INFO, f"{name}: {memory_headline(program)}")
    if is_logged(config, "memory", DEBUG):
        _log_all(config, "memory", name, memory_lines(program))


def log_build(config: Config, name: str, built: Built, seconds: float) -> None:
    """Log which kernels of a program were compiled, and which were in the cache."""
    if built.compiled:
        waited = f"built {len(built.compiled)} kernels, waited {seconds:.2f} s for compilers"
        log(config, "kernels", DEBUG, f"{name}: {waited}: {', '.join(sorted(built.compiled))}")
    if built.cached:
        names = ", ".join(sorted(built.cached))
        log(config, "kernels", DEBUG, f"{name}: {len(built.cached)} kernels in the cache: {names}")


def _log_all(config: Config, channel: str, name: str, lines: Iterable[str]) -> None:
    for line in lines:
        log(config, channel, DEBUG, f"{name}: {line}")
