"""Reduce-scatters with parts of different size, over Gloo. Ranks are threads of this process."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dcompile.runtime.communication.uneven_scatter import UnevenReduceScatter

PARTS = [(12, 3, 0), (0, 0, 7), (5, 6, 4), (0, 4, 9)]
"""Of four tensors, the elements that belong to each of three ranks."""


def on_ranks(world, run):
    """What `run(group, rank)` returns on each rank of a new group."""
    store, groups = dist.HashStore(), []  # kept until all are through

    def rank(number):
        group = dist.ProcessGroupGloo(store, number, world, timedelta(seconds=60))
        groups.append(group)
        return run(group, number)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(rank, range(world)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_the_sum_of_its_part(dtype):
    def given(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.randint(-8, 8, (sum(parts),), generator=generator).to(dtype) for parts in PARTS]

    wanted = [torch.stack(tensors).sum(0) for tensors in zip(*map(given, range(3)), strict=True)]

    def run(group, rank):
        shards = [torch.full((parts[rank],), torch.nan, dtype=dtype) for parts in PARTS]
        work = UnevenReduceScatter(group, shards, given(rank), PARTS, dist.ReduceOp.SUM, 60)
        work.wait(timedelta(seconds=60))
        work.wait(timedelta(seconds=60))  # changes nothing
        assert work.is_completed()
        starts = [sum(parts[:rank]) for parts in PARTS]
        places = zip(shards, wanted, starts, strict=True)
        return all(torch.equal(shard, whole[start : start + len(shard)]) for shard, whole, start in places)

    assert on_ranks(3, run) == [True] * 3
