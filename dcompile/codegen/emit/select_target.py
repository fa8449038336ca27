"""The targets, whether a graph may have kernels, and which target writes each kernel of a program."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from dcompile.codegen.emit.cpp import kernel as cpp_kernel
from dcompile.codegen.emit.cpp.plan import NestDecision
from dcompile.codegen.emit.target import EmitRequest, Kernels, KernelSource, Target
from dcompile.codegen.emit.triton import flex_attention, one_shot_all_reduce, segment_sum
from dcompile.codegen.emit.triton import target as triton_target
from dcompile.codegen.emit.triton.horizontal_fusion import (
    constants,
    first_launch,
    fuse_launches,
    start_all_reduces_early,
    start_next_first,
)
from dcompile.codegen.schedule.fusion.all_reduce_epilogue import all_reduce_epilogues
from dcompile.device_traits import loop_traits, main_device, traits_of
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Loop, Program
from dcompile.toolchain import triton_version

TARGETS: Mapping[str, Target] = {target.traits.name: target for target in (cpp_kernel.TARGET, triton_target.TARGET)}
"""Targets by device type."""
NO_REQUEST = EmitRequest()


def why_no_kernels(devices: Collection[torch.device]) -> str | None:
    """Return why a graph on these devices cannot have dcompile's kernels; None if it can."""
    others = {device for device in devices if not traits_of(device.type).is_host}
    if not others:
        return None
    if len(others) > 1 or next(iter(others)).type not in TARGETS:
        return f"it is on {', '.join(sorted(map(str, others)))}; kernels are made for one CUDA GPU"
    if torch.version.hip is not None or torch.cuda.get_device_capability(next(iter(others))) < (8, 0):
        return "its GPU is none of NVIDIA's from compute capability 8.0 on"
    if triton_version() is None:
        return "it is on a GPU, and Triton, which compiles kernels for it, is not installed"
    return None


def architecture(devices: Collection[torch.device]) -> int | None:
    """Return the compute capability of the devices' GPU, as 90 for 9.0; None if there is no GPU."""
    gpu = next((device for device in devices if not traits_of(device.type).is_host), None)
    if gpu is None or why_no_kernels(devices) is not None:
        return None
    major, minor = torch.cuda.get_device_capability(gpu)
    return 10 * major + minor


def emit_all(
    program: Program,
    kind: str,
    decisions: Sequence[NestDecision],
    *,
    own_products: bool,
    one_shot: bool = True,
    arch: int | None = None,
) -> Kernels:
    """Emit the kernel of each loop for the device whose memory it writes; on CPUs also matmuls, if `own_products`.

    `decisions`: the rows of `NEST_PASSES`, which plan C++ kernels. `one_shot`: small all-reduces get a kernel, too.
    `arch`: compute capability of the GPU, if it is known.
    """
    table = program.table
    loops = [step for step in program.steps if isinstance(step, Loop)]
    if traits_of(main_device(buffer.device for buffer in program.buffers)).is_host:
        return cpp_kernel.emit_all(program, decisions, training=kind == "forward", own_products=own_products)
    sums = one_shot_all_reduce.small_sums(program) if one_shot else {}
    # training kernels run longer than their launch
    constant = constants(program, sums.keys()) if kind == "inference" else None
    nothing = None if constant is None else frozenset[str]()
    single = [emit_loop(loop, table, EmitRequest(decisions, nothing)) for loop in loops]
    epilogues = all_reduce_epilogues(program, sums.keys())
    apart = {found.number for found in epilogues.values()}
    calls = fuse_launches(program, single, apart)
    first = first_launch(calls)
    if constant:
        for number in range(first + 1, len(loops)):
            if loop_traits(loops[number], table).many_threads and constant & loops[number].reads:
                single[number] = emit_loop(loops[number], table, EmitRequest(decisions, constant))
        early = fuse_launches(program, single, apart)
        calls = early if first_launch(early) == first else calls
    fused = {
        bucket: kernel
        for bucket, found in epilogues.items()
        if (kernel := one_shot_all_reduce.emit(found, table, _early(constant, first, found.number)))
    }
    all_reduces = fused | one_shot_all_reduce.sources(sums, fused.keys())
    if constant is not None:
        calls = start_next_first(calls)
        all_reduces = start_all_reduces_early(program, all_reduces, first)
    return Kernels(calls, segment_sum.products(program) | flex_attention.products(program, arch), all_reduces)


def _early(constant: frozenset[str] | None, first: int, number: int) -> frozenset[str]:
    """Return the inputs that a loop's kernel may read before its turn; none in the first kernel of a program."""
    return constant if constant is not None and number > first else frozenset()


def emit_loop(loop: Loop, table: Mapping[str, Buffer], request: EmitRequest = NO_REQUEST) -> KernelSource:
    """Emit one loop's kernel by the target of the device whose memory it writes."""
    return TARGETS[loop_traits(loop, table).name].emit(loop, table, request)
