"""`replicate` of torch.distributed._composable on two Gloo ranks, both kinds, beside eager PyTorch."""

import pytest

CASES = "tests.distributed.replicate_cases:"


def values(ranks, case, **keywords):
    return ranks.run(CASES + case, 150, **keywords)


@pytest.mark.parametrize(
    "how",
    [
        {"kind": "ddp", "accumulate": True},
        {"kind": "ddp", "order": "torch.compile"},
        {"kind": "ddp", "find_unused_parameters": True},
        {"kind": "fsdp", "accumulate": True},
        {"kind": "fsdp", "order": "module.compile", "precision": "bfloat16"},
    ],
    ids=lambda how: ", ".join(map(str, how.values())),
)
def test_a_training_equals_that_of_eager_replicate(ranks, how):
    for found in values(ranks, "against_stock", **how):
        receipt = found["receipt"]
        assert (receipt.adapter, receipt.eligible, receipt.graphs) == ("replicate", True, 1) and receipt.collectives
        assert max(found["loss"], found["grad"], found["param"], found["after loading"]) == 0
        assert (found["ranks"], found["keys"], found["names"]) == (0, True, True)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_settings_and_hooks_do_what_they_do_eagerly(ranks, kind):
    for found in values(ranks, "settings", kind=kind):
        assert found["different"] == [0, 0, 0] and found["receipt"].eligible
        assert found["hooks"][0] == found["hooks"][1] == ["after"] * 4


def test_a_communication_hook_leaves_reduction_to_the_hidden_ddp(ranks):
    for found in values(ranks, "hooked"):
        assert found["grad"] == 0 and found["receipt"].graphs == 1
        assert (found["receipt"].eligible, found["receipt"].reasons) == (
            False,
            ("a communication hook is registered",),
        )


def test_a_forward_that_raises_leaves_the_hooks_as_they_were(ranks):
    for found in values(ranks, "raises"):
        assert found["hooks"] == ["forward_pre_hook", "forward_post_hook"] and not found["active"]
        assert found["receipt"].eligible


def test_explain_shows_what_is_taken_over(ranks):
    for found in values(ranks, "explained"):
        assert found["ddp"] == found["fsdp"] == ("replicate", 0, True)
        assert (found["ddp before"], found["fsdp before"]) == (("plain", True), ("replicate", False))


def test_shards_of_one_rank_are_divided_as_fsdp2_does_without_a_reduce_scatter(ranks):
    for found in ranks.run("tests.distributed.fsdp_cases:divided", 150, factor=3.0, mesh=(2, 1)):
        assert (found["grad"], found["param"]) == (0, 0) and found["receipt"].eligible
