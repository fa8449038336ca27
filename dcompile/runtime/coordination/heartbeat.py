"""Heartbeat, coordination and watchdog of the ranks of a process group, over its store.

A thread with its own connection publishes this rank's status once a second, and checks whether the job was called off.
So a waiting rank can distinguish a peer that compiles from one that is late, and no rank waits forever. The thread also
compares the order of started collectives with rank 0's. None of this uses a collective, so it works when collectives do
not. In a step, a rank only adds each collective to a checksum; it does not access the store.

The watchdog notices GPU collectives that will never end, and unblocks the host. With Gloo the host waits for a
collective and can check its peers meanwhile (`communication.work`). With NCCL a stream waits. The host blocks only
where it reads a result back, in a CUDA call that nothing interrupts. A CUDA event after each collective lets another
thread see the first one that is not complete.

So the coordinator's thread checks whether the GPU is stuck while a rank is gone, or is silent beyond the group's limit.
If it is, or if the job was called off, communicators are aborted. The GPU then goes on with wrong values. The thread
that calls the model must not use them, so an exception is raised in it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.compat.tensors import raw_stream
from dcompile.errors import DcompileError, PlanMismatchError
from dcompile.logs import flush_streams, report
from dcompile.runtime.coordination.wait_policy import BEAT_S, PeerStatus, PeerView, PeerWait, RankProcess

GOODBYE_S = 3.0
"""Seconds that a rank waits at its end to see that all others have ended, or know that the job was called off."""
GONE_S = 10.0
"""Seconds that a collective on a GPU may take once the store is gone."""
MAX_REMEMBERED_COLLECTIVES = 1024
"""Number of collectives whose checksum is kept, to compare with rank 0's."""

_LINES: weakref.WeakKeyDictionary[Any, PeerCoordinator] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_LINES.clear)  # a child is no rank, and its end is not its parent's
_GENERATIONS: Counter[str] = Counter()
"""Number of groups of a name so far in this process: a store outlives groups."""


