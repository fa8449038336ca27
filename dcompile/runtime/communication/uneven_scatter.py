"""Reduce-scatters of which ranks get parts of different size: a reduction to each rank that has one.

ZeRO 1 and 2 give each rank a part of all parameters, end to end. What a bucket holds belongs to one rank mostly, or to
two; where it is the same for all, it is a reduce-scatter proper.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from dcompile import compat
from dcompile.runtime.communication.gloo import PendingMessages, start_scatter


class UnevenReduceScatter(PendingMessages):
    """Reductions under way, as one torch.distributed.Work.

    `shards` get this rank's part of each of `full`, flat, which are written to; `parts`: elements of each rank's part,
    in order of ranks.
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
        """This rank's shard, and where it is summed up."""
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
