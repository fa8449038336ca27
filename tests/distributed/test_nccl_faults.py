"""Faults between two GPUs over NCCL: a rank that dies, one that calls the job off, and what ends after replays."""

import time

import pytest

from tests.distributed.cases import ATEN, GRAPHS

pytestmark = pytest.mark.gpu
CASES = "tests.faults.rank_cases:"
HOW = [
    pytest.param(wrap, options, id=f"{wrap}{', recorded' if options is GRAPHS else ''}")
    for wrap in ("ddp", "fsdp2")
    for options in (ATEN, GRAPHS)
]


@pytest.mark.parametrize(("wrap", "options"), HOW)
def test_process_groups_end_at_once_after_steps(ranks, wrap, options):
    """And each step, replayed or not, counts the same collectives: a rank may replay beside one that does not."""
    for took, replays, counts in ranks.run(CASES + "ends_after_steps", 120, wrap=wrap, **options):
        print(f"destroy_process_group after {replays} replays: {took:.2f} s")
        assert took < 5
        assert replays >= (4 if options is GRAPHS else 0)
        assert len(set(counts)) == 1 and counts[0] >= 1


def test_ranks_that_differ_are_all_told_how(ranks):
    for wrap in ("ddp", "fsdp2"):
        for kind, message, took in ranks.run(CASES + "other_branch", 60, wrap=wrap):
            print(f"{wrap}: PlanMismatchError after {took:.2f} s, tracing and compiling included")
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
        print(f"ended {took:.2f} s after it began")
        assert took < 10
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(("wrap", "options"), HOW)
def test_a_rank_that_is_killed_ends_the_other_which_names_the_collective(ranks, tmp_path, wrap, options):
    ranks.run(CASES + "is_second")  # a fresh pair still has to start
    said, died = tmp_path / "said", tmp_path / "died"
    files = {"said": str(said), "died": str(died)}
    first, second = ranks.outcomes(CASES + "killed_in_backward", 60, wrap=wrap, **files, **options)
    took = time.time() - float(died.read_text())
    print(f"the other rank ended {took:.2f} s later")
    assert took < 30
    assert second.kind == "EOFError" and first.error
    text = first.error + said.read_text()
    assert ("all-reduce of gradient bucket0" if wrap == "ddp" else "gather0") in text, text
    assert "rank 1 is gone: its process" in text, text
