"""Whole graphs as they are for a GPU, run where there is none: host programs as ever, kernels by Triton's interpreter.

A graph is traced and run on the CPU, and planned as if its buffers lay on a GPU. Import only where TRITON_INTERPRET=1.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import KernelSource
from dcompile.codegen.emit.triton.kernel import ALIGNED
from dcompile.codegen.emit.triton.ops import POINTERS
from dcompile.compiler import driver
from dcompile.compiler.caching import CachingCompiler
from dcompile.runtime.program import cuda_launch, workspace
from dcompile.runtime.program.arena import like
from dcompile.runtime.program.argument_table import Address
from dcompile.runtime.program.artifact import CompiledGraph, Loadable
from dcompile.runtime.program.executable import HostProgram
from tests.codegen.emit.interpreted import _module

DTYPES = {pointer: getattr(torch, name) for name, pointer in POINTERS.items()}


class Interpreting(workspace.HostProgramServices):
    """What a host program for a GPU asks for, on the CPU. `kernels`: those of all graphs, by name."""

    kernels: dict[str, KernelSource]

    def stream(self) -> int:
        return 0

    @staticmethod
    def realigned(call, args, written, buckets, sync):
        assert not written, "no program here overwrites what it is given"
        return call([like(a).copy_(a) if isinstance(a, torch.Tensor) else a for a in args], buckets, sync)

    def launches(self, count, kernels):
        def launch(stream: int, *given: int) -> None:
            assert stream == 0 and len(given) == count
            for name, function, grid, arguments in kernels:
                values = [int(a) if isinstance(a, Address) else given[a] for a in arguments]
                programs = given[grid.place] if isinstance(grid, cuda_launch.SymbolicGrid) else grid
                if programs:
                    self._start(name, function, programs, values)

        return launch

    def _start(self, name: str, function: str, grid: int, values: list[int]) -> None:
        source = self.kernels[name]
        module = _module(source.name, source.text)
        (found,) = (launch for launch in source.launches if launch.function == function)
        passed = [_passed(value, kind) for value, kind in zip(values, found.types, strict=True)]
        with np.errstate(all="ignore"):
            getattr(module, function)[(grid,)](*passed, num_warps=found.warps)


def _passed(value: int, kind: str) -> torch.Tensor | int:
    pointer = kind.removesuffix(ALIGNED)
    if pointer not in DTYPES:
        return value
    assert kind == pointer or value % 16 == 0, "a kernel was promised whole 16 bytes"
    dtype = DTYPES[pointer]
    if not value:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * dtype.itemsize).from_address(value), dtype=dtype)


@contextlib.contextmanager
def on_cpu() -> Iterator[list[str]]:
    """Every graph that is compiled in here runs so; the texts of their host programs."""
    texts: list[str] = []
    lower, kernels = driver.lower, {}

    def elsewhere(*args: Any, **more: Any) -> Any:
        lowered = lower(*args, **more)
        buffers = tuple(replace(b, device="cuda") if b.is_tensor else b for b in lowered.program.buffers)
        return replace(lowered, program=replace(lowered.program, buffers=buffers))

    def compile_graph(self: Any, gm: Any, request: Any, foreseen: Any = None) -> HostProgram:
        with mock.patch.object(driver, "lower", elsewhere):
            plan = driver.Pipeline(self.config).plan(gm, request)
        program = plan.program
        text = host_program.emit(program, plan.kernels, recycle=request.kind == "inference")
        texts.append(text)
        kernels.update({source.name: source for source in plan.kernels.sources})
        text = text.replace("empty_cuda(", "empty_cpu(").replace("device='cuda'", "device='cpu'")
        constants = {n: plan.lowered.constants[n] for n in program.inputs if n in plan.lowered.constants}
        size = program.arena_bytes if isinstance(program.arena_bytes, int) else 0
        graph = CompiledGraph(text, tuple(constants), program.buckets, size, {}, plan.report)
        return HostProgram(request.name, Loadable(graph, {}, constants), self._workspaces)

    run = type("Run", (Interpreting,), {"kernels": kernels})
    with (
        mock.patch.object(workspace, "HostProgramServices", run),
        mock.patch.object(CachingCompiler, "compile_graph", compile_graph),
    ):
        yield texts
