"""Agree between ranks on sharded gradients that a backward may lack, where no loss used the result that leads to them.

Each backward runs the same reductions, with zeros for absent gradients. Ranks must decide together whether a reduced
shard becomes a gradient: another rank may have used the result. As a gradient, zeros would let momentum and weight
decay move the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dcompile.collectives.contract import ShardGroup, ShardUnit
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
