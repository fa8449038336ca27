"""What a GPU has not got through yet: streams wait for collectives there, while the host runs on.

A collective that will never end therefore shows nowhere on the host, until that waits for the GPU, and then for ever. A
mark behind each collective lets another thread see which one the GPU is stuck in.
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
"""Marks that are kept before those behind which the GPU has come are looked for."""
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of the CUDA driver's API."""


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Behind a collective: its number in the group, and its label."""

    number: int
    label: str
    event: Any
    device: int


class ProgressEvents:
    """The marks of one process group, in the order in which the GPU comes to them."""

    def __init__(self) -> None:
        self._marks: deque[ProgressEvent] = deque()
        self._spare: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def put(self, number: int, label: str) -> None:
        """The current stream waits for this collective now; what comes behind it waits, too."""
        device = torch.cuda.current_device()
        with self._lock:
            spare = self._spare.setdefault(device, [])
            event: Any = spare.pop() if spare else torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record()
            self._marks.append(ProgressEvent(number, label, event, device))
            if len(self._marks) > SWEEP_COUNT:
                self._sweep()

    def oldest(self) -> ProgressEvent | None:
        """The first collective that the GPU is not through with."""
        with self._lock:
            self._sweep()
            return self._marks[0] if self._marks else None

    def _sweep(self) -> None:
        while self._marks and self._marks[0].event.query():
            mark = self._marks.popleft()
            self._spare[mark.device].append(mark.event)


def stay_out_of_captures() -> None:
    """Let this thread look at events while another one captures a CUDA graph: without, its capture would fail."""
    if not torch.cuda.is_available():
        return
    with contextlib.suppress(OSError, AttributeError):
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
