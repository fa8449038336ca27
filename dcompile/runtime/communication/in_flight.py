"""Pending gathers and reductions of sharded parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcompile.collectives.contract import ShardGroup, ShardUnit
from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.packing import PackedUnits
from dcompile.runtime.communication.peer_memory.all_gather import PendingCopyGather
from dcompile.runtime.communication.work import PendingCollective


@dataclass(eq=False, slots=True)
class PendingGather:
    """A gather in flight."""

    collective: PendingCollective | PendingCopyGather
    shards: list[torch.Tensor]
    """Tensors that the gather reads; they must live until it is done."""
    parcel: PackedUnits | None
    """Units that arrive as one message and are unpacked afterwards."""
    group: Any
    full: list[torch.Tensor]
    """Tensors of the units that the gather fills."""


@dataclass(eq=False)
class PendingReduction:
    """A reduction in flight."""

    name: str
    group: ShardGroup
    flat: torch.Tensor
    """All shards of this rank, end to end."""
    shards: dict[int, torch.Tensor]
    collective: PendingCollective
    absent: frozenset[int] = frozenset()
    """Units that this rank has no gradient of."""
    scattered: bool = False
    """Whether the reduce-scatter is done: this rank has its shards."""
    complete: bool = True
    """Whether the shards become gradients; otherwise they are kept until replicas are averaged over."""
    replicating: PendingCollective | None = None
    """The all-reduce among replicas."""


def coalescing(bucket: Bucket) -> str:
    return f", {len(bucket.packed)} together" if bucket.packed else ""


@contextlib.contextmanager
def named_error(what: str, numbers: Iterable[int], units: Mapping[int, ShardUnit], group: Any) -> Iterator[None]:
    """Add a note to a RuntimeError: the collective that failed, its parameters, and its ranks."""
    try:
        yield
    except RuntimeError as error:
        names = [units[number].name for number in numbers]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        error.add_note(
            f"dcompile: rank {dist.get_rank()} was in {what} of {', '.join(names[:3])}{more}, "
            f"over ranks {dist.get_process_group_ranks(group)}; "
            "another rank has failed, stalled, or does not run this step"
        )
        raise
