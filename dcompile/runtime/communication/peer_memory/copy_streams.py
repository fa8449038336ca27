"""CUDA streams for copy gathers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class CopyStreams:
    """Two streams for the copies of one process group's gathers: from other ranks, and of this rank's own part.

    Copies inside a GPU's memory are kernels of the driver, which have to wait for free multiprocessors beside GEMMs.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[Any, ...] = ()
        if device.type == "cuda":
            self._streams = tuple(torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]

    @property
    def peer_copies(self) -> int:
        """Driver handle of the stream for copies from other ranks."""
        return self._streams[0].cuda_stream if self._streams else 0

    @property
    def own_copies(self) -> int:
        """Driver handle of the stream for copies of this rank's own part."""
        return self._streams[1].cuda_stream if self._streams else 0

    def on_peer_copies(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the stream for copies from other ranks is current."""
        return torch.cuda.stream(self._streams[0]) if self._streams else contextlib.nullcontext()

    def on_own_copies(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which the stream for copies of this rank's own part is current."""
        return torch.cuda.stream(self._streams[1]) if self._streams else contextlib.nullcontext()

    def order_peer_behind_own(self) -> None:
        """Order later copies from other ranks after the current work of the stream for this rank's own part."""
        if self._streams:
            self._streams[0].wait_event(_event(self._streams[1]))

    def fork(self) -> None:
        """Order later copies after the current work of the current stream."""
        if self._streams:
            here = _event()
            for stream in self._streams:
                stream.wait_event(here)

    def events(self) -> list[Any]:
        """Events that complete after all copies so far."""
        return [_event(stream) for stream in self._streams]


def _event(stream: Any = None) -> Any:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
    event.record(stream)
    return event
