"""Policy of waiting for other ranks: how long, for whom, and when to give up."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from dcompile.runtime.coordination.peer_status import BEAT_S, PeerStatus, PeerView

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
