"""Plan graphs like a compilation, build nothing, and run them with torch's own operators, for explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.services import Services
from dcompile.collectives.contract import AnySource, Foreseen, ProgramReport, Request
from dcompile.compiler.autotune import forecast_notes
from dcompile.compiler.caching import CachingCompiler
from dcompile.compiler.driver import ProgramPlan
from dcompile.ir.buffers import Bucket
from dcompile.ir.nodes import Loop, Program, Tile


class PlanningCompiler(CachingCompiler):
    """Compiler that only plans each graph, and runs it with torch on this rank alone."""

    def record(self, gm: Any, request: Request, plan: ProgramPlan) -> None:
        """Record the plan of a graph."""
        raise NotImplementedError

    def gathered(self, number: int) -> torch.Tensor:
        """A whole sharded parameter, as a graph that gathers it computes with it."""
        raise NotImplementedError

    def traces(self) -> None:
        """Nothing is kept of what is only planned."""

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> DryRunExecutable:
        del foreseen
        notes: list[str] = []

        def forecast(program: Program) -> dict[Loop, Tile]:
            """Choose no epilogues, since nothing is measured here."""
            notes.extend(forecast_notes(program) if self.config.max_autotune and self.config.epilogue_fusion else ())
            return {}

        plan = self._pipeline().plan(gm, request, forecast)
        plan.report.notes += notes
        self.record(gm, request, plan)
        return DryRunExecutable(self, gm, plan.program.buckets, request.gathers)

    def services(self) -> Services:
        """Services for capture/: this compiler, and no communication."""
        return Services(self, _no_buckets, _do_nothing, _do_nothing, _do_nothing, NoCommunication)


class DryRunExecutable:
    """Implementation of `collectives.contract.Executable` with torch's own operators."""

    source = ""

    def __init__(
        self, compiler: PlanningCompiler, gm: Any, buckets: tuple[Bucket, ...], gathers: Sequence[tuple[int, int]]
    ) -> None:
        self.gm, self.buckets, self.report = gm, buckets, ProgramReport()
        self._compiler, self._gathers = compiler, gathers

    def __call__(self, args: list[Any], *, buckets: AnySource | None = None, sync: bool = False) -> list[Any]:
        del buckets, sync
        values = list(args)
        args.clear()
        for position, number in self._gathers:
            values[position] = self._compiler.gathered(number)
        with torch.no_grad():
            return list(compat.absent_ranks.run_alone(self.gm, values))


class NoCommunication:
    """Implementation of `capture.services.ShardedParameters` without communication."""

    def __init__(self, *_: Any) -> None: ...

    def source(self, buckets: Any, phase: Any, accumulates: bool = False, *of_units: Any) -> Any:
        del buckets, phase, accumulates, of_units

    def may_lack(self, units: Iterable[int]) -> None: ...

    def save_memory(self, reason: str) -> None: ...

    def forget_parts(self) -> None: ...

    def update_scales(self) -> None: ...

    def join(self, *_: Any) -> None: ...

    def note(self) -> str:
        return ""

    def take(self, full: Any) -> None: ...

    def give_back(self, from_now_on: bool = True) -> None: ...

    def copied(self, group: str) -> tuple[bool, str]:
        del group
        return False, ""

    def flush(self, outside: Any = None) -> None: ...

    def reduce_behind(self, full: Any) -> None: ...


def _no_buckets(*_: Any) -> Any:
    return None


def _do_nothing(*_: Any, **__: Any) -> None:
    return None
