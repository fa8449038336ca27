"""The kernels of a program, with all rows of `LAUNCH_PASSES` or some of them left out."""

from __future__ import annotations

from dcompile.codegen.emit.target import Kernels, KernelSource
from dcompile.codegen.emit.triton import kernel
from dcompile.collectives.contract import Request
from dcompile.compiler.driver import Pipeline
from dcompile.config import Config
from dcompile.ir.nodes import Loop, Program


def kernels_of(program: Program, kind: str = "inference", **options: str) -> Kernels:
    """The kernels that a graph of this kind gets."""
    return Pipeline(Config.make(options={"matmul": "aten", **options})).emit(program, Request(kind, kind))


def of_loops(program: Program, constant: frozenset[str] | None = None) -> Kernels:
    """The Triton kernel of each loop, before any of them are changed together."""
    loops = (step for step in program.steps if isinstance(step, Loop))
    return Kernels(tuple(kernel.emit(loop, program.table, constant) for loop in loops))


def sources_of(kernels: Kernels) -> list[KernelSource]:
    """The kernels in place of library calls."""
    return [product.kernel for product in kernels.products.values()]
