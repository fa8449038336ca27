"""What a check of sharded gradients leaves out takes no collective."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dcompile.bisect.watched_shards import WatchedShards
from dcompile.collectives.contract import ParamInfo, Shard

INFO = ParamInfo(0, "weight", (6,), "float32", "cpu", "sharded", "ranks", Shard(0, 0, 0, 6, "float32", reshard=True))


@pytest.mark.parametrize(
    ("parts", "reduced", "averaged"),
    [((), {0: torch.ones(6)}, {0}), ((4, 2), {0: torch.ones(4)}, set()), ((), {}, set())],
)
def test_only_reduced_units_of_equal_parts_are_averaged(monkeypatch, parts, reduced, averaged):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat, group: None)
    rule = SimpleNamespace(divide_before=None, divide_after=None, scatter=torch.distributed.ReduceOp.AVG)
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    group = SimpleNamespace(reduction=lambda dtype: rule, scatter_group=lambda: one, replica_group=lambda: None)
    unit = SimpleNamespace(parts=parts, group="ranks")
    shards = SimpleNamespace(units={0: unit}, groups={"ranks": group}, unreduced=SimpleNamespace(whole={}))
    watched = WatchedShards(SimpleNamespace(shards=shards))
    watched.reduced |= reduced
    found = watched.averaged([(INFO, torch.arange(6.0))])
    assert found.keys() == averaged and all(torch.equal(shard, torch.arange(6.0)) for shard in found.values())
