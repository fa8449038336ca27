"""Tensor parallelism, and a model's own collectives, on two Gloo ranks: kernels, cache entries, planned collectives."""

import pytest

CASES = "tests.distributed.own_cases:"
CLOSE = 2e-6
"""What kernels of ours may differ by from eager's, in values of size one."""


def values(ranks, case, **keywords):
    return ranks.run(CASES + case, 240, **keywords)


def holds(found, collectives, within=CLOSE):
    """What is true of every training beside eager's."""
    receipt = found["receipt"]
    print(receipt)
    assert (receipt.adapter, receipt.eligible, receipt.graphs, receipt.graph_breaks) == ("plain", True, 1, 0)
    assert (receipt.fallbacks, receipt.notes, receipt.graphs_uncacheable) == ({}, (), 0)
    assert receipt.collectives == collectives and receipt.kernels > 0
    assert found["loss"] <= within and found["grad"] <= within and found["placements"]


def test_two_layers_by_parallelize_module(ranks):
    for found in values(ranks, "trained", name="two"):
        holds(found, 1)


def test_a_dtensor_goes_out_and_its_gradient_comes_in(ranks):
    for found in values(ranks, "spread_all_the_way"):
        holds(found, found["receipt"].collectives)
        assert found["sums"] <= CLOSE


@pytest.mark.parametrize(("matmul", "library_calls"), [("aten", 1), ("own", 0)])
def test_every_kind_is_a_step(ranks, matmul, library_calls):
    """Results are eager's, bit by bit, whichever product this processor has by default."""
    for found in values(ranks, "every_kind", matmul=matmul):
        assert all(found["same"]), found["same"]
        receipt = found["receipt"]
        assert (receipt.collectives, receipt.library_calls, receipt.notes) == (11, library_calls, ()), str(receipt)
        assert {kind for kind, _ in found["shown"]} == {
            "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
        }  # fmt: skip


def test_forms_with_gradients(ranks):
    for found in values(ranks, "differentiated"):
        assert found["grad"] <= CLOSE and found["receipt"].collectives == 8


def test_a_second_start_builds_nothing(ranks, tmp_path):
    for found in values(ranks, "started_twice", name="two", folder=str(tmp_path)):
        assert found["built"][0] > 0 and found["built"][1] == 0
        assert found["cached"] == [0, 2] and found["receipt"].collectives == 1


def test_ddp_over_dtensors_runs_eagerly_and_says_why(ranks):
    for found in values(ranks, "over_ddp"):
        assert found["losses"][0] == found["losses"][1]
        receipt = found["receipt"]
        assert (receipt.adapter, receipt.eligible) == ("ddp", False)
        assert "fully_shard" in receipt.reasons[0]


@pytest.mark.full
@pytest.mark.parametrize(("name", "collectives"), [("sequence", 9), ("llama", 14), ("uneven", 3), ("checkpointed", 1)])
def test_training_equals_eager(ranks, name, collectives):
    for found in values(ranks, "trained", name=name):
        holds(found, collectives)


@pytest.mark.full
@pytest.mark.parametrize("name", ["returns", "changes"])
def test_parameters_that_are_returned_or_changed(ranks, name):
    for found in values(ranks, "trained", name=name):
        holds(found, 1)


@pytest.mark.full
@pytest.mark.parametrize(("name", "collectives"), [("two", 1), ("sequence", 9)])
def test_batches_of_several_sizes(ranks, name, collectives):
    for found in values(ranks, "trained_with_sizes", name=name):
        holds(found, collectives)


@pytest.mark.full
def test_dtensors_of_several_sizes(ranks):
    for found in values(ranks, "spread_all_the_way", rows=2):
        holds(found, found["receipt"].collectives)
        assert found["sums"] <= CLOSE


@pytest.mark.full
def test_a_loss_that_is_computed_in_parallel(ranks):
    for found in values(ranks, "loss_in_parallel"):
        holds(found, 8)


@pytest.mark.full
def test_blocks_that_are_computed_again(ranks):
    for found in values(ranks, "checkpointed_blocks"):
        holds(found, 3)


def test_ranks_that_disagree_are_told(ranks):
    for found in ranks.outcomes(CASES + "disagreeing", 60):
        assert found.kind == "PlanMismatchError" and "all_reduce max over 2 ranks" in found.error
