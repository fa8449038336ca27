"""Every pass of every stage, in order: the table of contents of the compiler."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dcompile.artifacts import dump, log
from dcompile.codegen.emit import build, cpp, host
from dcompile.codegen.emit.build import Built
from dcompile.codegen.emit.emitter import Kernels
from dcompile.codegen.lower.program import is_static, lower
from dcompile.codegen.schedule.dependences import drop_dead
from dcompile.codegen.schedule.fuse import fuse
from dcompile.codegen.schedule.memory import plan_memory
from dcompile.codegen.schedule.order import start_early_wait_late
from dcompile.codegen.schedule.reorient import reorient_columns
from dcompile.collectives.insert import insert_buckets
from dcompile.collectives.params import Report, Request
from dcompile.config import Config
from dcompile.errors import OptionError
from dcompile.ir.diagram import draw
from dcompile.ir.nodes import Extern, Loop, Program
from dcompile.ir.text import show
from dcompile.ir.verify import verify
from dcompile.machine import own_products_pay
from dcompile.runtime.cache import KernelCache
from dcompile.runtime.compiled import CompiledGraph, Loadable

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pass:
    """One rewrite of the program. `reorders_sums`: outputs equal up to the order of reductions; otherwise bitwise."""

    run: Callable[[Program, Request], Program]
    name: str
    reorders_sums: bool = False
    needs_loops: bool = False
    required: bool = False


PASSES: tuple[Pass, ...] = (
    Pass(lambda program, _: drop_dead(program), "drop_dead"),
    Pass(lambda program, _: reorient_columns(program), "reorient_columns", reorders_sums=True, needs_loops=True),
    Pass(lambda program, _: fuse(program), "fuse", needs_loops=True),
    # after fusion, so that a bucket's all-reduce starts behind the real kernel that writes its last gradient
    Pass(lambda program, request: _bucketed(program, request), "insert_buckets", required=True),
    Pass(lambda program, _: start_early_wait_late(program), "start_early_wait_late"),
    Pass(lambda program, _: plan_memory(program), "plan_memory", required=True),
)


REPRO = '''"""The graph as it came from lowering: run this file to schedule it and see every kernel's loop."""

from math import inf, nan

from dcompile.codegen.schedule.fuse import fuse
from dcompile.codegen.schedule.reorient import reorient_columns
from dcompile.ir.index import *
from dcompile.ir.nodes import *
from dcompile.ir.text import show

