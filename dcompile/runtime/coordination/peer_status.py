"""Status that each rank publishes, and the view of peers that waiting and supervision use."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

BEAT_S = 1.0
"""Seconds between two heartbeats."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Newest status of a rank."""

    beats: int
    """Heartbeats so far. A rank whose number does not grow is dead, stopped, or cannot reach the store."""
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


class PeerView(Protocol):
    """Peers of a group (`heartbeat.PeerCoordinator`) as waiting and supervision see them."""

    rank: int
    world: int
    aborted: str
    told: threading.Event
    caller: int | None

    def status_of(self, rank: int) -> PeerStatus | None:
        """Newest status of a rank, or None."""

    def failure(self) -> str:
        """Exception that has ended another rank, as text; empty if none has."""

    def stuck_in(self) -> tuple[int, str] | None:
        """Number and label of the first collective that this rank's GPU has not completed."""
