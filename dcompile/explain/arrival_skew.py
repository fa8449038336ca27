"""Exchange, through the store, when the last rank came to each collective, to separate skew from transfer time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dcompile.compat.groups import group_store
from dcompile.toolchain import boot as machine

TIMEOUT_S = 30.0
PING_COUNT = 8

Arrival = tuple[str, int, float]
"""(bucket, bytes, seconds of time.perf_counter)."""


def latest_arrivals(
    group: Any, subject: str, arrivals: Sequence[Arrival], timeout_s: float = TIMEOUT_S
) -> tuple[list[tuple[float, int]] | None, str]:
    """Latest arrival at each collective of `group`: its time on this rank's clock, and the rank.

    All ranks call this with the same `subject`. Rank 0 compares, so that each of the others needs a few look-ups only.
    Returns None and the reason, if a rank does not come in time, or has run other collectives. Otherwise the text is
    empty, or gives the error of clocks of different machines.
    """
    store, rank, world = group_store(group), dist.get_rank(group), dist.get_world_size(group)
    channel = _StoreChannel(store, subject, rank, timeout_s)
    try:
        channel.send(f"arrivals/{rank}", [machine(), list(arrivals)])
        if rank == 0:
            said = {other: channel.receive(f"arrivals/{other}") for other in range(world)}
            apart = [other for other, (name, _) in said.items() if other and (not name or name != said[0][0])]
            channel.send("apart", apart)
            clocks = {other: channel.answer_pings(other) for other in apart}
            ranks = {other: dist.get_global_rank(group, other) for other in said}
            channel.send("latest", _latest(said, clocks, ranks))
        elif rank in channel.receive("apart"):
            channel.measure_offset()
        times, note = channel.receive("latest")
    except RuntimeError:  # the store's timeout is a DistStoreError
        return None, f"when the others arrived is not known: not all ranks had measured within {timeout_s:g} s"
    return (None if times is None else [(at - channel.offset, last) for at, last in times]), note


def _latest(
    said: dict[int, Any], clocks: dict[int, tuple[float, float]], ranks: dict[int, int]
) -> tuple[list[tuple[float, int]] | None, str]:
    """Latest arrivals by rank 0's clock, computed on rank 0."""
    if len({tuple((bucket, nbytes) for bucket, nbytes, _ in arrivals) for _, arrivals in said.values()}) > 1:
        return None, "when the others arrived is not known: ranks have measured different collectives"
    latest = [
        max((found[1][number][2] + clocks.get(other, (0.0, 0.0))[0], ranks[other]) for other, found in said.items())
        for number in range(len(said[0][1]))
    ]
    error = max((uncertain for _, uncertain in clocks.values()), default=0.0)
    return latest, f"clocks of different machines are compared to within {error * 1e6:.0f} us" if clocks else ""


class _StoreChannel:
    """Messages between ranks under one subject of the store."""

    def __init__(self, store: Any, subject: str, rank: int, timeout_s: float) -> None:
        self._store, self._subject, self._rank = store, subject, rank
        self._timeout = timedelta(seconds=timeout_s)
        self.offset = 0.0
        """Rank 0's clock minus this one's, in seconds."""

    def send(self, key: str, value: Any) -> None:
        self._store.set(f"{self._subject}/{key}", json.dumps(value))

    def receive(self, key: str) -> Any:
        name = f"{self._subject}/{key}"
        self._store.wait([name], self._timeout)
        return json.loads(self._store.get(name))

    def measure_offset(self) -> None:
        """Measure this rank's clock offset: the fastest of a few round trips has the smallest error."""
        found = []
        for number in range(PING_COUNT):
            asked = time.perf_counter()
            self.send(f"ask/{self._rank}/{number}", 0)
            said = self.receive(f"answer/{self._rank}/{number}")
            answered = time.perf_counter()
            found.append(((answered - asked) / 2, said - (asked + answered) / 2))
        uncertain, self.offset = min(found)
        self.send(f"clock/{self._rank}", [self.offset, uncertain])

    def answer_pings(self, rank: int) -> tuple[float, float]:
        """Answer another rank's round trips, on rank 0. Return its offset and the error of that, in seconds."""
        for number in range(PING_COUNT):
            self.receive(f"ask/{rank}/{number}")
            self.send(f"answer/{rank}/{number}", time.perf_counter())
        offset, uncertain = self.receive(f"clock/{rank}")
        return offset, uncertain
