"""Reduce-scatters with parts of different sizes: one reduction to each rank that has a part.

ZeRO 1 and 2 give each rank a part of all parameters, end to end. Most of a bucket's elements belong to one or two
ranks. A tensor with equal parts uses an ordinary reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from dcompile import compat
from dcompile.runtime.communication.gloo import PendingMessages, start_scatter


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
