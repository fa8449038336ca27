"""Faults between two GPUs over NCCL: a rank that dies, one that calls the job off, and what ends after replays."""

import time

import pytest
import torch

from tests.distributed.harness import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CASES = "tests.faults.rank_cases:"
ATEN = {"kernels": "aten"}
GRAPHS = {"kernels": "aten", "triton.cudagraphs": True}
HOW = [
    pytest.param(wrap, options, id=f"{wrap}{', recorded' if options is GRAPHS else ''}")
    for wrap in ("ddp", "fsdp2")
    for options in (ATEN, GRAPHS)
]


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks(backend="nccl")
    yield pair
    pair.stop()


@pytest.mark.parametrize(("wrap", "options"), HOW)
def test_process_groups_end_at_once_after_steps(ranks, wrap, options):
    """And each step, replayed or not, counts the same collectives: a rank may replay beside one that does not."""
    for took, replays, counts in ranks.run(CASES + "ends_after_steps", 120, wrap=wrap, **options):
        assert took < 5
        assert replays >= (4 if options is GRAPHS else 0)
        assert len(set(counts)) == 1 and counts[0] >= 1


def test_ranks_that_differ_are_all_told_how(ranks):
    for wrap in ("ddp", "fsdp2"):
        for kind, message, took in ranks.run(CASES + "other_branch", 60, wrap=wrap):
            assert kind == "PlanMismatchError" and "tanh" in message and took < 10


def test_a_rank_that_runs_fewer_steps_fails_as_the_others_do(ranks):
    first, second = ranks.run(CASES + "skips_a_step", 60)
    assert first[0] == second[0] == "PlanMismatchError"
    assert "rank 1 has ended after 3 collectives" in first[1] and "number 4 of this group" in first[1]


@pytest.mark.parametrize(("wrap", "options"), HOW)
def test_a_job_that_is_called_off_ends_what_the_other_waits_for(ranks, wrap, options):
    began = time.monotonic()
    for kind, message, took in ranks.run(CASES + "called_off_meanwhile", 60, wrap=wrap, **options):
        assert kind == "PlanMismatchError" and "rank 1 has had enough" in message
        assert took < 10
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(("wrap", "options"), HOW)
def test_a_rank_that_is_killed_ends_the_other_which_names_the_collective(ranks, tmp_path, wrap, options):
    ranks.run(CASES + "is_second")  # a fresh pair still has to start
    began = time.monotonic()
    said = tmp_path / "said"
    first, second = ranks.outcomes(CASES + "killed_in_backward", 60, wrap=wrap, said=str(said), **options)
    assert time.monotonic() - began < 45
    assert second.kind == "EOFError" and first.error
    text = first.error + said.read_text()
    assert ("all-reduce of gradient bucket0" if wrap == "ddp" else "gather0") in text, text
    assert "rank 1 has fallen silent" in text, text
