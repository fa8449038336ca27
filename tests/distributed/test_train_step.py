"""The optimizer's update in a program under DDP and FSDP2, on two Gloo ranks: values are stock's."""

import pytest

CASES = "tests.distributed.step_cases:"
WAYS = pytest.mark.parametrize("way", ["ddp", "fsdp2"])


@WAYS
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_five_steps_give_stocks_losses_parameters_and_state(ranks, way, kind, clip, accumulate):
    for found in ranks.run(CASES + "parity", 150, way=way, kind=kind, clip=clip, accumulate=accumulate):
        assert found["losses"] < 2e-6 and found["state"] < 1e-6, found
        assert (found["joined"] if way == "ddp" else found["updated"]) >= 4, found


@pytest.mark.parametrize(("way", "kind"), [("ddp", "NAdam"), ("fsdp2", "NAdam"), ("ddp", "Muon")])
def test_an_optimizer_whose_step_is_traced_gives_stocks_parameters_and_state(ranks, way, kind):
    for found in ranks.run(CASES + "parity", 150, way=way, kind=kind):
        # Muon's update is computed in bfloat16, so a gradient's last bit may be 1/256 of an update
        assert found["losses"] < 2e-6 and found["state"] < (1e-6 if kind != "Muon" else 3e-5), found
        assert (found["joined"] if way == "ddp" else found["updated"]) >= 4, found


@WAYS
def test_a_rank_that_leaves_an_update_out_still_takes_part_in_reductions(ranks, way):
    first, second = ranks.run(CASES + "parity", 150, way=way, kind="AdamW", skipping=1)
    assert first["losses"] < 2e-6 and second["losses"] < 2e-6
    assert first["state"] < 1e-6 and second["state"] < 1e-6


@WAYS
def test_training_that_is_saved_and_resumed_is_the_one_that_is_not_interrupted(ranks, way):
    assert ranks.run(CASES + "resumed", 150, way=way) == [True, True]


@WAYS
@pytest.mark.parametrize(("clip", "accumulate"), [(None, 1), (0.05, 1), (0.05, 3)])
def test_train_step_gives_stocks_norms_and_parameters(ranks, way, clip, accumulate):
    for found in ranks.run(CASES + "by_step", 150, way=way, clip=clip, accumulate=accumulate):
        assert found["norms"] < 2e-6 and found["state"] < 1e-6, found
