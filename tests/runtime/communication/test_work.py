"""A collective in flight whose communicator ends: what its caller gets."""

from __future__ import annotations

import pytest
import torch

from dcompile import compat
from dcompile.errors import PlanMismatchError
from dcompile.runtime.communication import work as module
from dcompile.runtime.communication.work import PendingCollective
from tests.runtime.ranks import Ranks

ABORTED = "NCCL communicator was aborted on rank 0."


class Aborted:
    """A work of a communicator that is aborted."""

    def wait(self):
        raise RuntimeError(ABORTED)


def start_none(limit_s):
    raise RuntimeError(ABORTED)


@pytest.fixture
def ranks(monkeypatch):
    made = Ranks(monkeypatch)
    monkeypatch.setattr(compat.groups, "is_gloo", lambda group, device: False)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 0)
    yield made
    made.stop()


def give_up(line):
    with pytest.raises(PlanMismatchError):
        line.call_off("rank 1 has had enough")


def collective(monkeypatch, peers, start):
    monkeypatch.setattr(module, "peers_of", lambda group: peers)
    PendingCollective(None, torch.device("cpu"), "all-reduce of gradient bucket0", start).wait()


@pytest.mark.parametrize("start", [start_none, lambda limit_s: Aborted()], ids=["as it starts", "as it is waited for"])
def test_the_reason_that_another_rank_gave_is_raised_once(ranks, monkeypatch, start):
    """The abort may come before the coordinator's thread has read the reason. No exception follows in a later line."""
    first, second = ranks.start(2)
    first._check_peers = lambda: None  # its thread is late
    ranks.each(give_up, [second])
    with pytest.raises(PlanMismatchError, match="rank 1 has had enough") as error:
        collective(monkeypatch, first, start)
    assert ABORTED in str(error.value.__cause__) and first.reported.is_set()


@pytest.mark.parametrize("start", [start_none, lambda limit_s: Aborted()], ids=["as it starts", "as it is waited for"])
def test_an_error_that_nobody_explains_is_raised_with_the_collectives_name(ranks, monkeypatch, start):
    first, _ = ranks.start(2)
    with pytest.raises(RuntimeError, match=ABORTED) as error:
        collective(monkeypatch, first, start)
    assert "was waiting for the all-reduce of gradient bucket0, number 1" in "\n".join(error.value.__notes__)


def test_equal_models_whose_backwards_swap_places_on_one_rank_are_noticed(ranks, monkeypatch):
    """Both models have buckets of one name and size; only the number of the model tells them apart."""
    lines = ranks.start(2)
    lines[1].rank = 1  # the fixture gives both the same
    of_group = {id(group): line for group, line in zip(ranks.groups, lines, strict=True)}
    monkeypatch.setattr(module, "peers_of", lambda group: of_group[id(group)])
    for rank, (group, line) in enumerate(zip(ranks.groups, lines, strict=True)):
        actor, critic = {}, {}
        for numbers in (actor, critic, *((critic, actor) if rank else (actor, critic))):
            line.count(module.label_of_model("all-reduce of gradient bucket0 (64 elements)", group, numbers))
        assert (actor, critic) == ({group: 1}, {group: 2}), "counted alike"
    lines[0]._publish_status(lines[0].store)
    with pytest.raises(
        PlanMismatchError, match=r"rank 0: all-reduce .* of model 2\n  rank 1: all-reduce .* of model 1"
    ):
        lines[1]._compare_with_rank_0()
        lines[1].check()
