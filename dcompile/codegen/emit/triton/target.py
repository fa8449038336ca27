"""Triton as a target: kernels of loops, and of loops that a matrix product ends in."""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.codegen.emit.target import EmitRequest, KernelSource, Target
from dcompile.codegen.emit.triton import kernel, matmul_epilogue
from dcompile.codegen.emit.triton.ops import SPELLING
from dcompile.device_traits import CUDA
from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Loop


def emit(loop: Loop, table: Mapping[str, Buffer], request: EmitRequest) -> KernelSource:
    """The kernel of a loop."""
    if loop.product is not None:
        return matmul_epilogue.emit(loop, table)
    return kernel.emit(loop, table, request.constant)


TARGET = Target("triton", SPELLING, CUDA, emit)
