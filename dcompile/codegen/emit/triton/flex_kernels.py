"""The kernels of a program's calls of FlexAttention: forward and backward, with tiles for the GPU."""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.codegen.emit.target import KernelSource, LibraryReplacement
from dcompile.codegen.emit.triton import flex_attention, flex_backward
from dcompile.codegen.emit.triton.flex_tiles import tiles_of
from dcompile.ir.attention import FLEX, FLEX_BACKWARD, flex_arguments
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Extern, Program


def products(program: Program, arch: int | None = None) -> dict[int, LibraryReplacement]:
    """Return the kernels of the calls by position among the steps. `arch`: compute capability, if it is known."""
    calls = ((n, step) for n, step in enumerate(program.steps) if isinstance(step, Extern))
    found = {n: step for n, step in calls if step.op in (FLEX, FLEX_BACKWARD)}
    return {n: LibraryReplacement(source(step, program.table, arch)) for n, step in found.items()}


def source(step: Extern, table: Mapping[str, Buffer], arch: int | None = None) -> KernelSource:
    """Return the kernels of one call."""
    call = flex_arguments(step)
    forward, queries, keys = tiles_of(max(int(call.query.shape[3]), int(call.value.shape[3])), arch)  # type: ignore[arg-type]
    if step.op == FLEX:
        return flex_attention.emit(step, call, table, forward)
    return flex_backward.emit(step, call, table, queries, keys)
