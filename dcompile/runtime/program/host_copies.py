"""Offloaded values: host memory that is reused from call to call, and copies to and from it beside computation.

All copies of a device run on one stream, in their order. So a later offload may fill memory that an earlier load still
reads. On a CPU, a copy is done when it has started.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.compat.hooks import saved_hooks_run
from dcompile.compat.storage_holders import KeptTensor
from dcompile.errors import DcompileError
from dcompile.ir.collective_kinds import HostCopyKind

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""dtype, shape and strides."""
IN_GRAPH = (
    "dcompile: a model that offloads activations to host memory cannot be captured in a CUDA graph of the caller's; "
    "capture it without offloading"
)


class HostMemory:
    """Host memory of one model's offloaded values, pinned for a GPU: pinning memory takes longer than most copies.

    Memory is reused when nothing refers to it any more: no saved tensor, no retained graph, no hook. It is
    kept until the model's workspaces are released.
    """

    def __init__(self) -> None:
        self._kept: defaultdict[tuple[Layout, bool], deque[KeptTensor]] = defaultdict(deque)
        self._streams: dict[int, torch.cuda.Stream] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that it has allocated."""
        return sum(holder.tensor.nbytes for kept in self._kept.values() for holder in kept)

    def allocator(self, layout: Layout, device: int) -> Callable[[], torch.Tensor]:
        """Allocator of one offloaded value. `device`: number of its GPU; -1 for a CPU."""
        return functools.partial(self._take, layout, device >= 0)

    def _take(self, layout: Layout, pinned: bool) -> torch.Tensor:
        kept, (dtype, shape, strides) = self._kept[layout, pinned], layout
        for _ in range(len(kept)):
            try:
                holder = kept.popleft()  # taken first, so that no other thread finds it
            except IndexError:
                break
            found = holder.tensor.data if holder.alone() else None
            kept.append(holder)
            if found is not None:
                return found
        holder = KeptTensor(torch.empty_strided(shape, strides, dtype=dtype, device="cpu", pin_memory=pinned))
        found = holder.tensor.data  # a new tensor: not a view, with its own version counter
        kept.append(holder)
        return found

    def stream(self, device: int) -> torch.cuda.Stream:
        """The stream on which a GPU's copies run."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        return self._streams[device]


class CopyInFlight:
    """A copy that was started, with the methods of a torch.distributed.Work. `done`: its event; None on a CPU."""

    def __init__(self, done: Any) -> None:
        self._done = done

    def wait(self) -> None:
        """Make the current stream wait for it."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def synchronize(self) -> None:
        """Make the host wait for it."""
        if self._done is not None:
            self._done.synchronize()

    def is_completed(self) -> bool:
        """Whether it is done."""
        return self._done is None or bool(self._done.query())

    def get_future(self) -> None:
        """Raise RuntimeError: it has no future."""
        raise RuntimeError("a copy has no future")


class HostCopy:
    """One copy of one prepared call: `self([source], [target], HOST_LINK)` starts it, `wait()` waits for it."""

    def __init__(self, kind: HostCopyKind, memory: HostMemory, device: int) -> None:
        self.kind, self._memory, self._device = kind, memory, device
        self.nbytes = 0
        """Bytes of the last start."""
        self.work = CopyInFlight(None)

    def __call__(self, sent: Sequence[torch.Tensor], filled: Sequence[torch.Tensor], link: str) -> None:
        """Start it: what the current stream has computed so far is copied, and freed memory is overwritten."""
        del link  # for those who read the text of the program
        (source,), (target,) = sent, filled
        self.nbytes = source.nbytes
        if self._device < 0:
            target.copy_(source)
            return
        if torch.cuda.is_current_stream_capturing():
            raise DcompileError(IN_GRAPH)
        stream = self._memory.stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            done.record()
        self.work = CopyInFlight(done)

    def wait(self) -> None:
        """Wait for the copy that was started last.

        Hooks for saved tensors may read the copy on the host, so that then waits, too.
        """
        self.work.wait()
        if self.kind == "offload" and saved_hooks_run():
            self.work.synchronize()
