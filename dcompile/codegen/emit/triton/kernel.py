"""The Triton target: a loop becomes one kernel, or two if the buffers that it combines into must be filled first.

A program of a kernel computes a tile, and a tile's values are tensors: over rows `x`, over elements `r`, over both, or
scalars. Row programs keep a row in registers from its first pass to its last, and read longer rows again in every pass.
Text is normalized, and static sizes are literals in it: equal text is an equal kernel. Size symbols are arguments after
the addresses. Positions then have 64 bits, and grids are computed when the host program prepares a call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.emit.target import KernelSource, Launch, describe_loop, kernel_name
from dcompile.codegen.emit.triton.library import HEADER, used_functions
from dcompile.codegen.emit.triton.ops import ALIGNED, POINTERS, literal
from dcompile.codegen.emit.triton.printer import TritonText
from dcompile.codegen.emit.triton.row_passes import RowPassWriter
from dcompile.codegen.emit.triton.skinny_matmul import SkinnyMatmulWriter
from dcompile.codegen.nest.gpu_tiling import leaves_gaps, make_plan
from dcompile.codegen.nest.loop_nest import may_exceed
from dcompile.codegen.nest.row_matmul import RowTile
from dcompile.codegen.nest.tile_plan import ceil_div
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import exact_quotient
from dcompile.ir.nodes import Loop, Store
from dcompile.ir.ops import REDUCTIONS

FILL = 1024
INTEGER = "i64"
"""Type of a size symbol, or of another number argument."""


def emit(
    loop: Loop,
    table: Mapping[str, Buffer],
    constant: frozenset[str] | None = None,
    row_tile: RowTile | None = None,
) -> KernelSource:
    """Return the source of one kernel; `table` gives the buffers' sizes, and offsets in the arena.

    Buffers in `constant` are written neither by this kernel nor by the one before it. If it reads some, it may start
    and read them while that kernel ends. If it reads none, it may still start then; with None it may not.
    `row_tile`: see `make_plan`.
    """
    plan = make_plan(loop, row_tile)
    filled = [
        store
        for store in plan.nest.stores
        if store.mode != "set" and (plan.atomic or leaves_gaps(plan, store, table[store.buffer].extent))
    ]
    body = TritonText(plan, table, None if filled else constant)
    (SkinnyMatmulWriter if plan.skinny else RowPassWriter)(body).run()
    arguments = tuple(body.arguments)
    for store in filled:
        body.size(body.extent(store.buffer))  # every function takes all symbols
    fills = [fill(body, store) for store in filled]
    sizes, numbers = tuple(body.symbols), tuple(body.draws)
    named = (*body.arguments.values(), *body.symbols.values(), *body.draws.values())
    parts = [function_text("kernel", named, body.lines)]
    launches = [
        Launch("kernel", plan.grid, plan.warps, tuple(range(len(named))), types_of(arguments, len(named), table))
    ]
    for buffer, name, text in fills:
        grid = ceil_div(body.extent(buffer), FILL)
        parts.append(text)
        places = [arguments.index(buffer), *range(len(arguments), len(arguments) + len(sizes))]
        launches.insert(0, Launch(name, grid, 4, tuple(places), types_of((buffer,), len(places), table)))
    cost = sum(map(bool, body.classes)) + 4  # scalars of all programs cost next to nothing
    described = describe_loop(loop)
    entries = {"kernel": f"{plan.kind}_{described}"}
    kernel = finished(described, parts, launches, arguments, cost, entries, loop.origin)
    return replace(kernel, sizes=sizes, numbers=numbers, kind=plan.kind)


def finished(
    described: str,
    parts: Sequence[str],
    launches: Sequence[Launch],
    arguments: tuple[str, ...],
    cost: int,
    entries: Mapping[str, str],
    origin: tuple[str, ...] = (),
) -> KernelSource:
    """Return the kernel of some functions, after those of the library that they call.

    `entries`: functions that are launched -> their names in profilers, to which digits of the text are added.
    """
    text = "\n\n".join(parts)
    text = f"{HEADER}\n\n{used_functions(text)}\n\n{text}"
    shape = [(launch.function, launch.warps, launch.types) for launch in launches]
    digest = hashlib.sha256(f"{text}\n{shape}".encode()).hexdigest()[:24]
    named = {function: f"dcompile_{entry}_{digest[:8]}" for function, entry in entries.items()}
    for function, entry in named.items():
        text = text.replace(f"def {function}(", f"def {entry}(")
    launched = tuple(replace(launch, function=named.get(launch.function, launch.function)) for launch in launches)
    return KernelSource(kernel_name(described, digest), text, arguments, cost, False, origin, launches=launched)


def function_text(name: str, arguments: Iterable[str], lines: list[str]) -> str:
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n" + "\n".join(lines or ["    pass"]) + "\n"


def fill(body: TritonText, store: Store) -> tuple[str, str, str]:
    """Return (buffer, name and text of the function that fills it with the identity of its reduction)."""
    dtype, size = body.table[store.buffer].dtype, body.extent(store.buffer)
    identity, name = literal(REDUCTIONS[store.mode].identity(dtype), dtype), f"fill_{body.argument(store.buffer)}"
    wide = "tl.program_id(0).to(tl.int64)" if may_exceed(size, 2**31 - 1) else "tl.program_id(0)"
    lines = [
        f"    x = {wide} * {FILL} + tl.arange(0, {FILL})",
        f"    tl.store(a + x, {identity}, x < {body.size(size)})",
    ]
    return store.buffer, name, function_text(name, ["a", *body.symbols.values()], lines)


def types_of(buffers: Iterable[str], count: int, table: Mapping[str, Buffer]) -> tuple[str, ...]:
    """Return the types of `count` arguments: buffers, followed by 64-bit integers."""
    offsets = [(POINTERS[table[name].dtype], exact_quotient(table[name].offset, 16)) for name in buffers]
    types = [pointer + ("" if whole is None else ALIGNED) for pointer, whole in offsets]
    return (*types, *[INTEGER] * (count - len(types)))
