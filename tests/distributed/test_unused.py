"""Frozen parameters, and results that no loss uses, on two Gloo ranks: what is exchanged, and what gets a gradient."""

import pytest
from torch.distributed.fsdp import FSDPModule

CASES = "tests.distributed.unused_cases:"
UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}


def values(ranks, case, **keywords):
    return ranks.run(CASES + case, 150, **keywords)


@pytest.mark.parametrize("how", [{}, STATIC, UNUSED | {"apart": True}], ids=str)
def test_frozen_parameters_have_no_place_in_buckets_until_they_are_trained(ranks, how):
    for found in values(ranks, "frozen", **how):
        assert found["receipt"].eligible and found["grad"] <= 2**-20
        assert len(found["elements"]) == 2
        assert all(found["trained"] <= n < 2 * found["trained"] for n in found["elements"]), "with their alignment"


@pytest.mark.parametrize(
    "how",
    [
        {"first": True},
        {"first": False, "name": "shared"},
        UNUSED | {"name": "tasks"},
        UNUSED | {"name": "tasks", "first": False, "plan": "eager"},
    ],
    ids=str,
)
def test_a_backward_that_is_synchronised_behind_a_forward_that_was_not(ranks, how):
    for found in values(ranks, "synced_by_hand", **how):
        assert found["receipt"].eligible and found["grad"] <= 2**-20


@pytest.mark.parametrize("steps", [0, 1])
def test_gradients_are_averaged_without_the_wrapper_too(ranks, steps):
    """Stock DDP leaves each rank its own then. One rank may keep the wrapper longer, as collecting garbage would."""
    for found in values(ranks, "wrapper_gone", steps=steps):
        assert found["grad"] == 0 and found["ranks"] == 0


@pytest.mark.parametrize(
    ("uses", "how"),
    [
        ("none", UNUSED),
        ("each", UNUSED | {"bucket_cap_mb": 0.0005}),
        ("each", UNUSED | {"accumulate": True, "gradient_as_bucket_view": True}),
        ("none", STATIC | {"by_hand": True}),
        ("later", UNUSED | {"broken": True}),
        ("each", UNUSED | {"hook": True}),
    ],
    ids=str,
)
def test_what_only_unused_results_follow_from_gets_no_gradient_under_ddp(ranks, uses, how):
    """Not zeros, by which momentum and weight decay would move it; unless another rank has a gradient."""
    for found in values(ranks, "unused_outputs", uses=uses, **how):
        assert found["grad"] <= 2**-20 and found["param"] <= 2**-20 and found["receipt"].eligible
        unused = ["heads.2.weight", "heads.2.bias"]
        assert found["none"][-2:] == unused and (len(found["none"]) > 2) == (uses == "none")
        assert all(maps in ([], maps[:1] * 2) for maps in found["used"]), found["used"]
        assert how.get("by_hand") or any(any(maps[0]) for maps in found["used"])


@pytest.mark.parametrize("how", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}], ids=str)
def test_a_head_that_the_first_loss_does_not_use_may_get_its_gradient_in_another_way_later(ranks, how):
    """A sum of two results' gradients is one GEMM, or none where one of them is absent."""
    for found in values(ranks, "hidden_first", **UNUSED, **how):
        assert found["grad"] <= 2**-20 and found["receipt"].eligible
        assert found["used"][0] == found["used"][1]


def test_what_no_loss_uses_gets_no_gradient_from_layers_that_are_compiled_inside_ddp(ranks):
    for found in values(ranks, "parts_inside", **UNUSED):
        assert found["grad"] <= 2**-20 and found["missing"] == [2, 0, 2]


UNFINISHED = [
    (True, ("all", "evaluate", "all")),
    (False, ("one result", "no sync")),
    (False, ("all", "one result", "all", "all")),
]
FINISHED = [(False, ("no sync", "all", "forward", "evaluate", "all")), (False, ("two losses", "two losses"))]


