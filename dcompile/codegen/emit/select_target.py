"""Select the target that writes each kernel of a program."""

from __future__ import annotations

from collections.abc import Sequence

from dcompile.codegen.emit.cpp import kernel as cpp_kernel
from dcompile.codegen.emit.cpp.plan import NestDecision
from dcompile.codegen.emit.target import Kernels, KernelSource
from dcompile.codegen.emit.triton import kernel, matmul_epilogue, segment_sum
from dcompile.codegen.emit.triton.horizontal_fusion import constants, first_launch, fuse_launches
from dcompile.codegen.nest.device_traits import on_gpu
from dcompile.ir.nodes import Buffer, Loop, Program


def emit_all(program: Program, kind: str, decisions: Sequence[NestDecision], *, own_products: bool) -> Kernels:
    """Emit the kernel of each loop for the device whose memory it writes; on CPUs also matmuls, if `own_products`.

    `decisions`: the rows of `NEST_PASSES`, which plan C++ kernels.
    """
    table = program.table
    loops = [step for step in program.steps if isinstance(step, Loop)]
    if not any(buffer.device != "cpu" for buffer in program.buffers):
        return cpp_kernel.emit_all(program, decisions, training=kind == "forward", own_products=own_products)
    constant = constants(program) if kind == "inference" else None  # training kernels run longer than their launch
    nothing = None if constant is None else frozenset[str]()
    single = [_kernel(loop, table, nothing, decisions) for loop in loops]
    calls = fuse_launches(program, single)
    if constant:
        first = first_launch(calls)
        for number in range(first + 1, len(loops)):
            if on_gpu(loops[number], table) and constant & loops[number].reads:
                single[number] = _kernel(loops[number], table, constant, decisions)
        early = fuse_launches(program, single)
        calls = early if first_launch(early) == first else calls
    return Kernels(calls, segment_sum.products(program))


def _kernel(
    loop: Loop, table: dict[str, Buffer], constant: frozenset[str] | None, decisions: Sequence[NestDecision]
) -> KernelSource:
    if loop.product is not None:
        return matmul_epilogue.emit(loop, table)
    return kernel.emit(loop, table, constant) if on_gpu(loop, table) else cpp_kernel.emit(loop, table, decisions)