program = {program!r}
print(show(fuse(reorient_columns(program))))
'''


class Pipeline:
    """Compiles one graph after another: a function of settings and graph. `compiler.py` asks the cache before."""

    def __init__(self, config: Config) -> None:
        self.config = config
        names = [p.name for p in PASSES]
        for wanted in filter(None, (*config.skip.split(","), config.until)):
            if wanted not in names:
                raise OptionError(f"dcompile: unknown pass {wanted!r} in skip or until; passes: {', '.join(names)}")

    def compile(self, gm: Any, request: Request, cache: KernelCache) -> tuple[Loadable, Built]:
        """Compile one FX graph: lower, schedule, emit, build."""
        reason = self._why_aten(gm)
        lowered = self._timed(request, "lower", lambda: lower(gm, request.name, request.grads, aten=reason is not None))
        program = self._schedule(lowered.program, request)
        kernels = self._timed(request, "emit", lambda: cpp.emit_all(program, own_products=self._own_products()))
        source = self._timed(request, "host", lambda: host.emit(program, kernels))
        built = self._timed(request, "build", lambda: build.build(kernels.sources, self.config, cache))
        constants = {name: lowered.constants[name] for name in program.inputs if name in lowered.constants}
        report = _report(program, kernels)
        if reason and self.config.kernels != "aten":
            report.notes.append(f"a graph ({request.kind}) runs on ATen kernels: {reason}")
        self._dump_code(lowered.program, kernels, source)
        self._dump_graph(gm, program)
        arena_bytes = program.arena_bytes if isinstance(program.arena_bytes, int) else 0  # else the source works it out
        written = frozenset().union(*(step.writes for step in program.steps))
        mutated = tuple(position for position, name in enumerate(program.inputs) if name in written)
        graph = CompiledGraph(source, tuple(constants), program.buckets, arena_bytes, built.keys, report, mutated)
        return Loadable(graph, built.libraries, constants), built

    def _timed(self, request: Request, stage: str, run: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        result = run()
        log(self.config, "passes", f"{request.name} {stage}: {(time.perf_counter() - began) * 1e3:.1f} ms")
        return result

    def _dump_code(self, lowered: Program, kernels: Kernels, source: str) -> None:
        if not self.config.dump:
            return
        dump(self.config, f"{lowered.name}/host.py", source)
        dump(self.config, f"{lowered.name}/repro.py", REPRO.format(program=lowered))
        for kernel in kernels.sources:
            origin = "".join(f"// {line}\n" for line in kernel.origin)
            dump(self.config, f"{lowered.name}/kernels/{kernel.name}.cpp", origin + kernel.text)

    def _dump_graph(self, gm: Any, program: Program) -> None:
        if self.config.dump:
            dump(self.config, f"{program.name}/graph.py", gm.print_readable(print_output=False))
        if self.config.trace_graph_diagram:
            dump(self.config, f"{program.name}/graph_diagram.svg", draw(program))

    def _own_products(self) -> bool:
        return self.config.matmul == "own" or (self.config.matmul == "auto" and own_products_pay())

    def _why_aten(self, gm: Any) -> str | None:
        """Why this graph is left to ATen altogether, if it is."""
        if self.config.kernels == "aten":
            return 'options={"kernels": "aten"}'
        if not is_static(gm):
            return "sizes are symbolic, and our kernels are made for fixed sizes"
        if any(device != "cpu" for device in _devices(gm)):
            return "it is on a GPU, for which there is no emitter yet"
        return None

    def _schedule(self, program: Program, request: Request) -> Program:
        config = self.config
        skipped = set(config.skip.split(","))
        has_loops = any(isinstance(step, Loop) for step in program.steps)
        stopped = False
        self._inspect("00_lower", program, None)
        for number, step in enumerate(PASSES, 1):
            if not step.required and (stopped or step.name in skipped or (step.needs_loops and not has_loops)):
                continue
            began, before = time.perf_counter(), program
            program = step.run(program, request)
            took = (time.perf_counter() - began) * 1e3
            log(
                config,
                "passes",
                f"{request.name} {step.name}: {took:.1f} ms, {len(before.steps)} -> {len(program.steps)}",
            )
            self._inspect(f"{number:02d}_{step.name}", program, before)
            stopped = stopped or step.name == config.until
        return program

    def _inspect(self, name: str, program: Program, before: Program | None) -> None:
        if self.config.verify:
            verify(program)
        if self.config.dump:
            text = show(program)
            dump(self.config, f"{program.name}/{name}.txt", text)
            if before is not None:
                old, new = show(before).splitlines(), text.splitlines()
                dump(self.config, f"{program.name}/{name}.diff", "\n".join(difflib.unified_diff(old, new, lineterm="")))


def _bucketed(program: Program, request: Request) -> Program:
    if request.rule is None:
        return replace(program, grads=())
    return insert_buckets(program, request.params, request.rule)


def _devices(gm: Any) -> set[str]:
    values = (node.meta.get("val") for node in gm.graph.nodes)
    return {value.device.type for value in values if hasattr(value, "device")}


def _report(program: Program, kernels: Kernels) -> Report:
    loops = [step for step in program.steps if isinstance(step, Loop)]
    externs = [step for step in program.steps if isinstance(step, Extern)]
    fallbacks: dict[str, int] = {}
    for step in externs:
        if step.fallback:
            fallbacks[step.op] = fallbacks.get(step.op, 0) + 1
    return Report(
        kernels=len(kernels.sources),
        kernel_calls=len(loops) + len(kernels.products),
        library_calls=sum(not step.fallback for step in externs) - len(kernels.products),
        fallbacks=fallbacks,
        collectives=len(program.buckets),
    )
