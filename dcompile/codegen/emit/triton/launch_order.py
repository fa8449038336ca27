"""Decide which kernels let their successor start before they have waited for their predecessor.

Kernels that decode a token take 2 to 30 us. One that reads weights can hold 33 MB of them in registers when its turn
comes, if it has started early enough: beside a norm and the all-reduce before it, not beside the norm alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dcompile.codegen.emit.target import KernelSource
from dcompile.codegen.emit.triton.horizontal_fusion import first_launch
from dcompile.codegen.emit.triton.library import START_NEXT_FIRST, WAIT_FIRST

MARK = "_n"
"""End of the name of a kernel that lets the next one start first."""


def start_next_first(calls: Sequence[KernelSource]) -> tuple[KernelSource, ...]:
    """Return the kernels of an inference program, where all but the first let their successors start at once.

    The first one waits before. So no kernel behind it runs beside the previous program, which may write this one's
    inputs.
    """
    first = first_launch(calls)
    return tuple(kernel if number <= first else _started(kernel) for number, kernel in enumerate(calls))


def _started(kernel: KernelSource) -> KernelSource:
    if WAIT_FIRST not in kernel.text:
        return kernel
    return replace(kernel, name=kernel.name + MARK, text=kernel.text.replace(WAIT_FIRST, START_NEXT_FIRST))
