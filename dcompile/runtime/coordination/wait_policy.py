"""Waiting for other ranks: the status that each rank publishes, and how long, for whom, and until when others wait."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

BEAT_S = 1.0
"""Seconds between two heartbeats."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Process of a rank, such that others on its host can see whether it has ended."""

    host: str
    """Boot of the host's kernel and namespace of process numbers; empty where the system tells neither."""
    number: int
    start: int
    """When it started, in ticks of the kernel's clock: a number is used again."""

    @classmethod
    def current(cls) -> RankProcess:
        """The process that calls."""
        number = os.getpid()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(f"{boot} {os.readlink('/proc/self/ns/pid')}", number, _process_stat(number)[1])
        except (OSError, ValueError, IndexError):  # not Linux, or a sandbox without this part of it
            return cls("", number, 0)

    def state(self) -> str:
        """How this host sees the process: "gone", "suspended" or "there"; empty if it cannot tell."""
        if not self.host or self.host != RankProcess.current().host:
            return ""
        try:
            letter, start = _process_stat(self.number)
        except (FileNotFoundError, ProcessLookupError):
            return "gone" if self._unknown_to_the_kernel() else ""
        except (OSError, ValueError, IndexError):
            return ""
        if start != self.start or letter in "ZX":  # a process that nobody has waited for is left as a zombie
            return "gone"
        return "suspended" if letter in "Tt" else "there"

    def _unknown_to_the_kernel(self) -> bool:
        """Whether no process has this number. /proc may be mounted so that it hides those of other users."""
        try:
            os.kill(self.number, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False


def _process_stat(number: int) -> tuple[str, int]:
    """State and start of a process of this host."""
    # the name of the program, in parentheses, may contain spaces
    values = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return values[0], int(values[19])


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Newest status of a rank."""

    beats: int
    """Heartbeats so far. A rank whose number does not grow is silent: it has ended, is suspended, holds the lock of its
    interpreter, or cannot reach the store.
    """
    doing: str
    """Work during which peers may have to wait for it, such as "compiling"; empty for none."""
    meetings: int
    """Agreements that it has come to."""
    started: int
    """Collectives that it has started."""
    checksum: int
    label: str
    """Label of the last of them."""
    ended: bool
    process: RankProcess

    def to_text(self) -> str:
        """Text of this status for the store."""
        return json.dumps(astuple(self))

    @classmethod
    def from_text(cls, text: bytes) -> PeerStatus | None:
        """Status that a rank has published; None if it cannot be read, as that of another version of dcompile."""
        try:
            *values, process = json.loads(text)
            status: PeerStatus = _typed(cls, [*values, _typed(RankProcess, process)])
        except (TypeError, ValueError, RecursionError):
            return None
        return status


def _typed(kind: Any, values: Any) -> Any:
    """Dataclass of values from the store, each of which must have the type of its field."""
    for value, field in zip(values, fields(kind), strict=True):
        if type(value).__name__ != field.type:
            raise TypeError(field.name)
    return kind(*values)


class PeerView(Protocol):
    """Peers of a group (`heartbeat.PeerCoordinator`) as waiting and supervision see them."""

    rank: int
    world: int
    aborted: str
    reported: threading.Event
    caller: int | None

    def limit_s(self) -> float:
        """Seconds after which the group gives up a collective."""

    def status_of(self, rank: int) -> PeerStatus | None:
        """Newest status of a rank, or None."""

    def failure(self) -> str:
        """Exception that has ended another rank, as text; empty if none has."""

    def stuck_in(self) -> tuple[int, str] | None:
        """Number and label of the first collective that this rank's GPU has not completed."""


STALE_S = 6 * BEAT_S
"""Seconds without a new heartbeat after which a rank is silent. Its process is then asked for."""
PATIENCE_S = 1800.0
"""Longest time in seconds, beyond the usual limit, that a rank waits for peers that compile."""
_SILENCE = {
    "gone": "is gone: its process {number} has ended",
    "suspended": "has been silent for {seconds:.1f} s: its process {number} is suspended",
    "there": "has been silent for {seconds:.1f} s: its process {number} is there, perhaps in a long call that holds "
    "the interpreter's lock",
    "": "has been silent for {seconds:.1f} s: its process is suspended, in a long call that holds the interpreter's "
    "lock, or gone, which cannot be seen from here",
}


class PeerWait:
    """State of a wait for other ranks. Its clock stands still while one of the missing ranks compiles."""

    def __init__(
        self, peers: PeerView, limit_s: float, ranks: Collection[int] | None = None, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._peers = peers
        self._limit_s = limit_s
        self._patience_s = patience_s
        self._ranks = [rank for rank in (range(peers.world) if ranks is None else ranks) if rank != peers.rank]
        self._last: dict[int, PeerStatus] = {}
        self._moved: dict[int, float] = {}
        """Time at which each rank's last new status was seen."""
        self._began = self._seen = time.monotonic()
        # the status of many ranks is read only if some are late; that of one rank costs nothing
        self._polled = self._began if len(self._ranks) > 1 else -float("inf")
        self._waited = 0.0
        self._paused = 0.0

    def waited(self, seconds: float) -> None:
        """Add time that was waited before this object took over."""
        self._waited += seconds
        self._began -= seconds
        self._polled -= seconds

    def total_s(self) -> float:
        """Seconds that this rank has waited, including those in which others compiled."""
        return time.monotonic() - self._began

    def slice_s(self) -> float:
        """Seconds to wait before the next `poll`; at most one."""
        return min(max(self._limit_s - self._waited, 0.02), BEAT_S)

    def poll(self) -> Mapping[int, PeerStatus | None]:
        """Newest status of every rank. Reads the store at most twice a second, less often for many ranks."""
        now = time.monotonic()
        if now - self._polled >= max(BEAT_S / 2, len(self._ranks) / 100):
            # the first look cannot tell for how long a status has been there
            since = self._began if self._polled <= self._began else now
            self._polled = now
            for rank in self._ranks:
                status = self._peers.status_of(rank)
                before = self._last.get(rank)
                if status is not None and (before is None or status.beats != before.beats):
                    self._last[rank], self._moved[rank] = status, since
        return {rank: self._last.get(rank) for rank in self._ranks}

    def last(self, rank: int) -> PeerStatus | None:
        """Newest known status of a rank."""
        return self._last.get(rank)

    def silent_s(self, rank: int) -> float:
        """Seconds since a rank's last new status was seen."""
        return time.monotonic() - self._moved.get(rank, self._began)

    def alive(self, rank: int) -> bool:
        """Whether a rank has published a new status within `STALE_S`."""
        return rank in self._moved and time.monotonic() - self._moved[rank] < STALE_S

    def compiles(self, rank: int) -> bool:
        """Whether a rank is alive and busy compiling."""
        return self.alive(rank) and bool(self._last[rank].doing)

    def gone(self, rank: int) -> bool:
        """Whether a rank that was there is silent, and its process is seen to have ended. Silence alone proves nothing:
        a suspended rank, or one whose interpreter's lock is held, goes on later.
        """
        return rank in self._last and not self.alive(rank) and self._last[rank].process.state() == "gone"

    def out_of_patience(self, missing: Collection[int]) -> bool:
        """Whether the time for the missing ranks is up, or one of them is gone."""
        now = time.monotonic()
        passed, self._seen = now - self._seen, now
        if any(self.compiles(rank) for rank in missing) and self._paused < self._patience_s:
            self._paused += passed
        else:
            self._waited += passed
        return self._waited >= self._limit_s or any(self.gone(rank) for rank in missing)

    def describe(self, missing: Collection[int]) -> str:
        """Describe the first of the missing ranks, one that is gone or silent before others."""
        if not missing:
            return "another rank has failed, stalled, or does not run this step"
        rank = min(missing, key=lambda rank: (not self.gone(rank), self.alive(rank), rank))
        status = self._last.get(rank)
        if status is not None and not self.alive(rank) and (why := self._peers.failure()):
            return why
        if status is None:
            what = (
                "has not reported: it has not reached this model, has not compiled it, as every rank has to, runs "
                "another version of dcompile, or its process is gone"
            )
        elif not self.alive(rank):
            process = status.process
            what = _SILENCE[process.state()].format(seconds=self.silent_s(rank), number=process.number)
        elif status.doing:
            what = f"is still {status.doing}"
        else:
            what = (
                "is alive, but has stalled or does not run this step "
                f"(it has started {status.started} collectives of this group)"
            )
        return f"rank {rank} {what}" + (f"; {len(missing) - 1} more are missing" if len(missing) > 1 else "")
