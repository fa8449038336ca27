"""Gathers and reduce-scatters: the backend's own, coalesced messages over Gloo, and parts of different sizes.

Small units of a bucket are packed into one message, and unpacked after the collective.

ProcessGroupGloo's reduce-scatter copies its input, all-reduces each whole tensor on every rank, and keeps a part.
Sending each rank only its part halves the traffic on two ranks. Small tensors are packed into one message, which takes
a third of the time for a block's gradients (docs/lab/runtime.md, R10).

Gloo's all-gather of several tensors in one call corrupts the heap where several are in flight. Two processes that only
start three at a time die within some thousand rounds (torch 2.13.0, glibc 2.36). Its all-gather of one tensor is safe.

ZeRO 1 and 2 give each rank a part of all parameters, end to end. Most of a bucket's elements belong to one or two
ranks. Each rank that has a part gets one reduction to it. A tensor with equal parts uses an ordinary reduce-scatter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp

from dcompile import compat
from dcompile.ir.buffers import Bucket

ALONE_BYTES = 1 << 20
"""Bytes from which a tensor is sent directly. Packing smaller ones costs less than sending them: copying 1 MiB takes as
long as Gloo takes to start a collective, some 100 us.
"""


def in_order(bucket: Bucket) -> list[int]:
    """Places of a bucket's units in the order of a rank's reduced shards: packed units come last, contiguously."""
    return sorted(range(len(bucket.units)), key=lambda place: (place in bucket.packed, place))


class PackedUnits:
    """Units in one message: `whole` holds, rank by rank, the rank's parts of all of them, end to end."""

    def __init__(self, units: list[torch.Tensor], ranks: int) -> None:
        self._rows = [unit.view(ranks, -1) for unit in units]
        self.whole = units[0].new_empty(sum(unit.numel() for unit in units))

    def pack(self) -> None:
        """Copy the units into the message."""
        torch.cat(self._rows, 1, out=self.whole.view(len(self._rows[0]), -1))

    def unpack(self) -> None:
        """Copy the units out of the message."""
        widths = [rows.shape[1] for rows in self._rows]
        torch.split_with_sizes_copy(self.whole.view(len(self._rows[0]), -1), widths, 1, out=self._rows)


def start_scatter(
    group: Any, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor], op: Any, limit_s: float | None
) -> Any:
    """Start reducing each flat tensor of `full` to this rank's part in `shards`.

    Return a torch.distributed.Work or its like. `limit_s`: seconds after which it fails; None leaves that to the
    backend. On two ranks, sums equal Gloo's all-reduce bit for bit; on more, parts are added in the order of ranks.
    """
    if _over_gloo(group, full) and op in (ReduceOp.SUM, ReduceOp.AVG):
        return GlooReduceScatter(group, shards, full, op == ReduceOp.AVG, limit_s)
    return compat.groups.start_reduce_scatter(group, shards, full, op, limit_s)


def start_gather(
    group: Any, full: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], limit_s: float | None
) -> Any:
    """Start gathering each of `shards` from every rank, end to end, into the flat tensors `full`.

    Return a Work or its like. `limit_s`: seconds after which it fails; None leaves that to the backend.
    """
    if _over_gloo(group, full):
        return GlooAllGather(group, full, shards, limit_s)
    return compat.groups.start_gather(group, full, shards, limit_s)


def _over_gloo(group: Any, full: Sequence[torch.Tensor]) -> bool:
    """Whether `group` is Gloo's. Unsharded parameters have a substitute for a group, which copies."""
    return isinstance(group, ProcessGroup) and compat.groups.is_gloo(group, full[0].device.type)


