"""The targets, whether a graph may have kernels, and which target writes the kernel of each loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from dcompile.codegen.emit.cpp import kernel as cpp_kernel
from dcompile.codegen.emit.target import EmitRequest, Kernels, KernelSource, Target
from dcompile.codegen.emit.triton import target as triton_target
from dcompile.codegen.emit.triton.horizontal_fusion import early_inputs
from dcompile.device_traits import is_on_host, loop_traits, traits_of
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


def emit_loops(kernels: Kernels, program: Program, request: EmitRequest) -> Kernels:
    """Emit the kernel of each loop, for the device whose memory it writes.

    Those of inference on a GPU may start while the kernel before them ends, and then wait for it.
    """
    table = program.table
    if is_on_host(program.buffers):
        return replace(kernels, calls=cpp_kernel.emit_all(program, request))
    waits = early_inputs(kernels, program, request.kind) is not None
    request = replace(request, constant=frozenset() if waits else None)
    loops = (step for step in program.steps if isinstance(step, Loop))
    return replace(kernels, calls=tuple(emit_loop(loop, table, request) for loop in loops))


def emit_loop(loop: Loop, table: Mapping[str, Buffer], request: EmitRequest = NO_REQUEST) -> KernelSource:
    """Emit one loop's kernel by the target of the device whose memory it writes."""
    return TARGETS[loop_traits(loop, table).name].emit(loop, table, request)
