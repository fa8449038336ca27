"""What stands in for communication where a step is planned for explain, or compiled for ranks that are absent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from dcompile.collectives.contract import ShardGroup, ShardUnit
from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.ddp_buckets import ReducedRun


class NoBuckets:
    """Implements `capture.services.GradientBuckets` without reductions: autograd keeps the gradients."""

    def __init__(self) -> None:
        self.order: tuple[tuple[int, ...], ...] = ()
        self.times_ns = [0, 0, 0]

    def begin(self, used: Any = (), task: object = None, first: bool = True, absent: Any = ()) -> None: ...

    def mark_used(self, numbers: Iterable[int]) -> None: ...

    def reduce_behind(self, numbers: Collection[int], before: Collection[int]) -> None: ...

    def settle_idle(self, elsewhere: Collection[int]) -> None: ...

    def last_run(self) -> ReducedRun:
        """No gradients."""
        return ReducedRun({}, {}, lambda number: None)

    def handed_on(self) -> Collection[int]:
        """No parameters."""
        return ()

    def ranks_with_gradients(self) -> dict[int, int]:
        """No parameters."""
        return {}

    def forget(self) -> None: ...

    def reduced(self) -> dict[int, int]:
        """Parameters whose gradients were reduced."""
        return {}

    def reduced_gradient(self, number: int) -> Any:
        """Raises KeyError: nothing is reduced."""
        raise KeyError(number)


class LocalShards:
    """Implements `capture.services.ShardedParameters` without communication; `commit` makes gradients of no value."""

    def __init__(self, units: Mapping[int, ShardUnit], groups: Mapping[str, ShardGroup]) -> None:
        self._units, self._groups = units, groups
        self._later: frozenset[int] = frozenset()
        self._accumulates = False
        self.wanted: dict[int, Any] = {}

    def source(self, buckets: Any, phase: Any, accumulates: bool = False, later: Any = (), *of_units: Any) -> Any:
        """Return the receiver of a program's gradients."""
        self._accumulates, self._later = accumulates, frozenset(later)
        return self

    def commit(self, buckets: Sequence[Bucket]) -> None:
        """Give each unit of a reduced bucket a gradient of the shape that a reduction gives."""
        for bucket in buckets:
            group = self._groups[bucket.group]
            if bucket.kind != "reduce_scatter" or not self._accumulates or group.wants() == "nothing":
                continue
            ranks = group.scatter_group().size()
            for number, numel in zip(bucket.units, bucket.sizes, strict=True):
                if number not in self._later:
                    unit, dtype = self._units[number], getattr(torch, bucket.dtype)
                    shard = torch.empty(numel // ranks, dtype=dtype, device=unit.data().device)
                    unit.commit(shard)

    def may_lack(self, units: Iterable[int]) -> None: ...

    def save_memory(self, reason: str) -> None: ...

    def forget_parts(self) -> None: ...

    def update_scales(self) -> None: ...

    def join(self, *_: Any) -> None: ...

    def note(self) -> str:
        return ""

    def take(self, full: Any) -> None: ...

    def give_back(self, from_now_on: bool = True) -> None: ...

    def copied(self, group: str) -> tuple[bool, str]:
        return False, ""

    def flush(self, outside: Any = None) -> None: ...

    def reduce_behind(self, full: Any) -> None: ...


def no_buckets(*_: Any) -> Any:
    """Make the buckets of a program that reduces nothing."""
    return NoBuckets()


def do_nothing(*_: Any, **__: Any) -> None:
    """Take the place of an exchange between ranks."""
