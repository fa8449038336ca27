"""Decide which kernels let their successor start before they have waited for their predecessor.

Kernels that decode a token take 2 to 30 us. One that reads weights can hold 33 MB of them in registers when its turn
comes, if it has started early enough: beside a norm and the all-reduce before it, not beside the norm alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcompile.codegen.emit.target import AllReduceKernel, KernelSource
from dcompile.codegen.emit.triton.horizontal_fusion import first_launch
from dcompile.codegen.emit.triton.library import START_NEXT_FIRST, WAIT_FIRST
from dcompile.ir.nodes import Collective, Loop, Program

MARK = "_n"
"""End of the name of a kernel that lets the next one start first."""


def start_next_first(calls: Sequence[KernelSource]) -> tuple[KernelSource, ...]:
    """Return the kernels of an inference program, where all but the first let their successors start at once.

    The first one waits before. So no kernel behind it runs beside the previous program, which may write this one's
    inputs.
    """
    first = first_launch(calls)
    return tuple(kernel if number <= first else _started(kernel) for number, kernel in enumerate(calls))


def start_all_reduces_early(
    program: Program, kernels: Mapping[str, AllReduceKernel], first: int
) -> dict[str, AllReduceKernel]:
    """Return kernels of all-reduces, by bucket, where those behind the first kernel let their successors start at once.

    `first`: position of the first kernel among the program's loops. A rank that waits for its peers' words in such a
    kernel fills its registers with weights of the next matmul meanwhile.
    """
    started, loops = dict(kernels), 0
    for step in program.steps:
        loops += isinstance(step, Loop)
        if isinstance(step, Collective) and step.bucket in started and loops > first:
            kernel = started[step.bucket]
            started[step.bucket] = replace(kernel, source=_started(kernel.source))
    return started


def _started(kernel: KernelSource) -> KernelSource:
    if WAIT_FIRST not in kernel.text:
        return kernel
    return replace(kernel, name=kernel.name + MARK, text=kernel.text.replace(WAIT_FIRST, START_NEXT_FIRST))
