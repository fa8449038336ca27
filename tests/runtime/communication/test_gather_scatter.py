"""Gathers and reduce-scatters over Gloo, between threads of this process, also with parts of different sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dcompile.runtime.communication.gather_scatter import (
    ALONE_BYTES,
    GlooAllGather,
    GlooReduceScatter,
    UnevenReduceScatter,
)

SIZES = (12, 0, ALONE_BYTES // 4, 60, ALONE_BYTES // 2, 24)
"""Elements: sent together, nothing at all, sent alone."""


def on_ranks(world, run):
    """What `run(group, rank)` returns on each rank of a new group."""
    store = dist.HashStore()
    groups = []  # kept until all are through: one that ended at once would be gone while another still connects

    def rank(number):
        group = dist.ProcessGroupGloo(store, number, world, timedelta(seconds=60))
        groups.append(group)
        return run(group, number)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(rank, range(world)))


def made(rank, world, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    full = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    return full, [torch.full((size // world,), torch.nan, dtype=dtype) for size in SIZES]


def limit():
    return timedelta(seconds=60)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("average", [False, True])
def test_on_two_ranks_sums_are_gloos_bit_for_bit(dtype, average):
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM

    def run(group, rank):
        full, shards = made(rank, 2, dtype)
        before = [tensor.clone() for tensor in full]
        work = GlooReduceScatter(group, shards, full, average, 60)
        work.wait(limit())
        work.wait(limit())  # changes nothing
        assert work.is_completed()
        assert all(map(torch.equal, full, before)), "what is sent stays as it is"
        options = dist.AllreduceOptions()
        options.reduceOp = op
        for tensor in filter(torch.Tensor.numel, full):
            group.allreduce([tensor], options).wait()
        return all(map(torch.equal, shards, (tensor.chunk(2)[rank] for tensor in full)))

    assert on_ranks(2, run) == [True, True]


def test_on_three_ranks_parts_are_added_in_order_of_ranks():
    def run(group, rank):
        full, shards = made(rank, 3)
        full, shards = full[:1], shards[:1]
        GlooReduceScatter(group, shards, full, True, 60).wait(limit())
        parts = [made(other, 3)[0][0].view(3, -1)[rank] for other in range(3)]
        return torch.equal(shards[0], (parts[0] + parts[1] + parts[2]) / 3)

    assert on_ranks(3, run) == [True] * 3


def test_waiting_has_a_limit():
    """The other rank is late: waiting ends with an error, and succeeds later on."""

    def run(group, rank):
        full, shards = made(rank, 2)
        began = torch.zeros(1)
        if rank == 0:
            work = GlooReduceScatter(group, shards, full, False, 60)
            with pytest.raises(RuntimeError):
                work.wait(timedelta(seconds=0.1))
            assert not work.is_completed() and shards[0].isnan().all()
            group.send([began], 1, 7).wait()
        else:
            group.recv([began], 0, 7).wait()
            work = GlooReduceScatter(group, shards, full, False, 60)
        work.wait(limit())
        return not any(shard.isnan().any() for shard in shards)

    assert on_ranks(2, run) == [True, True]


@pytest.mark.parametrize("world", [2, 3])
def test_gathers_bring_every_ranks_shards(world):
    def run(group, rank):
        _, shards = made(rank, world)
        shards = [shard.copy_(torch.arange(len(shard)) + rank / 4) for shard in shards]
        full = [torch.full((world * len(shard),), torch.nan) for shard in shards]
        work = GlooAllGather(group, full, shards, 60)
        work.wait(limit())
        work.wait(limit())  # changes nothing
        wanted = [torch.cat([torch.arange(len(shard)) + other / 4 for other in range(world)]) for shard in shards]
        return work.is_completed() and all(map(torch.equal, full, wanted))

    assert on_ranks(world, run) == [True] * world


def test_nothing_is_gathered_of_empty_tensors():
    def run(group, rank):
        work = GlooAllGather(group, [torch.empty(0)], [torch.empty(0)], 60)
        return work.wait() and work.is_completed()

    assert on_ranks(2, run) == [True, True]


PARTS = [(12, 3, 0), (0, 0, 7), (5, 6, 4), (0, 4, 9)]
"""Of four tensors, the elements that belong to each of three ranks."""


def on_new_ranks(world, run):
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

    assert on_new_ranks(3, run) == [True] * 3
