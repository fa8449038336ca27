"""Which ranks have a gradient of which parameter, where a backward may lack some.

Ranks agree on sharded gradients that a backward may lack, where no loss used the result that leads to them.

Each backward runs the same reductions, with zeros for absent gradients. Ranks must decide together whether a reduced
shard becomes a gradient: another rank may have used the result. As a gradient, zeros would let momentum and weight
decay move the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from dcompile.collectives.contract import ShardGroup, ShardUnit
from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.work import start_sum


@dataclass(eq=False)
class UncertainUnits:
    """Units of one model whose gradients may be absent.

    Ranks agree on them at the end of each backward that reduces them.
    """

    units: Mapping[int, ShardUnit]
    groups: Mapping[str, ShardGroup]
    known: set[int] = field(init=False, default_factory=set)
    """Numbers of these units. They follow from the programs that have run, so they are the same on every rank."""
    _reduced: dict[int, tuple[torch.Tensor, bool]] = field(init=False, default_factory=dict)
    """Unit -> its reduced shard, and whether this rank had a gradient of it."""

    def hold(self, number: int, shard: torch.Tensor, had: bool) -> bool:
        """Note a reduced shard. Return whether to hold it back until `settle`."""
        if number in self.known:
            self._reduced[number] = shard, had
            return not had
        return False

    def forget(self) -> None:
        """Drop the state of a backward that failed."""
        self._reduced.clear()

    def settle(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Ask the other ranks, and yield (unit, shard) of held shards of which another rank had a gradient."""
        reduced, self._reduced = self._reduced, {}
        by_group: dict[str, list[int]] = {}
        for number in sorted(reduced):
            by_group.setdefault(self.units[number].group, []).append(number)
        for name, numbers in by_group.items():
            device = reduced[numbers[0]][0].device
            had = torch.tensor([float(reduced[number][1]) for number in numbers], device=device)
            group = self.groups[name]
            for ranks in (group.scatter_group(), group.replica_group()):
                if isinstance(ranks, dist.ProcessGroup):
                    start_sum(ranks, had, f"all-reduce of which gradients there are ({had.numel()} elements)").wait()
            if any(not reduced[number][1] for number in numbers):  # else nobody need wait for the GPU
                for number, ranks_with_it in zip(numbers, had.tolist(), strict=True):
                    if ranks_with_it and not reduced[number][1]:
                        yield number, reduced[number][0]


class FlaggedMemory(Protocol):
    """Memory of a bucket, which ends with its presence flags."""

    flat: torch.Tensor


@dataclass(eq=False)
class RanksWithGradients:
    """Number of ranks that had a gradient of each parameter, in the last backward that reduced.

    It is read from the presence flags of reduced buckets when somebody asks: until then it costs nothing.
    """

    _flagged: dict[str, tuple[Bucket, Callable[[], FlaggedMemory | None], float]] = field(
        init=False, default_factory=dict
    )
    """Bucket -> (its layout, weak reference to its memory, the flag of one rank after the all-reduce)."""

    def note(self, bucket: Bucket, memory: FlaggedMemory, one: float) -> None:
        """Note a reduced bucket. `one`: what a flag of 1 was scaled to before the sum."""
        if bucket.marks:
            self._flagged[bucket.name] = bucket, weakref.ref(memory), one

    def counts(self) -> dict[int, int]:
        """Return parameter number -> number of ranks, rounded where the gradients' dtype cannot hold it."""
        found = {}
        for bucket, known, one in self._flagged.values():
            memory = known()
            flags = [] if memory is None else memory.flat[-bucket.marks :].tolist()
            found.update({number: round(flag / one) for (number, _), flag in zip(bucket.places, flags, strict=False)})
        return found
