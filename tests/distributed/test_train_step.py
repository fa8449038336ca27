"""The optimizer's update in a program under DDP and FSDP2, on two Gloo ranks: values are stock's."""

import pytest

CASES = "tests.distributed.step_cases:"
WAYS = pytest.mark.parametrize("way", ["ddp", "fsdp2"])


@WAYS
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
def test_five_steps_give_stocks_losses_parameters_and_state(ranks, way, kind, clip, accumulate):
    for found in ranks.run(CASES + "parity", 150, way=way, kind=kind, clip=clip, accumulate=accumulate):
        _check(found, 4)


@pytest.mark.parametrize("way", ["uneven", "mixed", "kept", "hsdp", "frozen", "factor"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_steps_are_joined_however_fsdp_shards_and_reduces(ranks, way, clip):
    for found in ranks.run(CASES + "parity", 150, way=way, kind="AdamW", clip=clip):
        _check(found, 4)
        assert "optimizer: the updates of 4 steps ran in the backward's program" in found["lines"]


def test_reduced_gradients_of_earlier_micro_batches_are_added_in_the_program(ranks):
    for found in ranks.run(CASES + "parity", 150, way="fsdp2", kind="AdamW", clip=0.05, accumulate=3, sums=True):
        _check(found, 4)


@pytest.mark.parametrize(
    ("reads", "joined"), [("gradient", [0, 0]), ("norm", [0, 0]), ("norm on a rank", [0, 4]), ("by hand", [4, 4])]
)
def test_what_is_read_of_sharded_gradients_before_the_step_is_stocks(ranks, reads, joined):
    both = ranks.run(CASES + "parity", 150, way="fsdp2", kind="AdamW", clip=0.05, reads=reads)
    for found, count in zip(both, joined, strict=True):
        _check(found, count)


@pytest.mark.parametrize(
    ("way", "why"),
    [("offloaded", "shards are kept in CPU memory"), ("broken", "gradients are reduced outside of this program")],
)
def test_other_updates_of_shards_run_apart_with_a_reason(ranks, way, why):
    for found in ranks.run(CASES + "parity", 150, way=way, kind="AdamW", clip=0.05):
        _check(found, 0)
        assert found["updated"] >= 4 and found["separate"][why] >= 4, found


def _check(found, joined):
    assert found["losses"] < 2e-6 and found["state"] < 1e-6, found
    assert found["joined"] == joined, found


@pytest.mark.parametrize(("way", "kind"), [("ddp", "NAdam"), ("fsdp2", "NAdam"), ("ddp", "Muon")])
def test_an_optimizer_whose_step_is_traced_gives_stocks_parameters_and_state(ranks, way, kind):
    for found in ranks.run(CASES + "parity", 150, way=way, kind=kind):
        # with equal gradients Muon's bits are stock's; of last bits that differ it makes 1e-5 (test_step_parity.py)
        assert found["losses"] < 2e-6 and found["state"] < (1e-6 if kind != "Muon" else 3e-5), found
        assert found["joined"] >= 4, found


@WAYS
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_rank_that_leaves_an_update_out_still_takes_part_in_reductions(ranks, way, clip):
    first, second = ranks.run(CASES + "parity", 150, way=way, kind="AdamW", clip=clip, skipping=1)
    _check(first, 4)
    _check(second, 3)


@WAYS
def test_training_that_is_saved_and_resumed_is_the_one_that_is_not_interrupted(ranks, way):
    assert ranks.run(CASES + "resumed", 150, way=way) == [True, True]


@WAYS
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.05, 1), (0.05, 3)])
def test_train_step_gives_stocks_norms_and_parameters(ranks, way, clip, accumulate):
    for found in ranks.run(CASES + "by_step", 150, way=way, clip=clip, accumulate=accumulate):
        assert found["norms"] < 2e-6 and found["state"] < 1e-6, found


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("kind", "clip"), [("SGD", None), ("SGD", 0.05), ("AdamW", None), ("AdamW", 0.05)])
def test_forward_backward_reduction_and_update_are_one_program_with_the_same_bits(ranks, kind, clip, accumulate):
    first, second = ranks.run(CASES + "whole", 150, kind=kind, clip=clip, accumulate=accumulate)
    for found in (first, second):
        assert found["losses"][0] == found["losses"][1] and found["state"] == 0.0, found
        assert found["counts"] == [(0, 4, True), (4, 0, True)], found
    assert first["checksum"] == second["checksum"]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_rank_whose_forward_runs_by_itself_reduces_the_same_buckets(ranks, clip):
    first, second = ranks.run(CASES + "whole", 150, kind="SGD", clip=clip, accumulate=1, alone=1)
    for found in (first, second):
        assert found["losses"][0] == found["losses"][1] and found["state"] == 0.0, found
    assert first["counts"][1] == (4, 0, True) and second["counts"][1] == (2, 2, True)
    assert first["checksum"] == second["checksum"]
