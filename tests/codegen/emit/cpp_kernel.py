"""Kernels of the C++ target, with all decisions of `NEST_PASSES` or some of them left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dcompile.codegen.emit.cpp import kernel
from dcompile.codegen.emit.cpp.plan import NestDecision, NestPlan
from dcompile.codegen.emit.target import EmitRequest, Kernels, KernelSource
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Loop, Program
from dcompile.pipeline import nest_passes


def decisions(without: Collection[str] = ()) -> list[NestDecision]:
    """The functions of the rows, but those named in `without`."""
    return [row.run for row in nest_passes() if row.name not in without]


def plan_of(program: Program, read_again: frozenset[str] = frozenset(), until: str | None = "") -> NestPlan:
    """The plan of a program of one loop; `until` names the last decision that is taken: "" for all, None for none."""
    (loop,) = program.steps
    assert isinstance(loop, Loop)
    names = [row.name for row in nest_passes()]
    rows = decisions(without=names if until is None else names[names.index(until) + 1 :] if until else ())
    return kernel.plan_kernel(loop, program.table, rows, read_again)


def emit(
    loop: Loop,
    table: Mapping[str, Buffer],
    read_again: frozenset[str] = frozenset(),
    without: Collection[str] = (),
) -> KernelSource:
    """The source of one kernel."""
    return kernel.emit(loop, table, decisions(without), read_again)


def emit_all(program: Program) -> Kernels:
    """The kernels of a program."""
    return Kernels(kernel.emit_all(program, EmitRequest(decisions=decisions())))