def _messages(full: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of the tensors of each message. Empty tensors are not sent."""
    sizes = {place: tensor.nbytes for place, tensor in enumerate(full) if tensor.numel()}
    alone = [[place] for place, size in sizes.items() if size >= ALONE_BYTES]
    rest = [place for place, size in sizes.items() if size < ALONE_BYTES]
    return alone + ([rest] if rest else [])


class PendingMessages:
    """Messages in flight, as one torch.distributed.Work."""

    def __init__(self) -> None:
        self._works: list[Any] = []

    def is_completed(self) -> bool:
        """Whether all messages have arrived, or one has failed."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Future that completes when all messages have arrived."""
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all messages and unpack them. Raises RuntimeError as Work does, also after `timeout`."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if end is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))  # 0 would mean no limit
        self._unpack()
        return True

    def _unpack(self) -> None:
        """Unpack the messages, once, however often `wait` is called."""
        raise NotImplementedError


class GlooAllGather(PendingMessages):
    """All-gather over Gloo: large tensors go directly to their destination, small ones as one message."""

    def __init__(
        self, group: Any, full: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], limit_s: float | None
    ) -> None:
        super().__init__()
        self._packed: list[PackedUnits] = []
        for places in _messages(full):
            if len(places) == 1:
                received, sent = full[places[0]], shards[places[0]]
            else:
                packed = PackedUnits([full[place] for place in places], group.size())
                received, sent = packed.whole, torch.cat([shards[place] for place in places])
                self._packed.append(packed)
            self._works.append(compat.groups.start_gather_of_one(group, received, sent, limit_s))

    def _unpack(self) -> None:
        for packed in self._packed:
            packed.unpack()
        self._packed = []


class GlooReduceScatter(PendingMessages):
    """Reduce-scatter in flight over Gloo: ranks send each other their parts, and `wait` adds them up."""

    def __init__(
        self,
        group: Any,
        shards: Sequence[torch.Tensor],
        full: Sequence[torch.Tensor],
        average: bool,
        limit_s: float | None,
    ) -> None:
        super().__init__()
        self._ranks = group.size()
        self._average = average
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """This rank's shard of a tensor, and a matrix whose rows are the parts that each rank has sent for it."""
        for places in _messages(full):
            self._send(group, [(shards[place], full[place]) for place in places], limit_s)

    def _send(self, group: Any, message: Sequence[tuple[torch.Tensor, torch.Tensor]], limit_s: float | None) -> None:
        """Send every rank its parts of these tensors, end to end."""
        rows = [tensor.view(self._ranks, -1) for _, tensor in message]  # contiguous: a unit is one flat tensor
        sent = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        received = torch.empty_like(sent)
        self._works.append(compat.groups.start_all_to_all(group, received.view(-1), sent.view(-1), (), (), limit_s))
        widths = [row.shape[1] for row in rows]
        places = torch.split(received, widths, 1)
        self._parts += [(shard, parts) for (shard, _), parts in zip(message, places, strict=True)]

    def _unpack(self) -> None:
        for shard, parts in self._parts:
            self._add_up(shard, parts)
        self._parts = []

    def _add_up(self, shard: torch.Tensor, parts: torch.Tensor) -> None:
        """Add the parts in the order of ranks, so that the result is deterministic."""
        shard.copy_(parts[0])
        for part in parts[1:]:
            shard.add_(part)
        if self._average:
            shard.div_(self._ranks)


class UnevenReduceScatter(PendingMessages):
    """Reductions in flight, as one torch.distributed.Work.

    `shards` receive this rank's part of each tensor of `full`. The flat tensors of `full` are overwritten. `parts`:
    number of elements of each rank's part, in the order of ranks.
    """

    def __init__(
        self,
        group: Any,
        shards: Sequence[torch.Tensor],
        full: Sequence[torch.Tensor],
        parts: Sequence[tuple[int, ...]],
        op: Any,
        limit_s: float | None,
    ) -> None:
        super().__init__()
        rank = group.rank()
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        """This rank's shard, and the slice in which it is reduced."""
        for shard, whole, sizes in zip(shards, full, parts, strict=True):
            if len(set(sizes)) == 1:
                self._works.append(start_scatter(group, [shard], [whole], op, limit_s))
                continue
            stops = list(accumulate(sizes))
            for owner, (size, stop) in enumerate(zip(sizes, stops, strict=True)):
                if size:
                    piece = whole[stop - size : stop]
                    self._works.append(compat.groups.start_reduce(group, piece, owner, op, limit_s))
                    if owner == rank:
                        self._own.append((shard, piece))

    def _unpack(self) -> None:
        for shard, piece in self._own:
            shard.copy_(piece)
        self._own = []
