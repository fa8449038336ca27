"""Status that each rank publishes, with its process, and the view of peers that waiting and supervision use."""

from __future__ import annotations

import json
import os
import threading
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
    told: threading.Event
    caller: int | None

    def limit_s(self) -> float:
        """Seconds after which the group gives up a collective."""

    def status_of(self, rank: int) -> PeerStatus | None:
        """Newest status of a rank, or None."""

    def failure(self) -> str:
        """Exception that has ended another rank, as text; empty if none has."""

    def stuck_in(self) -> tuple[int, str] | None:
        """Number and label of the first collective that this rank's GPU has not completed."""
