"""Sharded parameters that not every backward has a gradient of: what only a result leads to that no loss has used.

Reductions are the same in each backward, with zeros for what is absent. Whether that becomes a gradient, which momentum
and weight decay would move a parameter by, is for all ranks to say together: one of them may have used the result.
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
    """The units of one model that this is asked about, at the end of each backward that has reduced them."""

    units: Mapping[int, ShardUnit]
    groups: Mapping[str, ShardGroup]
    known: set[int] = field(init=False, default_factory=set)
    """By number. That follows from the programs that have run, so it is the same on every rank."""
    _reduced: dict[int, tuple[torch.Tensor, bool]] = field(init=False, default_factory=dict)
    """Unit -> its reduced shard, and whether this rank has had a gradient of it."""

    def hold(self, number: int, shard: torch.Tensor, had: bool) -> bool:
        """Note what has come of a reduction; whether to keep the shard back until `settle`."""
        if number in self.known:
            self._reduced[number] = shard, had
            return not had
        return False

    def forget(self) -> None:
        """The backward has failed."""
        self._reduced.clear()

    def settle(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Ask the other ranks: (unit, shard) of those kept back that another rank has had a gradient of."""
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
