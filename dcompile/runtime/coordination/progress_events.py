"""CUDA events that show which collective a GPU is stuck in.

Streams wait for collectives while the host runs on. A collective that never ends is invisible on the host until the
host waits for the GPU, and then that wait never ends. An event after each collective lets another thread see the first
one that is not complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

SWEEP_COUNT = 64
"""Number of events above which those that have completed are removed."""
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of the CUDA driver's API."""


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """CUDA event after a collective, with the collective's number in its group and its label."""

    number: int
    label: str
    event: Any
    device: int


class ProgressEvents:
    """Progress events of one process group, in the order in which the GPU reaches them."""

    def __init__(self) -> None:
        self._marks: deque[ProgressEvent] = deque()
        self._spare: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def put(self, number: int, label: str) -> None:
        """Record an event on the current stream, which now waits for this collective."""
        device = torch.cuda.current_device()
        with self._lock:
            spare = self._spare.setdefault(device, [])
            event: Any = spare.pop() if spare else torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record()
            self._marks.append(ProgressEvent(number, label, event, device))
            if len(self._marks) > SWEEP_COUNT:
                self._sweep()

    def oldest(self) -> ProgressEvent | None:
        """Event of the first collective that the GPU has not completed, or None."""
        with self._lock:
            self._sweep()
            return self._marks[0] if self._marks else None

    def _sweep(self) -> None:
        while self._marks and self._marks[0].event.query():
            mark = self._marks.popleft()
            self._spare[mark.device].append(mark.event)


def stay_out_of_captures() -> None:
    """Allow this thread to query events while another thread captures a CUDA graph.

    Otherwise that capture would fail.
    """
    if not torch.cuda.is_available():
        return
    with contextlib.suppress(OSError, AttributeError):
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
