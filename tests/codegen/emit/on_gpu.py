"""Runs programs of loops as Triton kernels on the GPU, through the launch table, on poisoned memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from dcompile.codegen.emit.cpp import compile as cpp_compile
from dcompile.codegen.emit.target import KernelSource
from dcompile.codegen.emit.triton import compile as triton_compile
from dcompile.codegen.emit.triton import kernel
from dcompile.codegen.schedule.fusion.split_reductions import split_column_reductions, split_row_reductions
from dcompile.config import Config
from dcompile.ir.index import as_index, evaluate
from dcompile.ir.interpret import GARBAGE
from dcompile.ir.nodes import Program
from dcompile.ir.symbols import specialise
from dcompile.runtime.program import argument_table, cuda_launch
from dcompile.runtime.program.argument_table import Address
from tests.codegen.emit.harness import NONE, placed, read, store

GUARD = 64


def for_gpu(program: Program) -> Program:
    """The program as the pipeline would schedule it for a GPU."""
    there = replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers))
    return split_row_reductions(split_column_reductions(there))


def compiled(programs: list[Program]) -> dict[str, object]:
    """All kernels of some programs, and the launcher: name -> file."""
    sources = [kernel.emit(step, p.table) for p in programs for step in p.steps]
    major, minor = torch.cuda.get_device_capability()
    launcher = KernelSource(cuda_launch.LAUNCHER, cuda_launch.LAUNCHER_TEXT, (), 1, False)
    found = dict(cpp_compile.build([launcher], Config(), store()).libraries)
    arch = 10 * major + minor
    crew = triton_compile.WorkerPool(arch, store().directory)
    try:
        return found | dict(triton_compile.TritonBuild(sources, arch, Config(), store(), crew).result().libraries)
    finally:
        crew.close()


def run(
    program: Program, inputs: dict[str, np.ndarray], built: dict[str, object], numbers: Mapping[str, int] = NONE
) -> list[np.ndarray]:
    """Outputs of a program whose size symbols are `numbers`; asserts that nothing is written behind a buffer."""
    symbolic, program = program, specialise(program, numbers)
    table = program.table
    memory = {b.name: placed(b, inputs.get(b.name)) for b in program.buffers}
    there = {name: torch.from_numpy(flat.view(np.uint8)).cuda() for name, flat in memory.items()}
    names = {name: place for place, name in enumerate(there)}
    kernels = []
    for step in symbolic.steps:
        source = kernel.emit(step, symbolic.table)
        known = [*(names[name] for name in source.arguments), *(Address(numbers[name]) for name in source.sizes)]
        known += map(Address, source.numbers)
        for n in source.launches:
            grid = evaluate(as_index(n.grid), numbers)
            if grid:
                kernels.append((built[source.name], n.function, grid, [known[place] for place in n.arguments]))
    launches = cuda_launch.launches(argument_table.library(built[cuda_launch.LAUNCHER]), 0, len(names), kernels)
    launches(cuda_launch.stream_of(0), *(tensor.data_ptr() for tensor in there.values()))
    torch.cuda.synchronize()
    for name, flat in memory.items():
        flat.view(np.uint8)[...] = there[name].cpu().numpy()
        assert (flat[-GUARD:].view(np.uint8) == GARBAGE).all(), f"{name}: written past its end"
    return [read(table[view.buffer], view, memory[view.buffer]) for view in program.outputs]
