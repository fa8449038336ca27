"""The streams that gathers copy on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class CopyStreams:
    """The two streams that gathers of one process group copy on: from other ranks, and this rank's own part.

    Copies inside a GPU's memory are kernels of the driver's: they have to wait for a place beside products.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[Any, ...] = ()
        if device.type == "cuda":
            self._streams = tuple(torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]

    @property
    def far(self) -> int:
        """Of copies from other ranks, as the driver knows it."""
        return self._streams[0].cuda_stream if self._streams else 0

    @property
    def near(self) -> int:
        """Of copies of this rank's own."""
        return self._streams[1].cuda_stream if self._streams else 0

    def on_far(self) -> contextlib.AbstractContextManager[Any]:
        """What is started meanwhile, or waited for, concerns copies from other ranks."""
        return torch.cuda.stream(self._streams[0]) if self._streams else contextlib.nullcontext()

    def on_near(self) -> contextlib.AbstractContextManager[Any]:
        """What is started meanwhile comes behind copies of this rank's own."""
        return torch.cuda.stream(self._streams[1]) if self._streams else contextlib.nullcontext()

    def far_behind_near(self) -> None:
        """Copies from other ranks that start from now on come behind those of this rank's own so far."""
        if self._streams:
            self._streams[0].wait_event(_event(self._streams[1]))

    def fork(self) -> None:
        """Copies that start from now on come behind what the current stream has to do so far."""
        if self._streams:
            here = _event()
            for stream in self._streams:
                stream.wait_event(here)

    def events(self) -> list[Any]:
        """What to wait for, for all copies so far."""
        return [_event(stream) for stream in self._streams]


def _event(stream: Any = None) -> Any:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
    event.record(stream)
    return event
