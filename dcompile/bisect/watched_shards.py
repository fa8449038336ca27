"""What a checked call with sharded parameters exchanges, once more: by torch.distributed, one unit after the other.

The reference of such a call computes with parameters that are gathered here, not with those that the call gathered.
The shards that the call's reductions leave are kept, for a comparison with a reduction of the reference's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcompile.collectives.contract import ParamInfo, ShardGroup
from dcompile.collectives.fsdp_units import shard_of
from dcompile.runtime.communication.fsdp_shards import ShardCommunication


class WatchedShards:
    """Stands for a call's `ShardSource`, and keeps what its reductions leave on this rank."""

    def __init__(self, source: ShardCommunication) -> None:
        self._source = source
        self._pending: dict[str, Mapping[int, torch.Tensor]] = {}
        self._kept = {number: whole.clone() for number, whole in source.shards.unreduced.whole.items()}
        """Gradients of earlier backwards, which are reduced with this one's."""
        self.reduced: dict[int, torch.Tensor] = {}
        """Unit -> this rank's shard of its averaged gradient, padded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def start_scatter(self, bucket: str, full: list[torch.Tensor]) -> None:
        """See `ShardSource`."""
        shared = self._source.shards.unreduced.shared()
        self._source.start_scatter(bucket, full)
        reducing = self._source.reducing(bucket).items()
        self._pending[bucket] = {number: shard for number, shard in reducing if number not in shared}

    def wait_scatter(self, bucket: str) -> None:
        """See `ShardSource`."""
        self._source.wait_scatter(bucket)
        self._keep(bucket)

    def take_shards(self, bucket: str, sizes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """See `ShardSource`."""
        taken = self._source.take_shards(bucket, sizes)
        self._keep(bucket)
        return taken

    def _keep(self, bucket: str) -> None:
        self.reduced |= {number: shard.clone() for number, shard in self._pending.pop(bucket).items()}

    def same_each_time(self) -> str:
        """Why this call is not replayed."""
        return "the sentinel reads what it exchanges"

    def gathered(self, infos: Sequence[ParamInfo]) -> list[torch.Tensor | None]:
        """Gather these parameters; all ranks call this. None for those that are sent in another form than they have."""
        shards = self._source.shards
        whole: dict[int, torch.Tensor | None] = {}
        for info in infos:
            unit = shards.units[number := shard_of(info).unit]
            if number in whole:
                continue
            if unit.cast is not None or unit.parts or unit.offloaded:
                whole[number] = None
                continue
            mine, group = unit.data(), shards.groups[unit.group].gather_group()
            flat = mine.new_empty(group.size() * mine.numel())
            dist.all_gather([*flat.chunk(group.size())], mine.contiguous(), group=group)
            whole[number] = flat
        return [_part(whole[shard_of(info).unit], info) for info in infos]

    def averaged(self, gradients: Iterable[tuple[ParamInfo, torch.Tensor | None]]) -> dict[int, torch.Tensor]:
        """Average gradients over ranks as FSDP does, by torch.distributed: unit -> this rank's shard, padded.

        All ranks call this. Units that are not reduced in this call are left out, and those that cannot be averaged so.
        """
        flats: dict[int, torch.Tensor] = {}
        for info, gradient in gradients:
            shard = shard_of(info)
            if shard.unit not in self.reduced or gradient is None or self._source.shards.units[shard.unit].parts:
                continue
            dtype = torch.float64 if gradient.dtype == torch.float64 else getattr(torch, shard.reduce_dtype)
            flat = flats.setdefault(shard.unit, gradient.new_zeros(shard.numel, dtype=dtype))
            flat[shard.offset : shard.offset + gradient.numel()] = gradient.reshape(-1)
        for number, kept in self._kept.items():
            if number in flats:
                flats[number] += kept
        units, groups = self._source.shards.units, self._source.shards.groups
        found = {number: _average(flat, groups[units[number].group]) for number, flat in sorted(flats.items())}
        return {number: shard for number, shard in found.items() if shard is not None}


def _part(flat: torch.Tensor | None, info: ParamInfo) -> torch.Tensor | None:
    if flat is None:
        return None
    begin = shard_of(info).offset
    return flat[begin : begin + math.prod(info.shape)].view(info.shape)


def _average(flat: torch.Tensor, group: ShardGroup) -> torch.Tensor | None:
    """This rank's part of the average of `flat` over a group's ranks; None if the user has given another reduction."""
    rule, ranks, replicas = group.reduction(flat.dtype), group.scatter_group(), group.replica_group()
    scale = 1.0 / (rule.divide_before or 1.0) / (rule.divide_after or 1.0)
    over = [(ranks, rule.scatter)] + ([] if replicas is None else [(replicas, rule.reduce)])
    for process_group, operation in over:
        if operation not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return None
        scale /= process_group.size() if operation == dist.ReduceOp.AVG else 1
        dist.all_reduce(flat, group=process_group)
    return (flat * scale).view(ranks.size(), -1)[ranks.rank()]
