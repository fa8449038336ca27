"""Two Gloo ranks of which one goes wrong: a right result, or one clear error on each, and no hang."""

import re
import shutil
import time

import pytest

from tests.distributed.harness import Ranks

CASES = "tests.faults.rank_cases:"


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    run(pair, "is_second")  # what is timed below is not to import torch's compiler first
    yield pair
    pair.stop()


def run(ranks, case, seconds=60, **keywords):
    return ranks.run(CASES + case, seconds, **keywords)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "other_order",
            ("their captured graphs", "rank 0: parameter b.weight", "rank 1: parameter c.weight"),
        ),
        ("other_settings", ("rank 0: option matmul=own\n", "rank 1: option matmul=aten\n")),
        (
            "other_branch",
            ("their captured graphs", "tanh", "rank_cases.py:", "static_graph=True", "'stock'"),
        ),
        ("left_to_ddp_on_one_rank", ("gradients of a model", "dcompile reduces them", "a communication hook")),
        ("another_plan_later", ("rank 0: all-reduce of gradient bucket0", "rank 1: all_reduce bucket0")),
    ],
)
def test_ranks_that_differ_are_all_told_how(ranks, case, words):
    assert_all_are_told(run(ranks, case), *words)


def test_sharded_ranks_that_differ_are_all_told_how(ranks):
    words = ("their captured graphs", "tanh", "rank_cases.py:", "options={'distributed': 'stock'}")
    assert_all_are_told(run(ranks, "other_branch", wrap="fsdp2"), *words)


def assert_all_are_told(outcomes, *words):
    first, second = outcomes
    assert first[0] == second[0] == "PlanMismatchError"
    assert first[1] == second[1], "the same words on both"
    assert all(word in first[1] for word in words), first[1]
    assert max(first[2], second[2]) < 10


# --- right in the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_graph_break_on_one_rank_that_leaves_the_same_calls(ranks, wrap):
    assert run(ranks, "breaks_on_one_rank", wrap=wrap) == [("", 0), ("", 1)]


def test_a_guard_that_misses_on_one_rank_alone(ranks):
    for worst, eligible in run(ranks, "guards_miss_on_one_rank"):
        assert worst < 1e-4 and eligible


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_rank_that_compiles_is_waited_for_beyond_the_time_limit(ranks, wrap):
    for _, took in run(ranks, "slow_compile_on_one_rank", each=1.0, wrap=wrap):
        assert took > 1.9


STALLED = "rank 1 is alive, but has stalled"
SILENT = r"rank 1 has been silent for \d\.\d s: its process \d+ is there, perhaps in a long call"


@pytest.mark.parametrize(
    ("wrap", "collective", "number", "how", "status"),
    [
        ("ddp", "all-reduce of gradient bucket0", 2, {}, STALLED),
        ("fsdp2", "all-gather gather0", 9, {}, STALLED),
        ("kept", "reduce-scatter scatter0", 7, {"lock": True, "limit_s": 2.5}, SILENT),
    ],
)
def test_a_stall_ends_at_the_time_limit_with_the_collectives_name(ranks, wrap, collective, number, how, status):
    limit_s = how.get("limit_s", 1.5)
    (kind, message, took), _ = run(ranks, "stalls", wrap=wrap, **how)
    assert kind == "DcompileError" and limit_s - 0.1 < took < limit_s + 2
    said = re.search(rf"rank 0 waited (\d\.\d) s for the {collective}", message)
    assert said and limit_s - 0.1 < float(said[1]) <= took + 0.1 and f"number {number} of this group" in message
    assert re.search(status, message), message


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_a_job_that_is_called_off_ends_the_others_wait(ranks, wrap):
    for kind, message, took in run(ranks, "called_off_meanwhile", wrap=wrap):
        assert kind == "PlanMismatchError" and "rank 1 has had enough" in message and took < 10


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_process_groups_end_at_once_after_steps(ranks, wrap):
    """Every step counts the same collectives. On GPUs, behind replays: tests/distributed/test_nccl_faults.py."""
    for took, _, counts in run(ranks, "ends_after_steps", wrap=wrap):
        assert took < 5 and len(set(counts)) == 1


def test_a_rank_that_runs_fewer_steps_fails_as_the_others_do(ranks):
    first, second = run(ranks, "skips_a_step")
    assert first[0] == second[0] == "PlanMismatchError" and first[1] == second[1]
    assert "rank 1 has ended after 3 collectives" in first[1] and "number 4 of this group" in first[1]


def test_a_process_group_that_has_ended(ranks):
    for (kind, message, _), works_again in run(ranks, "called_after_the_group_has_ended"):
        assert kind in ("DcompileError", "RuntimeError", "ValueError") and "process group" in message.lower()
        assert works_again


