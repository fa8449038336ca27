"""What a rank says of itself, and what waiting and supervising need to know of the others."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

BEAT_S = 1.0
"""How often a rank says how it is."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """The last that a rank said of itself."""

    beats: int
    """Grows with each time: a rank whose number stands still is dead, stopped, or cannot reach the store."""
    doing: str
    """What it is busy with while peers may have to wait for it: "" or "compiling"."""
    meetings: int
    """Agreements that it has come to."""
    started: int
    """Collectives that it has started."""
    checksum: int
    label: str
    """Of the last of them."""
    ended: bool


class PeerView(Protocol):
    """The other ranks of a group (`heartbeat.PeerCoordinator`), as waiting and supervising see them."""

    rank: int
    world: int
    aborted: str
    told: threading.Event
    caller: int | None

    def said(self, rank: int) -> PeerStatus | None:
        """The newest status of a rank, if there is any."""

    def failure(self) -> str:
        """The exception that has ended another rank; empty if none has."""

    def stuck_in(self) -> tuple[int, str] | None:
        """Number and label of the first collective that this rank's GPU is not through with."""