class SingleProcess:
    """Coordinator of a process without peers."""

    rank, world = 0, 1

    def busy(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Report, while the context lasts, that this rank captures or compiles. Waiting peers then have patience."""
        return contextlib.nullcontext()

    def enter(self) -> None:
        """Note a call of the model on this thread. Raises if the job was called off, or the process group is gone."""


class PeerCoordinator(SingleProcess):
    """Coordinator of one process group. `peers_of` makes one for each group."""

    def __init__(self, group: Any) -> None:
        name = group.group_name
        _GENERATIONS[name] += 1
        # torchrun keeps one store over restarts, and a group may be recreated under the same name. Old keys must not be
        # taken for new ones.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"dcompile/{attempt}/{_GENERATIONS[name]}"
        store = compat.groups.group_store(group)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.store = compat.groups.own_store(store, prefix)
        self._side = compat.groups.own_store(store, prefix)
        self._group = weakref.ref(group)
        self._process = RankProcess.current()
        self.on_gpu = compat.groups.can_abort(group)
        """Whether a GPU's streams wait for its collectives, instead of the host."""
        self.aborted = ""
        """Why the job was called off; empty otherwise."""
        self._abort_lock = threading.Lock()
        self.reported = threading.Event()
        """Set once that error was raised in this process."""
        self.caller: int | None = None
        """Identifier of the thread that called the model last."""
        self.marks = ProgressEvents()
        """Progress events of collectives that a GPU waits for."""
        self.starting: tuple[int, str] | None = None
        """Number and label of a collective that is being started. A communicator's first one waits for the other ranks
        here.
        """
        self.inboxes: dict[str, Any] = {}
        """Device and words of a program -> inboxes of one-shot all-reduces, which all programs of the group share."""
        self.watches: list[Callable[[], Any]] = []
        """Weak references to what has something to tell other ranks in this object's thread: see `replicas`."""
        self.meetings = 0
        """Number of agreements that this rank has come to, counted alike on every rank."""
        self.started = 0
        """Number of collectives that this rank has started."""
        self.models = 0
        """Number of models that have started a collective over this group, counted alike on every rank."""
        self._checksum = 0
        self._history: OrderedDict[int, tuple[int, str]] = OrderedDict()
        self._claims: dict[int, tuple[int, str]] = {}
        """Number -> rank 0's checksum and label, for collectives that this rank has not started yet."""
        self._doing: list[str] = []
        self._beats = 0
        self._ended = False
        self._watchdog = Watchdog(self)
        self._abortion: CommunicatorAbort | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dcompile-peers", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Report, while the context lasts, that this rank captures or compiles. Waiting peers then have patience."""
        self._doing.append(what)
        self._wake.set()
        try:
            yield
        finally:
            self._doing.remove(what)
            self._wake.set()

    def count(self, label: str) -> None:
        """Count a collective that is about to start. `label` names it, in the same words on every rank."""
        if self.aborted:
            raise self._over()
        self._checksum = zlib.crc32(label.encode(), self._checksum)
        self._history[self.started + 1] = (self._checksum, label)
        self.started += 1  # last: the thread reads it as the newest entry of the history
        if len(self._history) > MAX_REMEMBERED_COLLECTIVES:
            self._history.popitem(last=False)

    def call_off(self, why: str) -> NoReturn:
        """End the job: every rank raises this reason, or the first one that was given."""
        self._call_off(self.store, why)
        raise self._over()

    def called_off(self) -> PlanMismatchError | None:
        """Return the error to raise here if any rank has called the job off, which the caller raises; else None.

        Another rank's abort may reach this rank's communicators before this coordinator's thread has read the reason.
        """
        with contextlib.suppress(RuntimeError):  # the store may be gone with its owner
            self._read_abort(self.store)
        return self._over() if self.aborted else None

    def _over(self) -> PlanMismatchError:
        """Exception to raise on this rank once the job was called off."""
        self.reported.set()
        return PlanMismatchError(self.aborted)

    def enter(self) -> None:
        """Note a call of the model on this thread. Raises if the job was called off, or the process group is gone."""
        self.caller = threading.get_ident()
        self.check()

    def limit_s(self) -> float:
        """Seconds after which the group gives up a collective."""
        group = self._group()
        return inf if group is None else compat.groups.time_limit(group, "cuda" if self.on_gpu else "cpu")

    def stuck_in(self) -> tuple[int, str] | None:
        """Number and label of the first collective that this rank's GPU has not completed; None if there is none."""
        mark = self.marks.oldest()
        return self.starting if mark is None else (mark.number, mark.label)

    def check(self) -> None:
        """Raise if the job was called off, or the process group is gone."""
        if self.aborted:
            raise self._over()
        group = self._group()
        if group is None or self._ended or not compat.groups.exists(group):
            raise DcompileError(
                "dcompile: the process group of this model was destroyed; make a new one, wrap the model in "
                "DistributedDataParallel again, and compile that"
            )

    def status_of(self, rank: int) -> PeerStatus | None:
        """Newest status that a rank has published, or None."""
        return _read_status(self.store, rank)

    # --- the thread ---

    def _watch(self) -> None:
        pace = max(BEAT_S, self.world / 1000)
        stay_out_of_captures()
        try:
            while not self._ended:
                self._publish_status(self._side)
                self._check_peers()
                self._wake.wait(pace)
                self._wake.clear()
        except RuntimeError:  # the store is gone with its owner, or does not answer; Gloo's collectives report that
            self._watch_without_store()

    def _watch_without_store(self) -> None:
        """Check whether a GPU is stuck, without a store in which other ranks could say why."""
        stuck, since = self.stuck_in(), time.monotonic()
        while not self._ended and not self.aborted:
            now = self.stuck_in()
            if now is None or now != stuck:
                stuck, since = now, time.monotonic()
            elif time.monotonic() - since > GONE_S:
                self._abort(
                    f"dcompile: rank {self.rank} was waiting for the {now[1]}, number {now[0]} of this group; the "
                    "process that keeps the job's store (rank 0's, or torchrun's) cannot be reached any more"
                )
            self._wake.wait(BEAT_S)
            self._wake.clear()

    def _publish_status(self, store: Any) -> None:
        self._beats += 1
        started = self.started
        checksum, label = self._history.get(started, (0, ""))
        doing = self._doing[0] if self._doing else ""
        status = PeerStatus(self._beats, doing, self.meetings, started, checksum, label, self._ended, self._process)
        store.set(f"beat/{self.rank}", status.to_text())

    def _check_peers(self) -> None:
        self._read_abort(self._side)
        if self.rank and not self.aborted:
            self._compare_with_rank_0()
        for watch in [found for reference in list(self.watches) if (found := reference()) is not None]:
            watch.exchange(self._side)
        if not self.aborted and (reason := self._watchdog.reason()):
            self._call_off(self._side, reason)

    def _compare_with_rank_0(self) -> None:
        first = _read_status(self._side, 0)
        if first is not None and first.started:
            self._claims[first.started] = (first.checksum, first.label)
        for number in [number for number in self._claims if number <= self.started]:
            claimed, label = self._claims.pop(number)
            found = self._history.get(number)
            if found is not None and found[0] != claimed:
                self._call_off(
                    self._side,
                    f"dcompile: ranks do not run the same collectives in the same order. Of this group's first "
                    f"{number}, the last are\n  rank 0: {label}\n  rank {self.rank}: {found[1]}\n"
                    "Every rank must run the same backwards in the same order.",
                )

    def _call_off(self, store: Any, why: str) -> str:
        with contextlib.suppress(RuntimeError):  # the store may be gone; then so is the job
            why = store.compare_set("abort", "", why).decode(errors="replace") or why
        self._abort(why, store)
        return why

    def _read_abort(self, store: Any) -> bool:
        """Abort here, too, if a rank has called the job off; return whether one has."""
        if not self.aborted and store.check(["abort"]):
            self._abort(store.get("abort").decode(errors="replace"), store)
        return bool(self.aborted)

    def _abort(self, why: str, store: Any = None) -> None:
        with self._abort_lock:
            first, self.aborted = not self.aborted, self.aborted or why
        if first and store is not None:
            with contextlib.suppress(RuntimeError):
                store.add("told", 1)
        group = self._group()
        if first and group is not None and self.on_gpu:
            self._abortion = CommunicatorAbort(self, group)

    @property
    def aborting(self) -> bool:
        """Whether communicators are being aborted."""
        return self._abortion is not None and self._abortion.under_way

    # --- the end ---

    def end(self) -> None:
        """Stop the thread after checking that all ranks end here.

        Called before the process group is destroyed, and at exit. Raises PlanMismatchError if another rank has started
        more collectives than this one, or if the job was called off and nothing in this process has raised that.
        """
        if self._ended:
            return
        self._ended = True
        self._wake.set()
        self._thread.join(2 * BEAT_S)
        failure = sys.exc_info()[1] or getattr(sys, "last_value", None)
        with contextlib.suppress(RuntimeError):  # the store may be gone with its owner
            if failure is not None and not self.aborted:
                self._say_why(failure)
            elif not self.aborted:
                self._publish_status(self.store)  # for ranks that wait for this one
                if self.started:
                    self.store.add("ended", 1)
                    self._wait_for_all("ended")
            if self.aborted:
                self._wait_for_all("told")  # the store may end with this process
        if self.aborted and failure is None and not self.reported.is_set():
            raise self._over()

    def _say_why(self, failure: BaseException) -> None:
        """Publish the innermost cause of this rank's exception, with its place outside of torch.

        The first one in the store explains why all other ranks fail.
        """
        cause = compat.dynamo.causes(failure)[-1]
        kind = type(cause).__name__ if cause is failure else f"{type(failure).__name__}, from {type(cause).__name__}"
        first_line = next((line for line in str(cause).splitlines() if line.strip()), "")
        frames = traceback.extract_tb(cause.__traceback__)
        outside = [frame for frame in frames if not frame.filename.startswith(os.path.dirname(torch.__file__))]
        where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in (outside or frames)[-1:])
        self.store.compare_set("failed", "", f"rank {self.rank} has ended with {kind}: {first_line[:200]}{where}")

    def failure(self) -> str:
        """Exception with which another rank has ended, as text; empty if none has."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its owner
            if self.store.check(["failed"]):
                text: str = self.store.get("failed").decode(errors="replace")
                return text
        return ""

    def _wait_for_all(self, key: str) -> None:
        """Wait until every rank has counted itself under a key, at most `GOODBYE_S`, or until the job is called off."""
        deadline = time.monotonic() + GOODBYE_S
        pause = 0.001
        called_off = bool(self.aborted)
        while self.store.add(key, 0) < self.world and time.monotonic() < deadline:
            if not called_off and self._read_abort(self.store):
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.1)


def _read_status(store: Any, rank: int) -> PeerStatus | None:
    key = f"beat/{rank}"
    return PeerStatus.from_text(store.get(key)) if store.check([key]) else None


def peers_of(group: Any) -> PeerCoordinator | None:
    """Coordinator of a process group; None for a single rank or a fake group."""
    if group is None:
        return None
    found = _LINES.get(group)
    if found is None:
        if group.size() == 1 or dist.get_backend(group) == "fake":
            return None
        if not _GENERATIONS:
            compat.groups.on_destroy(_end)
            atexit.register(end_at_exit)
        found = _LINES[group] = PeerCoordinator(group)
    return found


def _end(group: Any) -> None:
    for other, line in list(_LINES.items()):
        if group is None or other is group:
            line.end()


def end_at_exit() -> None:
    """End the coordinators of all groups. Ends the process with status 1 if another rank has called the job off."""
    try:
        _end(None)
    except PlanMismatchError as error:
        # an exit status of 0 would claim that this rank has trained correctly
        report(logging.ERROR, str(error).removeprefix("dcompile: "))
        flush_streams()
        os._exit(1)
    if any(line.aborting for line in _LINES.values()):
        flush_streams()
        os._exit(1)  # communicators that cannot be aborted would keep the process from ending


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
        peers.reported.wait(GRACE_S)
        in_use = peers.stuck_in() is not None
        if in_use and not peers.reported.is_set():
            # first, because torch may end the process during the abort
            report(logging.ERROR, peers.aborted.removeprefix("dcompile: "))
            _raise_in(peers.caller, peers)
        threading.Thread(target=self._abort, name="dcompile communicators", daemon=True).start()
        compat.groups.let_go()  # communicators end only after CUDA graphs that contain their collectives
        if in_use and not peers.reported.wait(LAST_S):
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
            peers.reported.set()

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