def test_parameters_in_another_dtype_than_their_buckets_are_an_error_that_says_so(ranks):
    for kind, message, _ in run(ranks, "recast_between_steps"):
        assert kind == "DcompileError" and "parameter c.weight was float32 of shape (40, 40) on cpu" in message
        assert "float64 of shape (40, 40) on cpu now" in message and "wrap the model" in message


# --- artifacts --------------------------------------------------------------------------------------------------------


def total(found, name):
    return sum(rank[name] for rank in found)


def test_one_rank_compiles_for_all(ranks, tmp_path):
    """Whichever comes first to a graph: forward and backward may be compiled by one each."""
    first = run(ranks, "shared", folder=str(tmp_path))
    assert total(first, "built") > 0 and total(first, "graphs_received") == 2
    assert total(first, "kernels_received") == total(first, "built") + total(first, "cache_hits")
    assert total(first, "graphs_cached") == 0
    assert [found["notes"] for found in first] == [(), ()]
    assert first[0]["gradients"] == first[1]["gradients"]

    for again in run(ranks, "shared", folder=str(tmp_path)):
        assert (again["built"], again["graphs_cached"], again["graphs_received"]) == (0, 2, 0)
        assert (again["traces_cached"], again["traces_uncacheable"]) == (1, {})
        assert again["gradients"] == first[0]["gradients"]


def test_kernels_of_another_rank_are_not_said_to_be_from_the_cache_of_both(ranks, tmp_path):
    found = run(ranks, "shared", folder=str(tmp_path), joint=True, matmul="aten")
    assert total(found, "graphs_received") == 2 and total(found, "cache_hits") == 0
    assert total(found, "kernels_received") == total(found, "built") > 0


@pytest.mark.parametrize("lost", [0, 1])
def test_a_warm_rank_trains_beside_a_cold_one(ranks, tmp_path, lost):
    how = {"folder": str(tmp_path), "wrap": ("ddp", "fsdp2")[lost], "matmul": "aten"}  # products of ours take 0.7 s
    before = run(ranks, "shared", **how)
    shutil.rmtree(tmp_path / f"rank{lost}")
    found = run(ranks, "shared", **how)
    cold, warm = found[lost], found[1 - lost]
    assert (warm["built"], warm["graphs_cached"]) == (0, 2) and cold["graphs_cached"] == 0
    assert (warm["traces_cached"], cold["traces_cached"]) == (1, 0), "one traces, and both come to one plan"
    assert (cold["built"] > 0) == (cold["graphs_received"] < 2), "it compiles what it is the first to come to"
    assert [rank["gradients"] for rank in before] == [rank["gradients"] for rank in found]


def test_unless_it_is_not_to(ranks, tmp_path):
    for found in run(ranks, "shared", folder=str(tmp_path), matmul="aten", share_artifacts=False):
        assert found["built"] > 0 and found["graphs_received"] == 0


def test_where_the_first_rank_cannot_compile_the_others_do_and_say_so(ranks, tmp_path):
    (_, first), (notes, second) = run(ranks, "rank_0_cannot_compile", folder=str(tmp_path))
    assert first > 0 and second > 0
    assert any("was compiled on this rank too: rank 0 could not" in note for note in notes)


# --- these end the processes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "how", "said"),
    [
        ("killed_in_backward", {}, "all-reduce of gradient bucket0"),
        ("killed_in_backward", {"wrap": "fsdp2"}, "all-gather gather0"),
        ("killed_while_compiling", {}, "rank 1 is gone: its process"),
    ],
)
def test_a_rank_that_is_killed_ends_the_other(ranks, case, how, said):
    run(ranks, "is_second")  # a fresh pair still has to start
    began = time.monotonic()
    first, second = ranks.outcomes(CASES + case, 60, **how)
    assert second.kind == "EOFError" and said in first.error
    assert time.monotonic() - began < 30


def test_an_exception_in_a_backward_ends_the_other(ranks):
    first, second = ranks.outcomes(CASES + "raises_in_backward", 60)
    assert second.kind == "ValueError" and "mine" in second.error
    assert "all-reduce of gradient bucket0" in first.error and "rank 1 has ended with ValueError: mine" in first.error


def test_a_collective_of_the_models_own_is_named_too(ranks):
    first, second = ranks.outcomes(CASES + "leaves_a_sync_batch_norm", 60)
    assert second.kind == "ValueError" and first.kind == "RuntimeError"
    assert "rank 0 was in the model's own collective _c10d_functional." in first.error
    assert "(norm: " in first.error
