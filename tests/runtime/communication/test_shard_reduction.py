"""Reduced shards that become gradients: at once, or once it is known which ranks have one."""

import pytest
import torch
import torch.distributed as dist

from dcompile.runtime.communication import gradient_presence
from dcompile.runtime.communication.fsdp_shards import Shards


@pytest.fixture(scope="module", autouse=True)
def group():
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Holder:
    """A unit of sharded parameters that only notes what becomes its gradient."""

    group, name, offloaded = "fsdp0", "w", False

    def __init__(self):
        self.gradients = []

    def commit(self, shard):
        self.gradients.append(shard.tolist())


class OneGroup:
    """All of them are sharded over one rank."""

    def scatter_group(self):
        return dist.group.WORLD

    def replica_group(self):
        return None


@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
def test_zeros_of_an_absent_shard_are_a_gradient_if_another_rank_has_one(elsewhere, monkeypatch):
    units = {0: Holder(), 1: Holder(), 2: Holder()}
    shards = Shards(units, {"fsdp0": OneGroup()})
    shards.may_lack([0, 1])

    def start(group, tensor, label):
        assert tensor.tolist() == [0.0, 1.0]
        tensor[0] += elsewhere
        return dist.all_reduce(tensor, group=group, async_op=True)

    monkeypatch.setattr(gradient_presence, "start_sum", start)
    shards.commit({0: torch.zeros(2), 1: torch.ones(2), 2: torch.zeros(2)}, absent=[0])
    shards.flush()
    assert [unit.gradients for unit in units.values()] == [
        [[0.0, 0.0]] if elsewhere else [],
        [[1.0, 1.0]],
        [[0.0, 0.0]],
    ]
    shards.flush()  # nothing is left over
