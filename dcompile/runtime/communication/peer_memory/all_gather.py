"""All-gathers without kernels: each rank copies the others' shards to where its program needs them.

Two rules make that correct. Each takes one meeting of the ranks (an all-reduce of one element) per program:

- No rank copies before all ranks have come to the program, so that optimizers are done with the shards.
- No rank leaves the program before all have copied, so that no optimizer starts.

Where shards are converted first, ranks meet once more. The shards of the first gather are converted before the first
meeting. All others are converted while the first gather copies, and before a second meeting.

Meetings are collectives like others: counted, compared between ranks, supervised, recorded in CUDA graphs. A copy
itself waits for no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.runtime.communication.peer_memory.shards import PeerShardGroup
from dcompile.runtime.communication.work import PendingCollective, start_sum


class PendingCopyGather:
    """One copy gather in flight, with the interface of a `PendingCollective`."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    @property
    def work(self) -> PendingCopyGather:
        """This object, as measuring waits for it like for a Work."""
        return self

    def wait(self) -> None:
        """Make the current stream wait for the copies."""
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)

    def is_completed(self) -> bool:
        """Whether all copies are done."""
        return all(event.query() for event in self._events)

    def get_future(self) -> Any:
        """Raise RuntimeError, like a collective that does not notify when it ends."""
        raise RuntimeError("copies have no future")


class CopyGathers:
    """Copy gathers of one call of a program within one process group: `buckets` gathers over these units."""

    def __init__(
        self,
        peers: PeerShardGroup,
        buckets: int,
        units: Sequence[int],
        begun: Callable[[PendingCollective], None],
        convert: Callable[[Sequence[int]], None],
        overlaps: bool,
    ) -> None:
        """Prepare the gathers of a call.

        `convert` writes the converted shards of units. `begun` is called with each meeting. `overlaps`: all ranks
        convert most shards while the first gather copies.
        """
        self._peers, self._streams, self._left = peers, peers.streams, buckets
        self._units = units
        self._begun = begun
        """Called with each meeting that begins."""
        self._convert, self._overlaps = convert, overlaps and buckets > 1
        self._opened = False
        self._closing: PendingCollective | None = None

    def start(self, bucket: str, units: Sequence[int], full: Sequence[torch.Tensor]) -> PendingCopyGather:
        """Start filling `full`, flat tensors, with all ranks' shards of `units`, in the order of ranks."""
        peers, streams = self._peers, self._streams
        if not self._opened:
            self._opened = True
            self._convert(units if self._overlaps else self._units)
            peers.refresh(self._units)
            opening = self._start_barrier(f"meeting before {bucket} is copied")
            streams.fork()
            with streams.on_peer_copies():
                opening.wait()
        else:
            streams.fork()
            if self._overlaps:
                self._overlaps = False
                with streams.on_peer_copies():
                    streams.order_peer_behind_own()
                    self._start_barrier(f"meeting behind the conversion of {bucket} and others").wait()
        own, others = [], []
        for number, whole in zip(units, full, strict=True):
            nbytes = whole.numel() // peers.ranks * whole.element_size()
            sources, target = peers.sources[number], whole.data_ptr()
            own.append((target + peers.rank * nbytes, sources[peers.rank], nbytes))
            for step in range(1, peers.ranks):  # each rank begins with another peer, to spread the load
                rank = (peers.rank + step) % peers.ranks
                others.append((target + rank * nbytes, sources[rank], nbytes))
        peers.reach.copy(others, streams.peer_copies)
        peers.reach.copy(own, streams.own_copies)
        copying = PendingCopyGather(streams.events())
        if self._overlaps:
            with streams.on_own_copies():
                self._convert(self._units)
        self._left -= 1
        if not self._left:
            with streams.on_peer_copies():
                self._closing = self._start_barrier(f"meeting behind the copies of {bucket}")
        return copying

    def _start_barrier(self, label: str) -> PendingCollective:
        collective = start_sum(self._peers.group, self._peers.flag, label)
        self._begun(collective)
        return collective

    def finish(self) -> None:
        """Wait until all ranks have their copies. Called once the program has waited for all of its gathers."""
        if self._closing is not None:
            closing, self._closing = self._closing, None
            closing.wait()
