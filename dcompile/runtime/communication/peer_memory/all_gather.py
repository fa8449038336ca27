"""All-gathers without kernels: each rank copies the others' shards to where its program wants them.

Two rules keep that right, each with one meeting of the ranks (an all-reduce of one element) in a program: nobody copies
before all ranks have come to the program, so that optimizers are done with the shards; and nobody leaves it before all
have copied, so that no optimizer begins. Where shards are converted first, ranks meet once more: those of the
first gather are converted before the first meeting, all others beside its copies, and before a second one. All are
collectives like others: counted, compared between ranks, watched over, recorded in CUDA graphs; a copy itself waits for
no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.runtime.communication.peer_memory.shards import PeerShardGroup
from dcompile.runtime.communication.work import PendingCollective, start_sum


class PendingCopyGather:
    """One gather in flight; to be waited for like a `PendingCollective`."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    @property
    def work(self) -> PendingCopyGather:
        """What measuring waits for."""
        return self

    def wait(self) -> None:
        """The current stream waits for the copies."""
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)

    def is_completed(self) -> bool:
        """Whether all is copied."""
        return all(event.query() for event in self._events)

    def get_future(self) -> Any:
        """As of a collective that does not tell when it ends."""
        raise RuntimeError("copies have no future")


class CopyGathers:
    """The gathers of one call of a program from one process group's ranks: `buckets` of them, over these units."""

    def __init__(
        self,
        near: PeerShardGroup,
        buckets: int,
        units: Sequence[int],
        begun: Callable[[PendingCollective], None],
        convert: Callable[[Sequence[int]], None],
        beside: bool,
    ) -> None:
        """`convert` writes what these units' shards are sent as; `beside`: all ranks are to do most of that beside the
        first gather.
        """
        self._near, self._lanes, self._left = near, near.lanes, buckets
        self._units = units
        self._begun = begun
        """Told of each meeting that begins."""
        self._convert, self._beside = convert, beside and buckets > 1
        self._opened = False
        self._closing: PendingCollective | None = None

    def start(self, bucket: str, units: Sequence[int], full: Sequence[torch.Tensor]) -> PendingCopyGather:
        """Start filling `full`, flat tensors, with all ranks' shards of `units`, one behind the other."""
        near, lanes = self._near, self._lanes
        if not self._opened:
            self._opened = True
            self._convert(units if self._beside else self._units)
            near.refresh(self._units)
            opening = self._meet(f"meeting before {bucket} is copied")
            lanes.fork()
            with lanes.on_far():
                opening.wait()
        else:
            lanes.fork()
            if self._beside:
                self._beside = False
                with lanes.on_far():
                    lanes.far_behind_near()
                    self._meet(f"meeting behind the conversion of {bucket} and others").wait()
        own, others = [], []
        for number, whole in zip(units, full, strict=True):
            nbytes = whole.numel() // near.ranks * whole.element_size()
            sources, target = near.sources[number], whole.data_ptr()
            own.append((target + near.rank * nbytes, sources[near.rank], nbytes))
            for step in range(1, near.ranks):  # each begins with another one, or all would ask the same
                rank = (near.rank + step) % near.ranks
                others.append((target + rank * nbytes, sources[rank], nbytes))
        near.reach.copy(others, lanes.far)
        near.reach.copy(own, lanes.near)
        pull = PendingCopyGather(lanes.events())
        if self._beside:
            with lanes.on_near():
                self._convert(self._units)
        self._left -= 1
        if not self._left:
            with lanes.on_far():
                self._closing = self._meet(f"meeting behind the copies of {bucket}")
        return pull

    def _meet(self, label: str) -> PendingCollective:
        flight = start_sum(self._near.group, self._near.flag, label)
        self._begun(flight)
        return flight

    def finish(self) -> None:
        """All that the program gathers has been waited for: before it ends, wait until all ranks have their copies."""
        if self._closing is not None:
            closing, self._closing = self._closing, None
            closing.wait()
