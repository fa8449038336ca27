"""Joined training steps on two Gloo ranks against stock: ways to wrap, doors, changes in mid-run, checkpoints."""

import pytest

CASES = "tests.distributed.step_parity_cases:"
FOUR = "optimizer: the updates of 4 steps ran in the backward's program"


@pytest.mark.parametrize(
    ("way", "kind", "door", "more"),
    [
        ("ddp", "nesterov", "loop", {"clip": 0.05, "accumulate": 3}),
        ("frozen", "SGD", "loop", {}),
        ("fsdp2", "nesterov", "loop", {"accumulate": 3}),
        ("block.compile", "AdamW", "loop", {"clip": 0.05}),
        ("block.compile", "AdamW", "train_step", {"clip": 0.05, "accumulate": 3}),
        ("dcompile.compile", "SGD", "loop", {}),
        ("given to blocks", "nesterov", "loop", {"clip": 0.05}),
        ("block.compile", "AdamW", "loop", {"steps": 50}),
    ],
)
def test_losses_parameters_state_and_averages_are_stocks(ranks, way, kind, door, more):
    for found in ranks.run(CASES + "parity", 150, way=way, kind=kind, door=door, **more):
        assert max(found["losses"], found["state"], found["averages"]) < 1e-6, found
        # all but the first with each number of rows; and the one in which blocks find the root around them
        assert found["joined"] == more.get("steps", 5) - (3 if way == "given to blocks" else 2), found


@pytest.mark.parametrize(
    ("way", "kind"), [("ddp", "Muon"), ("ddp", "nesterov"), ("fsdp2", "nesterov"), ("fsdp2", "AdamW")]
)
def test_updates_are_stocks_bit_for_bit_where_gradients_are_equal(ranks, way, kind):
    for found in ranks.run(CASES + "exact", 150, way=way, kind=kind):
        assert found["differences"] == [0.0] * 6 and found["joined"] == 5, found


def test_muon_makes_much_of_the_last_bits_of_gradients_under_stock_too(ranks):
    """Its Newton-Schulz iteration is in bfloat16: a gradient of which 1e-8 differs moves a parameter by 1e-5."""
    for found in ranks.run(CASES + "disturbed", 150, by=8e-9):
        assert max(found) > 1e-5, found


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_each_change_in_mid_run_is_seen(ranks, way):
    # stock DDP waits for the gradient of a layer that is frozen later, and keeps parameters that are replaced
    left_out = ("frozen layer", "assigned model") if way == "ddp" else ()
    for found in ranks.run(CASES + "changes", 200, way=way, left_out=left_out):
        assert found.pop("joined") >= 14, found
        assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize(("way", "by"), [("ddp", "dcp"), ("block.compile", "dcp"), ("block.compile", "torch.save")])
def test_a_checkpoint_of_stock_or_compiled_training_is_resumed_by_either(ranks, way, by):
    for found in ranks.run(CASES + "checkpoints", 200, way=way, by=by):
        assert max(found.values()) < 1e-6, found
