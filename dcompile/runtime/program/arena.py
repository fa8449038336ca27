"""Memory that outlives a call: the arena of temporaries, and results' memory once nobody refers to it any more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dcompile.compat.tensors import KeptTensor
from dcompile.runtime.program.fast_aten import empty_cpu

ALIGNMENT = 64
RECYCLE_BYTES = 1 << 18
"""Smaller results of varying size are allocated anew: what is cheap to get is not worth holding."""


class Arena:
    """One aligned block for the temporaries of one call at a time; offsets into it were planned at compile time."""

    def __init__(self, nbytes: int, device: str | torch.device = "cpu") -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if self._memory.data_ptr() % ALIGNMENT:  # torch's own allocators align to 64 bytes and more, a user's may not
            self._memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        self._start = -self._memory.data_ptr() % ALIGNMENT
        self.address = self._memory.data_ptr() + self._start
        self._stream: torch.cuda.Stream | None = None

    def follow(self, raw_stream: int, device: int) -> None:
        """The next call works on this stream, the device's current one: let it wait for what the last one's still does.

        The memory, once it is given back, is kept until both are done with it.
        """
        if self._stream is not None and self._stream.cuda_stream == raw_stream:
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._memory.record_stream(stream)
        self._stream = stream

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor over the arena from byte `offset` on."""
        return over(self._memory, dtype, shape, strides, self._start + offset)


class ReusedResultMemory:
    """Gives memory for one result of a program, call after call: the last call's, if nothing refers to it any more.

    Large allocations come from the kernel page by page, and the first touch of a page costs more than computing what is
    written to it. Only a storage with no other holder is given out again: no tensor, no autograd node, no NumPy array.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._dtype, self._shape, self._strides = dtype, shape, strides
        self._holder: KeptTensor | None = None

    def __call__(self) -> torch.Tensor:
        if torch.is_inference_mode_enabled():  # a result there is an inference tensor, which cannot serve elsewhere
            return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device="cpu")
        holder, self._holder = self._holder, None  # taken first: another thread then finds nothing, and allocates
        if holder is None or not holder.alone():
            holder = KeptTensor(torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device="cpu"))
        self._holder = holder
        return holder.tensor.data  # a tensor of its own: no view, with its own version counter


class RecycledResultMemory:
    """As `ReusedResultMemory`, for a result whose size varies: memory is reused while it is large enough.

    All sizes share one piece of memory, so that many lengths do not come to hold as many results.
    """

    def __init__(self) -> None:
        self._holder: KeptTensor | None = None

    def of(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        """An allocator of one size."""
        wanted = _extent(shape, strides) * dtype.itemsize
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


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def over(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start: int
) -> torch.Tensor:
    """A tensor of its own (no view, with its own version counter) over another one's storage, from byte `start`."""
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    assert start % empty.itemsize == 0, f"{dtype} at byte {start} is not aligned"
    return empty.set_(memory.untyped_storage(), start // empty.itemsize, shape, strides)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for the same shape and strides, gaps and all, where `torch.empty_like` would close them."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def like_storage(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """A copy of a tensor and of all that its storage holds beside it, in which its first element is aligned.

    Its storage begins as many bytes before that element as the tensor's own: an offset counts to the same element.
    """
    storage = tensor.untyped_storage()
    own = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    room = torch.empty(own.nbytes + 2 * alignment, dtype=torch.uint8, device=tensor.device)
    skipped = -(room.data_ptr() + tensor.storage_offset() * tensor.itemsize) % alignment
    part = room.untyped_storage()[skipped : skipped + own.nbytes]  # shares memory, and keeps it
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(part).copy_(own)
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(part, tensor.storage_offset(), tensor.shape, tensor.stride())


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, where both have the same strides; expanded dimensions (stride 0) hold one element and are copied once."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source, non_blocking=True)


def like_span(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with its strides, and of what lies between its elements."""
    copy, extent = like(tensor), _extent(tuple(tensor.shape), tensor.stride())
    copy.as_strided((extent,), (1,)).copy_(tensor.as_strided((extent,), (1,)))
    return copy


def seen_in(moved: Mapping[int, tuple[torch.Tensor, int]], result: Any) -> Any:
    """A result; what looks at a copy, as a look at what was copied.

    `moved`: the address of a copy's storage -> what it is of, and where in that storage the copy begins.
    """
    given, start = moved.get(result.untyped_storage().data_ptr() if isinstance(result, torch.Tensor) else 0, (None, 0))
    if given is None or given.dtype != result.dtype:
        return result
    if result.storage_offset() == start and result.shape == given.shape and result.stride() == given.stride():
        return given
    return given.as_strided(result.shape, result.stride(), given.storage_offset() + result.storage_offset() - start)
