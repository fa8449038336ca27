"""Agreement over the store: ranks are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dcompile.errors import PlanMismatchError
from dcompile.runtime import agree as module
from dcompile.runtime.agree import agree


@pytest.fixture
def ranks(monkeypatch):
    """Run agree on several ranks at once: what each raised, or None."""
    here = threading.local()
    monkeypatch.setattr(module, "group_store", lambda group: group)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: here.rank)
    worlds = {}
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: worlds[id(group)])

    def run(plans, world=None, subject="plan", store=None, timeout_s=5, everyone=True):
        store = store or dist.HashStore()
        worlds[id(store)] = world or len(plans)

        def one(rank):
            here.rank = rank
            try:
                agree(store, subject, plans[rank], everyone, timeout_s)
            except PlanMismatchError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(len(plans)) as pool:
            return list(pool.map(one, range(len(plans))))

    return run


def test_equal_plans(ranks):
    assert ranks([["a", "b"]] * 4) == [None] * 4


@pytest.mark.parametrize(
    ("plans", "entry", "said"),
    [
        ([["a", "b"], ["a", "c"]], 1, ("rank 0: b", "rank 1: c")),
        ([["a"], ["a", "b"]], 1, ("rank 0: (nothing)", "rank 1: b")),
        ([["a"], ["a"], ["x"]], 0, ("rank 0: a", "rank 2: x")),
    ],
)
def test_every_rank_is_told_the_first_difference(ranks, plans, entry, said):
    for message in ranks(plans):
        assert f"first at entry {entry}" in message and all(text in message for text in said)


def test_subjects_are_apart(ranks):
    store = dist.HashStore()
    assert ranks([["a"]] * 2, subject="one", store=store) == [None] * 2
    assert ranks([["b"]] * 2, subject="two", store=store) == [None] * 2


def test_looking_at_rank_0_alone_the_ranks_that_differ_raise(ranks):
    assert ranks([["a"]] * 3, everyone=False) == [None] * 3
    first, second, third = ranks([["a"], ["x"], ["a"]], subject="other", everyone=False)
    assert first is None and third is None
    assert "rank 0: a" in second and "rank 1: x" in second


def test_looking_at_rank_0_alone_nobody_waits_for_others(ranks):
    assert ranks([["a"]], world=2, everyone=False) == [None]


def test_a_rank_that_never_comes_is_an_error_in_time(ranks):
    (message,) = ranks([["a"]], world=2, timeout_s=0.3)
    assert "rank 0 waited 0.3 s" in message


def test_what_was_said_before_a_restart_is_not_believed(ranks, monkeypatch):
    store = dist.HashStore()
    assert ranks([["old"], ["old"]], store=store) == [None, None]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert ranks([["new"], ["new"]], store=store) == [None, None]
