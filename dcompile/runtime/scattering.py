"""Reduce-scatters: the backend's own; over Gloo, which has none, an exchange of parts that every rank adds up itself.

ProcessGroupGloo copies what it is to scatter, sums up all of it on every rank, one all-reduce for each tensor, and
keeps a part. To send each rank its part alone is half of the traffic on two ranks, and what is small goes as one
message: gradients of a block, nine tensors and 4 MiB, take two thirds of the CPU time and a third of the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp

from dcompile import compat

ALONE_BYTES = 1 << 20
"""A message of this size is sent from where it lies; smaller ones are put together, which costs less than to send them:
a copy of 1 MiB takes as long as Gloo takes to begin, some 100 us."""


def start_scatter(
    group: Any, shards: Sequence[torch.Tensor], full: Sequence[torch.Tensor], op: Any, limit_s: float | None
) -> Any:
    """Start reducing each of `full`, flat, to this rank's part of it in `shards`; a torch.distributed.Work or its like.

    `limit_s`: seconds after which it fails, None where that is the backend's affair. On two ranks sums are those of
    Gloo's all-reduce bit for bit; on more, parts are added in order of ranks.
    """
    real = isinstance(group, ProcessGroup)  # what is not sharded has a stand-in that copies
    if real and compat.groups.is_gloo(group, full[0].device.type) and op in (ReduceOp.SUM, ReduceOp.AVG):
        return Exchanged(group, shards, full, op == ReduceOp.AVG, limit_s)
    return compat.groups.start_scatter(group, list(shards), list(full), op, limit_s)


class Exchanged:
    """A reduce-scatter under way over Gloo: parts are on their way, and added up by whoever waits."""

    def __init__(
        self,
        group: Any,
        shards: Sequence[torch.Tensor],
        full: Sequence[torch.Tensor],
        average: bool,
        limit_s: float | None,
    ) -> None:
        self._ranks = group.size()
        self._average = average
        self._works: list[Any] = []
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """This rank's shard of a tensor, and below one another what each rank has sent for it."""
        pairs = [pair for pair in zip(shards, full, strict=True) if pair[1].numel()]
        alone = [pair for pair in pairs if pair[1].nbytes >= ALONE_BYTES]
        rest = [pair for pair in pairs if pair[1].nbytes < ALONE_BYTES]
        messages = [[pair] for pair in alone] + ([rest] if rest else [])
        for message in messages:
            self._send(group, message, limit_s)

    def _send(self, group: Any, message: Sequence[tuple[torch.Tensor, torch.Tensor]], limit_s: float | None) -> None:
        """Send every rank its parts of these tensors, end to end."""
        rows = [tensor.view(self._ranks, -1) for _, tensor in message]  # contiguous: a unit is one flat tensor
        sent = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        received = torch.empty_like(sent)
        self._works.append(compat.groups.start_exchange(group, received.view(-1), sent.view(-1), limit_s))
        widths = [row.shape[1] for row in rows]
        places = torch.split(received, widths, 1)
        self._parts += [(shard, parts) for (shard, _), parts in zip(message, places, strict=True)]

    def _add_up(self, shard: torch.Tensor, parts: torch.Tensor) -> None:
        """In order of ranks."""
        shard.copy_(parts[0])
        for part in parts[1:]:
            shard.add_(part)
        if self._average:
            shard.div_(self._ranks)

    def is_completed(self) -> bool:
        """Whether all parts are there, or one has failed."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Done when all parts are there."""
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all parts, and add them up. RuntimeError as torch's Work raises it, after `timeout` for one."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if end is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))  # 0 would be no limit at all
        for shard, parts in self._parts:
            self._add_up(shard, parts)
        self._parts = []  # whoever waits again finds the sums
        return True
