"""The Triton target: a loop becomes one kernel, or one and a second that fills what atomic stores add to.

A program of a kernel works on a tile, and a tile's values are tensors: over rows `x`, over elements `r`, over both, or
scalars. Row programs keep a row in registers from its first pass to its last, and read longer rows again in every pass.
Text is normalised, and all sizes are literals in it: equal text is an equal kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dcompile.codegen.emit.emitter import Emitter, Kernels, KernelSource, Launch
from dcompile.codegen.emit.triton_passes import Passes
from dcompile.codegen.emit.triton_prelude import HEADER, POINTERS, SPELLING, literal, used_functions
from dcompile.codegen.emit.triton_tiles import fixed, make_plan
from dcompile.ir.nodes import Buffer, Loop, Program
from dcompile.ir.ops import REDUCTIONS

FILL = 1024
ALIGNED = ":16"
"""Behind the type of a pointer to whole 16 bytes, which every buffer starts at: see `runtime.gpu`."""


def emit(loop: Loop, table: Mapping[str, Buffer]) -> KernelSource:
    """The source of one kernel; `table` says how large the buffers are, and where those of the arena lie."""
    plan = make_plan(loop)
    writer = Passes(plan, table)
    writer.run()
    arguments = tuple(writer.arguments)
    numbers = tuple(writer.draws)
    parts = [_function("kernel", (*writer.arguments.values(), *writer.draws.values()), writer.lines)]
    launches = [_launch("kernel", plan.grid, plan.warps, arguments, arguments, table, len(numbers))]
    if plan.atomic:
        for store in loop.stores:
            if store.mode != "set":
                name = f"fill_{writer.arguments[store.buffer]}"
                size = writer.extent(store.buffer)
                identity = literal(
                    REDUCTIONS[store.mode].identity(table[store.buffer].dtype), table[store.buffer].dtype
                )
                parts.append(_fill(name, size, identity))
                launches.insert(0, _launch(name, -(-size // FILL), 4, (store.buffer,), arguments, table))
    text = "\n\n".join(parts)
    text = f"{HEADER}\n\n{used_functions(text)}\n\n{text}"
    shape = [(launch.function, launch.grid, launch.warps, launch.types) for launch in launches]
    digest = hashlib.sha256(f"{text}\n{shape}".encode()).hexdigest()[:24]
    entry = f"dcompile_{plan.kind}_{digest[:8]}"  # what profilers show
    text = text.replace("def kernel(", f"def {entry}(")
    launches = [replace(n, function=entry) if n.function == "kernel" else n for n in launches]
    cost = len(loop.body) + 4
    return KernelSource(f"k{digest}", text, arguments, cost, False, loop.origin, (), tuple(launches), numbers)


def emit_all(program: Program) -> Kernels:
    """The kernels of a program, one for each of its loops."""
    table = program.table
    return Kernels(tuple(emit(step, table) for step in program.steps if isinstance(step, Loop)))


EMITTER = Emitter("triton", SPELLING, emit)


def _function(name: str, arguments: Iterable[str], lines: list[str]) -> str:
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n" + "\n".join(lines or ["    pass"]) + "\n"


def _fill(name: str, size: int, identity: str) -> str:
    wide = "tl.program_id(0).to(tl.int64)" if size >= 2**31 else "tl.program_id(0)"
    lines = [f"    x = {wide} * {FILL} + tl.arange(0, {FILL})", f"    tl.store(a + x, {identity}, x < {size})"]
    return _function(name, ["a"], lines)


def _launch(
    function: str,
    grid: int,
    warps: int,
    used: tuple[str, ...],
    arguments: tuple[str, ...],
    table: Mapping[str, Buffer],
    numbers: int = 0,
) -> Launch:
    types = tuple(
        POINTERS[table[name].dtype] + ("" if fixed([table[name].offset])[0] % 16 else ALIGNED) for name in used
    )
    behind = range(len(arguments), len(arguments) + numbers)
    chosen = (*(arguments.index(name) for name in used), *behind)
    return Launch(function, grid, warps, chosen, (*types, *["i64"] * numbers))
