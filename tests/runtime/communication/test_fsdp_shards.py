"""Gradients that wait for more, as autograd adds them, and reduced shards that become gradients, now or later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dcompile.errors import DcompileError
from dcompile.runtime.communication import gradient_presence
from dcompile.runtime.communication.fsdp_shards import DeferredGradients, Shards


def made(dtype=torch.float32, numbers=(0, 1)):
    taken = {}
    units = {
        n: SimpleNamespace(name=f"unit{n}", dtype=dtype, take_back=lambda whole, n=n: taken.__setitem__(n, whole))
        for n in numbers
    }
    return DeferredGradients(units), taken


def number(value):
    return torch.tensor([value])


def test_what_a_backward_has_begun_is_added_before_what_earlier_ones_left():
    kept, _ = made()
    kept.keep({0: number(2.0**24)})  # an earlier backward's: adding 1 to it changes nothing
    kept.keep({0: number(1.0)}, later={0})
    last = number(1.0)
    kept.add_to(0, last)
    assert last.item() == 2**24 + 2
    assert not kept.holds([0])


def test_sums_of_one_backward_are_rounded_as_autograd_rounds_them():
    kept, _ = made(torch.bfloat16)
    kept.keep({0: number(1.0)}, later={0})
    last = number(2.0**-9)
    kept.add_to(0, last)
    assert last.item() == 1.0, "bfloat16 has eight bits"
    kept.keep({0: number(1.0)})
    last = number(2.0**-9)
    kept.add_to(0, last)
    assert last.item() == 1 + 2.0**-9, "sums over backwards are in the dtype of the reduction"


def test_what_no_other_program_adds_to_is_left_over_at_the_end():
    kept, taken = made()
    kept.keep({0: number(1.0), 1: number(2.0)}, later={1})
    assert list(kept.whole) == [0] and kept.holds([1])
    kept.end()
    assert {n: whole.item() for n, whole in kept.whole.items()} == {0: 1, 1: 2} and not taken


def test_a_backward_that_failed_leaves_nothing_to_the_next():
    kept, _ = made()
    kept.keep({0: number(1.0)}, later={0})
    kept.forget_failed()
    last = number(3.0)
    kept.add_to(0, last)
    assert last.item() == 3


def test_fsdp_gets_what_is_left_and_what_later_backwards_keep():
    kept, taken = made()
    kept.keep({0: number(1.0)})
    kept.give_back()
    assert taken[0].item() == 1 and not kept.whole
    kept.keep({1: number(2.0)}, later={1})
    kept.end()
    assert taken[1].item() == 2 and not kept.whole


def test_sums_among_some_ranks_cannot_be_given_back():
    kept, _ = made()
    kept.partial[1] = number(1.0)
    with pytest.raises(DcompileError, match="unit1 are summed up among some ranks only"):
        kept.give_back()


def test_zeros_of_an_absent_gradient_are_told_from_real_ones():
    kept, taken = made()
    kept.keep({0: number(0.0), 1: number(1.0)}, absent=[0])
    assert kept.real == {1}
    kept.keep({0: number(1.0)})
    assert kept.real == {0, 1}
    kept.add_to(1, number(0.0))
    assert kept.real == {0}
    kept.keep({1: number(0.0)}, absent=[1])
    kept.give_back()
    assert taken.keys() == {0}


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