def test_a_parameter_without_a_gradient_is_an_error_of_the_next_forward_as_under_stock_ddp(ranks):
    for rank, found in enumerate(values(ranks, "unfinished", plans=(*UNFINISHED, *FINISHED))):
        for result in found:
            assert result["receipt"].eligible and result["grad"] <= 2**-20 and not result["receipt"].notes
            for stock, ours in result["raised"]:
                assert bool(stock) == bool(ours) and set(stock.split("\n")) <= set(ours.split("\n"))
        raised = [result["raised"] for result in found]
        assert [any(stock for stock, _ in steps) for steps in raised] == [True] * len(UNFINISHED) + [False] * 2
        named = f"\nParameters which did not receive grad for rank {rank}: "
        assert named + "spare.weight, spare.bias\n" in raised[0][2][1]
        assert named + "second.weight, second.bias\n" in raised[1][1][1]
        stock, ours = found[-1]["logged"]
        assert stock.keys() <= ours.keys() and ours["has_rebuilt_buckets"] == 1
        assert ours["rebuilt_bucket_sizes"] == str(4 * 2 * (12 * 4 + 4)), "what the program reduces"
        assert ours["avg_backward_comm_time"] > 0 and ours["backward_comm_time"] > 0


@pytest.mark.parametrize(
    ("uses", "how"),
    [
        ("later", {"reshard_after_forward": False, "accumulate": True}),
        ("later", {"broken": True}),
        ("none", {"replicas": 2}),
        ("each", {"accumulate": True}),
        ("none", {"kind": "fsdp1"}),
        ("later", {"kind": "fsdp1"}),
    ],
    ids=str,
)
def test_what_only_unused_results_follow_from_gets_no_gradient_under_fsdp(ranks, uses, how):
    for found in values(ranks, "unused_outputs_fsdp", uses=uses, **how):
        assert found["grad"] <= 2**-20 and found["param"] <= 2**-20 and found["receipt"].eligible
        assert found["none"]


@pytest.mark.parametrize(
    "how",
    [
        # a usual run has these in test_settings.py
        pytest.param({"before": 0}, marks=pytest.mark.full),
        pytest.param({"before": 2}, marks=pytest.mark.full),
        {"before": 1} | STATIC,
    ],
    ids=str,
)
def test_ddp_with_another_process_group_reduces_over_that(ranks, how):
    for found in values(ranks, "another_process_group", **how):
        assert found["grad"] == 0 and found["used"] and found["receipt"].eligible


@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="since torch 2.13")
def test_fsdp2_reductions_go_over_their_own_group_and_as_many_at_once_as_asked_for(ranks):
    for found in values(ranks, "reduce_settings"):
        assert found["grad"] <= 2**-20 and found["flying"] == 2 and found["receipt"].eligible
        first, *others = found["groups"]
        assert first["reduce-scatter"] == first["all-gather"]
        assert all(groups["reduce-scatter"] != groups["all-gather"] == first["all-gather"] for groups in others)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_symm_mem_for_comm"), reason="since torch 2.13")
@pytest.mark.parametrize("before", [0, 1])
def test_fsdp2_with_symmetric_memory_is_left_to_fsdp(ranks, before):
    for found in values(ranks, "symmetric_memory", before=before):
        assert found["grad"] <= 2**-20
        assert found["reasons"] == ("all-gathers are the user's own, or use memory of their own",)


@pytest.mark.parametrize(
    "plan", ["first no_sync", "later no_sync", "first without gradients", "first constant", "alone"]
)
def test_a_rank_that_reduces_later_than_the_other_pairs_with_it_as_under_stock_ddp(ranks, plan):
    """Where ranks may use other parameters: nobody waits for what does not come."""
    for found in values(ranks, "apart_for_a_while", plan=plan):
        assert found["grad"] == 0 and found["receipt"].eligible
