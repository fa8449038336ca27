"""Statements of a kernel that receives a tile from other GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReceivedTile:
    """Statements around a kernel that receives the elements of `buffer` from other GPUs, as a tile in registers."""

    buffer: str
    before_wait: Sequence[str]
    send: Sequence[str]
    """Behind the wait for earlier kernels. Other loads come next."""
    receive: Sequence[str]
    """Before the first value that depends on the tile."""
    store: Sequence[str]
    """Before the kernel's own stores, behind a barrier."""
    finish: Sequence[str]


NOTHING_RECEIVED = ReceivedTile("", (), (), (), (), ())
