"""Watchdog: a thread that notices GPU collectives that will never end, and unblocks the host.

With Gloo the host waits for a collective and can check its peers meanwhile (`communication.work`). With NCCL a stream
waits. The host blocks only where it reads a result back, in a CUDA call that nothing interrupts. A CUDA event after
each collective lets another thread see the first one that is not complete.

So the coordinator's thread checks whether the GPU is stuck while a rank is gone, or is silent beyond the group's limit.
If it is, or if the job was called off, communicators are aborted. The GPU then goes on with wrong values. The thread
that calls the model must not use them, so an exception is raised in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from dcompile import compat
from dcompile.compat.tensors import raw_stream
from dcompile.errors import PlanMismatchError
from dcompile.logs import flush_streams, report
from dcompile.runtime.coordination.peer_status import PeerView
from dcompile.runtime.coordination.wait_policy import PeerWait

STUCK_S = 0.8
"""Seconds that a collective may be incomplete on the GPU before peers are checked."""
GRACE_S = 2.0
"""Seconds for the host to notice the end by itself, where it starts a collective or calls the model."""
LAST_S = 10.0
"""Seconds for the host to leave its wait after the abort; then the process ends."""
SWEEP_COUNT = 64
"""Number of events above which those that have completed are removed."""
_THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of the CUDA driver's API."""


class Watchdog:
    """Watchdog of the collectives on one rank's GPU. `heartbeat.PeerCoordinator` calls `reason` once a second."""

    def __init__(self, peers: PeerView) -> None:
        self._peers = peers
        self._number = 0
        self._since = 0.0
        self._others: Any = None

    def reason(self) -> str:
        """Why the job cannot go on; empty while it can."""
        stuck = self._peers.stuck_in()
        now = time.monotonic()
        number = stuck[0] if stuck else 0
        if stuck is None or number != self._number:
            self._number, self._since, self._others = number, now, None
            return ""
        if now - self._since < STUCK_S:
            return ""
        return self._look_around(*stuck)

    def _look_around(self, number: int, label: str) -> str:
        others = self._others = self._others or PeerWait(self._peers, inf)
        rank = self._peers.rank
        if why := self._peers.failure():
            return f"dcompile: rank {rank} was waiting for the {label}, number {number} of this group; {why}"
        for other, status in others.poll().items():
            if status is not None and status.ended and status.started < number:
                return (
                    f"dcompile: rank {other} has ended after {status.started} collectives, but rank {rank} has started "
                    f"the {label}, number {number} of this group: every rank must run the same steps"
                )
            silent = others.gone(other) or others.silent_s(other) > self._peers.limit_s()
            if status is not None and not status.ended and silent:
                return (
                    f"dcompile: rank {rank} was waiting for the {label}, number {number} of this group; "
                    f"{others.describe([other])}"
                )
        return ""


class CommunicatorAbort:
    """Abort a group's communicators on this rank's GPU after the job was called off, and wake up the host."""

    def __init__(self, peers: PeerView, group: Any) -> None:
        self._peers, self._group = peers, group
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="dcompile abort", daemon=True).start()

    @property
    def under_way(self) -> bool:
        """Whether communicators are still being aborted."""
        return not self._ended.is_set()

    def _run(self) -> None:
        peers = self._peers
        peers.told.wait(GRACE_S)
        in_use = peers.stuck_in() is not None
        if in_use and not peers.told.is_set():
            # first, because torch may end the process during the abort
            report(logging.ERROR, peers.aborted.removeprefix("dcompile: "))
            _raise_in(peers.caller, peers)
        threading.Thread(target=self._abort, name="dcompile communicators", daemon=True).start()
        compat.groups.let_go()  # communicators end only after CUDA graphs that contain their collectives
        if in_use and not peers.told.wait(LAST_S):
            flush_streams()
            os._exit(1)

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # torch's: the abort took too long
            compat.groups.abort(self._group)
        self._ended.set()


def _raise_in(thread: int | None, peers: PeerView) -> None:
    """Raise the reason of the job's end in another thread, as soon as that thread runs Python again."""
    if thread is None:
        return

    class CalledOff(PlanMismatchError):
        """PlanMismatchError without arguments, as Python instantiates the exception itself in another thread."""

        def __init__(self) -> None:
            super().__init__(peers.aborted)
            peers.told.set()

    CalledOff.__name__ = CalledOff.__qualname__ = PlanMismatchError.__name__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(CalledOff))


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
        self._streams: dict[tuple[int, int], Any] = {}
        """Streams by device and handle: torch takes 50 us to make the current one, in a program that has few calls."""
        self._lock = threading.Lock()

    def put(self, number: int, label: str) -> None:
        """Record an event on the current stream, which now waits for this collective."""
        device = torch.cuda.current_device()
        with self._lock:
            spare = self._spare.setdefault(device, [])
            event: Any = spare.pop() if spare else torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            event.record(self._current_stream(device))
            self._marks.append(ProgressEvent(number, label, event, device))
            if len(self._marks) > SWEEP_COUNT:
                self._sweep()

    def _current_stream(self, device: int) -> Any:
        key = device, raw_stream(device)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(device)
        return self._streams[key]

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
