"""Memory that outlives a call: the arena of temporaries, and memory of results that nobody refers to any more."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dcompile.compat.storage_holders import KeptTensor
from dcompile.compat.tensors import storage_at
from dcompile.ir.index import element_span
from dcompile.runtime.program.fast_aten import empty_cpu

ALIGNMENT = 64
RECYCLE_BYTES = 1 << 18
"""Bytes below which results of varying size are allocated anew: cheap allocations are not worth keeping."""


class Arena:
    """One aligned block for the temporaries of one call at a time. Offsets into it were planned at compile time."""

    def __init__(self, nbytes: int, device: str | torch.device = "cpu") -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if self._memory.data_ptr() % ALIGNMENT:  # torch's own allocators align to 64 bytes and more, a user's may not
            self._memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        self._start = -self._memory.data_ptr() % ALIGNMENT
        self.address = self._memory.data_ptr() + self._start
        self._stream: torch.cuda.Stream | None = None
        self._follows = True

    def borrowed(self) -> Arena:
        """Arena at the same address that does not own the memory, and waits for no stream: for replays, in order."""
        arena, storage = copy.copy(self), self._memory.untyped_storage()
        arena._follows = False
        if not storage.nbytes():
            return arena
        outside = storage_at(storage.data_ptr(), storage.nbytes(), self._memory.device)
        arena._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device).set_(outside)
        return arena

    def follow(self, raw_stream: int, device: int) -> None:
        """Note that the next call works on this stream, the device's current one.

        It waits for work of the last call's stream. The allocator keeps freed memory until both streams are done with
        it.
        """
        if not self._follows or (self._stream is not None and self._stream.cuda_stream == raw_stream):
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._memory.record_stream(stream)
        self._stream = stream

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        """Tensor over the arena from byte `offset` on."""
        return over(self._memory, dtype, shape, strides, self._start + offset)


class ReusedResultMemory:
    """Allocator of one result of a program: it returns the last call's memory if nothing refers to it any more.

    Large allocations come from the kernel page by page. The first touch of a page costs more than computing its
    content. A storage is reused only if it has no other holder: no tensor, no autograd node, no NumPy array.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._dtype, self._shape, self._strides = dtype, shape, strides
        self._holder: KeptTensor | None = None

    def __call__(self) -> torch.Tensor:
        if torch.is_inference_mode_enabled():  # results there are inference tensors, unusable elsewhere
            return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device="cpu")
        holder, self._holder = self._holder, None  # taken first, so that another thread finds nothing, and allocates
        if holder is None or not holder.alone():
            holder = KeptTensor(torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device="cpu"))
        self._holder = holder
        return holder.tensor.data  # a new tensor: not a view, with its own version counter


class RecycledResultMemory:
    """Allocator like `ReusedResultMemory` for a result whose size varies: memory is reused while it is large enough.

    All sizes share one block of memory, so that many lengths do not hold as many results.
    """

    def __init__(self) -> None:
        self._holder: KeptTensor | None = None

    def of(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        """Allocator for one size."""
        wanted = element_span(shape, strides) * dtype.itemsize
        if wanted < RECYCLE_BYTES:
            return functools.partial(empty_cpu, shape, strides, dtype)
        return functools.partial(self._of, wanted, dtype, shape, strides)

    def _of(self, wanted: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        holder, self._holder = self._holder, None
        fits = holder is not None and wanted <= holder.tensor.nbytes <= 2 * wanted
        if holder is None or not fits or not holder.alone():
            holder = KeptTensor(torch.empty(wanted, dtype=torch.uint8, device="cpu"))
        self._holder = holder
        return over(holder.tensor, dtype, shape, strides, 0)


def over(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start: int
) -> torch.Tensor:
    """New tensor (not a view, with its own version counter) over another one's storage, from byte `start` on."""
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    assert start % empty.itemsize == 0, f"{dtype} at byte {start} is not aligned"
    return empty.set_(memory.untyped_storage(), start // empty.itemsize, shape, strides)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate the same shape and strides, with their gaps, where `torch.empty_like` would close them."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def like_storage(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """Copy a tensor with its whole storage, so that its first element is aligned.

    The copy's storage begins as many bytes before that element as the original's, so that offsets stay valid.
    """
    storage = tensor.untyped_storage()
    own = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    room = torch.empty(own.nbytes + 2 * alignment, dtype=torch.uint8, device=tensor.device)
    skipped = -(room.data_ptr() + tensor.storage_offset() * tensor.itemsize) % alignment
    part = room.untyped_storage()[skipped : skipped + own.nbytes]  # shares memory, and keeps it alive
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(part).copy_(own)
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(part, tensor.storage_offset(), tensor.shape, tensor.stride())


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors with equal strides.

    Expanded dimensions (stride 0) hold one element, which is copied once.
    """
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source, non_blocking=True)


def like_span(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides, and with the memory between its elements."""
    copy, extent = like(tensor), element_span(tensor.shape, tensor.stride())
    copy.as_strided((extent,), (1,)).copy_(tensor.as_strided((extent,), (1,)))
    return copy


def seen_in(moved: Mapping[int, tuple[torch.Tensor, int]], result: Any) -> Any:
    """Return a result; a view of a copied argument becomes the same view of the argument.

    `moved`: address of a copy's storage -> the copied argument, and the offset at which the copy begins in that
    storage.
    """
    given, start = moved.get(result.untyped_storage().data_ptr() if isinstance(result, torch.Tensor) else 0, (None, 0))
    if given is None or given.dtype != result.dtype:
        return result
    if result.storage_offset() == start and result.shape == given.shape and result.stride() == given.stride():
        return given
    return given.as_strided(result.shape, result.stride(), given.storage_offset() + result.storage_offset() - start)
