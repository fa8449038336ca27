"""Memory as bad as it may be: what a program's own memory holds before a call, no result may depend on.

`pytest --poison` runs any test so. Bytes of 255 are NaN as floating-point numbers, -1 as integers: what reads memory
before it is written, adds to what was not set to zero, or overwrites what is still needed shows each time then, and not
only where the memory happened to hold something else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

BYTE = 255


@contextlib.contextmanager
def poisoned(byte: int = BYTE) -> Iterator[None]:
    """Fill arenas before each call, and all memory of results as it is given out; for programs made in here."""
    from dcompile.runtime.program import fast_aten
    from dcompile.runtime.program.arena import RecycledResultMemory, ReusedResultMemory
    from dcompile.runtime.program.workspace import Workspace

    prepare = Workspace.call

    def call(self: Workspace, program: Any, sizes: tuple[int, ...]) -> Any:
        found = prepare(self, program, sizes)
        if self.arena is not None:
            self.arena._memory.fill_(byte)
        return found

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Workspace, "call", call))
        for owner, name in (
            (ReusedResultMemory, "__call__"),
            (RecycledResultMemory, "__call__"),
            (fast_aten, "empty_cpu"),
            (fast_aten, "empty_cuda"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _filled(getattr(owner, name), byte)))
        yield


def _filled(make: Callable[..., torch.Tensor], byte: int) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any) -> torch.Tensor:
        tensor = make(*args)
        if tensor.numel():
            fill(tensor, byte)
        return tensor

    return made


def fill(tensor: torch.Tensor, byte: int) -> None:
    """Write this byte to all of a tensor's memory, gaps between its elements included."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.itemsize
    whole.set_(tensor.untyped_storage(), start, (extent * tensor.itemsize,), (1,)).fill_(byte)
