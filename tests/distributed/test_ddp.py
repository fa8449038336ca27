"""DDP on two Gloo ranks: what is taken over and what is not, one thing at a time. Whole trainings: `test_matrix.py`."""

import time

import pytest

from tests.distributed.harness import Ranks, RanksFailed
from tests.distributed.matrix import SHARED

CASES = "tests.distributed.cases:"
EPSILON = 2**-23
"""One rounding of a float32 gradient, relative to its size."""


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


def values(ranks, case, **keywords):
    """What the case found, once it is clear that both ranks found the same receipt."""
    return ranks.run(CASES + case, 150, **keywords)


def trained(ranks, **how):
    """Two steps before the checkpoint show what three do: DDP knows its buckets behind the first."""
    return values(ranks, "against_stock", steps=2, **how)


@pytest.fixture(scope="module")
def in_turn(ranks):
    """Cases that trace the same graph, one behind the other with one pair of models; the last one leaves a note."""
    cases = (
        "two_synced_backwards", "zeroed_not_dropped", "gradients_kept", "interleaved", "autograd_grad",
        "called_past_ddp", "uneven_batches", "used_outside_the_module", "used_outside_beside_forwards",
    )  # fmt: skip
    return values(ranks, "in_turn", cases=cases)


# compile(ddp) is that of all others
@pytest.mark.parametrize("order", ["ddp(compile)", "torch.compile(ddp)", "ddp(torch.compile)", "ddp.compile"])
def test_every_order_of_wrapping_is_taken_over(ranks, order):
    for found in trained(ranks, name="two", order=order, accumulate=True):
        assert found["receipt"].eligible and found["receipt"].collectives == 1
        assert (found["loss"], found["grad"], found["param"], found["ranks"]) == (0, 0, 0, 0)


def test_torch_compile_with_fullgraph(ranks):
    for found in values(ranks, "whole_graph"):
        assert found["grad"] == 0 and found["type"] == "OptimizedModule"
        assert found["receipts"] == 1 and found["receipt"].eligible


def test_parameters_outside_the_graph_leave_reduction_to_ddp(ranks):
    for found in trained(ranks, name="outside"):
        assert not found["receipt"].eligible
        assert found["receipt"].reasons == ("2 parameters (b.bias, b.weight) are used outside the compiled graph",)
        assert (found["loss"], found["grad"], found["param"], found["ranks"]) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("case", "how", "reason"),
    [
        ("comm_hook", {}, "a communication hook is registered"),
        ("comm_hook_after_a_step", {"builtin": False}, "a communication hook was registered after the first step"),
        ("comm_hook_after_a_step", {"builtin": True}, "a communication hook was registered after the first step"),
        ("joined", {"before": 0}, "the Join context manager is on"),
        ("joined", {"before": 1}, "the Join context manager was entered after the first step"),
        ("stock_by_option", {}, "option distributed='stock'"),
    ],
)
def test_what_needs_ddps_own_reducer_gets_it(ranks, case, how, reason):
    for found in values(ranks, case, **how):
        assert found["grad"] == 0
        assert (found["receipt"].eligible, found["receipt"].reasons) == (False, (reason,))


@pytest.mark.parametrize("kind", ["FP16_COMPRESS", "wrapped", pytest.param("ALLREDUCE", marks=pytest.mark.full)])
def test_hooks_of_the_reducers_own_and_wrapped_ones_are_taken_over(ranks, kind):
    for found in values(ranks, "known_hook", kind=kind):
        assert found["grad"] == 0 and found["eligible"] == [True] and not found["receipt"].eligible


@pytest.mark.parametrize("sync", [True, False])
def test_a_first_call_in_inference_mode_leaves_later_steps_free(ranks, sync):
    for found in values(ranks, "first_call_in_inference_mode", sync=sync):
        assert found["grad"] == 0 and found["ranks"] == 0 and found["receipt"].eligible


@pytest.mark.parametrize("case", ["two_synced_backwards", "zeroed_not_dropped", "uneven_batches"])
def test_ways_to_accumulate_in_turn_equal_stock_ddp(in_turn, case):
    for found in in_turn:
        assert found[case]["grad"] == 0 and found[case]["ranks"] == 0 and found[case]["receipt"].eligible


def test_ranks_whose_batch_is_empty_exchange_the_same_buckets(ranks):
    for found in values(ranks, "empty_batches"):
        assert found["grad"] <= 2**-16 and found["ranks"] == 0 and found["receipt"].eligible


# a first step without sync is in the matrix, and behind an evaluation above
def test_hooks_and_clipping_equal_stock_ddp(ranks):
    for found in values(ranks, "hooks_and_clipping"):
        assert found["grad"] == 0 and found["ranks"] == 0 and found["receipt"].eligible
        assert found["fired"] == [(4, True)] * 2


def test_mixed_precision(ranks):
    for found in values(ranks, "mixed_precision"):
        assert found["receipt"].eligible and found["ranks"] == 0
        assert found["grad"] <= 2**-8  # one rounding of bfloat16: autograd's formulas round elsewhere than eager's


@pytest.mark.parametrize(
    ("kernels", "rows", "norms"),
    # one norm where the model is traced twice, to be explained
    [pytest.param("auto", (4, 4), 2, marks=pytest.mark.full), ("aten", (5, 2), 1), ("auto", (3, 0), 2)],
)
def test_sync_batch_norm_is_part_of_the_graph(ranks, kernels, rows, norms):
    for found in values(ranks, "sync_norm", options={"kernels": kernels}, rows=rows, norms=norms):
        assert found["receipt"].eligible and found["receipt"].graphs == 1 and found["receipt"].graph_breaks == 0
        assert max(found["loss"], found["grad"], found["buffer"]) <= 1e-5 and found["ranks"] == 0
        assert found["plans"]["forward"] == ["all_gather_into_tensor over 2 ranks"] * norms, "compared between ranks"
        assert found["plans"]["backward"][1:] == ["all_reduce sum over 2 ranks"] * norms


def test_layers_that_are_captured_once_equal_stock_ddp(ranks):
    for found in values(ranks, "with_copied_layers", name="deep", steps=2):
        assert found["copies"] >= 2 and found["receipt"].eligible and found["receipt"].graph_breaks == 0
        assert (found["loss"], found["grad"], found["param"], found["ranks"]) == (0, 0, 0, 0)


def test_a_loss_by_parts_of_its_rows_is_reduced_once(ranks):
    options = {"kernels": "auto"}
    for found in values(ranks, "in_chunks_of_rows", name="classes_tied", accumulate=True, steps=2, options=options):
        receipt = found["receipt"]
        assert receipt.eligible and receipt.collectives == 1
        assert any("3 parts" in note and "with their gradients" in note for note in receipt.notes)
        assert max(found["loss"], found["grad"], found["param"]) < 1e-9 and found["ranks"] == 0


# without reentrance, a usual run has tests/models/test_models.py's
@pytest.mark.full
def test_a_loss_by_parts_of_its_classes_is_reduced_once(ranks):
    options = {"kernels": "aten", "chunked_loss": 4}
    for found in trained(ranks, name="classes_tied", accumulate=True, options=options):
        assert found["receipt"].eligible and found["receipt"].collectives == 1
        assert any("chunked_loss: 4 parts" in note for note in found["receipt"].notes)
        assert max(found["loss"], found["grad"], found["param"]) < 1e-9 and found["ranks"] == 0


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.full), True])
def test_gradient_checkpointing(ranks, reentrant):
    for found in values(ranks, "checkpointed", reentrant=reentrant):
        assert found["receipt"].eligible and found["receipt"].graphs == 1
        assert found["grad"] <= 1e-6 and found["ranks"] == 0


def test_gradients_that_a_user_keeps_never_change(in_turn):
    for found in in_turn:
        assert found["gradients_kept"] == {"unchanged": True, "one storage": True, "different": True}


def test_interleaved_forwards_reduce_as_each_one_said(in_turn):
    assert max(found["interleaved"]["grad"] for found in in_turn) <= SHARED


def test_a_second_backward_of_one_forward_reduces_too(ranks):
    for found in values(ranks, "retained_graph"):
        assert found["grad"] <= SHARED and found["ranks"] == 0
        (note,) = found["receipt"].notes
        assert note.startswith("several backwards of forwards that synchronise: each one's gradients are averaged")


def test_autograd_grad_reduces_nothing(in_turn):
    for found in in_turn:
        assert found["autograd_grad"] == {"grad": 0, "found": 0}


@pytest.mark.parametrize("how", ["first", "late", "after", "one rank"])
def test_hooks_get_the_gradients_of_their_rank(ranks, how):
    """As under DDP, which reduces .grad: a hook that clamps is to do so before."""
    for rank, found in enumerate(values(ranks, "gradient_hooks", how=how)):
        assert found["grad"] <= SHARED and found["seen"] <= SHARED and found["ranks"] == 0
        note = "some calls reduce their gradients at the end of the backward: parameter a.weight has a hook"
        assert found["receipt"].eligible
        assert found["receipt"].notes == ((note,) if rank or how != "one rank" else ())


def test_gradients_from_elsewhere_are_reduced_and_reported(in_turn):
    for found in [each["used_outside_the_module"] for each in in_turn]:
        assert found["grad"] <= 2 * EPSILON and found["ranks"] == 0
        assert found["receipt"].notes == ("gradients from outside the module are averaged on their own: a.weight",)


def test_gradients_from_elsewhere_beside_several_forwards_are_reduced(in_turn):
    for found in [each["used_outside_beside_forwards"] for each in in_turn]:
        assert found["grad"] <= 4 * EPSILON and found["ranks"] == 0


@pytest.mark.parametrize("behind", [True, False])
def test_parameters_that_only_code_outside_the_module_uses_are_reduced(ranks, behind):
    for found in values(ranks, "used_only_outside", behind=behind):
        reason = "outside of the module's forward, its result is used with parameter scale"
        note = "gradients of parameters that only other code uses are averaged on their own: scale"
        assert found["grad"] <= SHARED and found["receipt"].eligible is not behind
        assert (found["receipt"].reasons, found["receipt"].notes) == (((reason,), ()) if behind else ((), (note,)))


@pytest.mark.full
def test_gradients_from_elsewhere_of_weights_in_channels_last_are_reduced(ranks):
    for found in values(ranks, "used_outside_in_channels_last"):
        assert found["grad"] <= SHARED and found["ranks"] == 0


def test_gradients_of_no_sync_steps_are_reduced_even_if_the_last_step_does_not_reach_them(ranks):
    for found in values(ranks, "accumulated_where_the_last_step_does_not_reach"):
        assert found["grad"] == 0 and found["ranks"] == 0 and found["receipt"].eligible


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("by turns", {"bucket_cap_mb": 0.0005}),
        pytest.param("by turns", {"accumulate": True}, marks=pytest.mark.full),
        pytest.param("by turns", {"gradient_as_bucket_view": True}, marks=pytest.mark.full),
    ],
)
def test_ranks_may_use_other_parameters(ranks, plan, more):
    for found in values(ranks, "other_parameters", plan=plan, **more):
        assert found["grad"] == 0 and found["same"] and found["receipt"].eligible and not found["receipt"].notes
        assert found["none"] == ["heads.2.weight", "heads.2.bias"], "no rank has used them"
        assert found["storages"] <= 2 * found["receipt"].collectives, "the graphs share memory"


def test_a_rank_may_leave_the_compiled_graphs_alone_where_ranks_use_other_parameters(ranks):
    first, second = values(ranks, "other_parameters", plan="late")
    for found in (first, second):
        assert found["grad"] == 0 and found["same"] and found["receipt"].eligible
    assert not first["receipt"].notes
    assert len(second["receipt"].notes) == 3, "a graph break, a layer that runs eagerly, a forward that does"
    for note in second["receipt"].notes:
        assert note.startswith("some calls copy their gradients into buckets as they arrive: ")


def test_gradients_that_hooks_change_where_ranks_use_other_parameters(ranks):
    for found in values(ranks, "other_parameters", plan="hooked"):
        assert found["grad"] == 0 and found["same"] and found["receipt"].eligible
        (note,) = found["receipt"].notes
        assert note.endswith("parameter trunk.weight has a hook; parameter heads.0.weight has a hook")


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("broken", {"bucket_cap_mb": 0.0005}),
        ("outside", {"bucket_cap_mb": 0.0005}),
        ("several", {"bucket_cap_mb": 0.0005}),
        ("several", {"accumulate": True}),
        pytest.param("several", {"gradient_as_bucket_view": True}, marks=pytest.mark.full),
    ],
)
def test_several_graphs_where_ranks_use_other_parameters(ranks, plan, more):
    """A rank with one graph reduces in its program, one with several as gradients arrive: in the same buckets."""
    for found in values(ranks, "other_parameters", plan=plan, **more):
        assert found["grad"] == 0 and found["same"] and found["receipt"].eligible
        assert found["none"] == [f"heads.{1 if plan == 'broken' else 2}.{name}" for name in ("weight", "bias")]
        assert found["receipt"].collectives == found["receipt"].buckets > 0


def test_where_one_rank_leaves_reduction_to_ddp_at_first_all_do(ranks):
    found = values(ranks, "other_parameters", plan="by turns", hook=True)
    reason = "a communication hook is registered"
    assert [each["receipt"].reasons for each in found] == [(f"rank 1: {reason}",), (reason,)]
    for each in found:
        assert each["same"] and not each["receipt"].eligible


def test_a_graph_that_stays_the_same_may_be_another_on_each_rank(ranks):
    for found in values(ranks, "static_parameters"):
        assert found["grad"] == 0 and found["ranks"] == 0 and found["receipt"].eligible


@pytest.mark.full
def test_several_graphs_that_stay_the_same_reduce_each_parameter_where_they_use_it(ranks):
    for found in values(ranks, "against_stock", name="shared", static_graph=True, bucket_cap_mb=0.001):
        without = values(ranks, "against_stock", name="shared", bucket_cap_mb=0.001)[0]["receipt"]
        assert found["receipt"].eligible and found["receipt"].graphs == 2
        assert found["receipt"].collectives == without.collectives
        assert found["grad"] <= SHARED and found["ranks"] == 0


def test_two_tasks_in_one_backward(ranks):
    assert max(found["grad"] for found in values(ranks, "two_tasks_in_one_backward")) <= 2 * SHARED


def test_what_is_compiled_of_one_layer_serves_no_other(ranks):
    for found in trained(ranks, name="layers"):
        assert (found["receipt"].eligible, found["receipt"].graphs) == (True, 5)
        assert (found["loss"], found["grad"], found["param"], found["ranks"]) == (0, 0, 0, 0)


def test_a_later_branch_gives_reduction_back(ranks):
    for found in values(ranks, "a_later_branch_is_not_eligible"):
        assert found["grad"] == 0 and found["eligible"] == [True, True, False, False, False]
        assert "2 parameters (b.bias, b.weight) are used outside the compiled graph" in found["reasons"][0]
        assert found["notes"][0].startswith("DDP reduces the gradients again")


def test_a_larger_compiled_function_leaves_what_was_taken_over_apart(ranks):
    for found in values(ranks, "part_of_a_larger_function"):
        assert found["grad"] == 0 and found["receipt"].eligible


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_later_eager_forward_gives_reduction_back(ranks, static_graph):
    for found in values(ranks, "a_later_forward_is_eager", static_graph=static_graph):
        assert found["grad"] == 0 and not found["eligible"]
        assert found["notes"] == ("DDP reduces the gradients again: a forward ran without any compiled graph",)


@pytest.mark.parametrize("static_graph", [False, True])
def test_with_compilation_off_ddp_works_as_ever(ranks, static_graph):
    for found in values(ranks, "never_compiled", static_graph=static_graph):
        assert found == {"grad": 0, "ranks": 0}


def test_a_compiled_part_of_a_ddp_module_is_plain(ranks):
    for found in values(ranks, "compiled_parts"):
        assert found == {"grad": 0, "adapter": "plain"}


def test_state_dict_and_copies(ranks):
    for found in values(ranks, "state_and_copies"):
        assert found == {"keys": True, "copy": True, "clean": True}


def test_parameters_put_in_place_of_others_are_reduced(ranks):
    for found in values(ranks, "new_parameters"):
        assert found["grad"] == 0


def test_another_ddp_around_the_same_module(ranks):
    for found in values(ranks, "wrapped_again"):
        assert found == {"grad": 0, "eligible": True}


def test_calling_the_module_past_ddp_reduces_nothing(in_turn):
    for found in in_turn:
        assert found["called_past_ddp"]["grad"] == 0


# --- these end the pair of processes


@pytest.mark.full
def test_ranks_with_other_buckets_say_so_in_time(ranks):
    ranks.run(CASES + "nothing")
    began = time.monotonic()
    for outcome in ranks.outcomes(CASES + "plans_that_differ", 60):
        assert outcome.kind == "PlanMismatchError" and "ranks disagree on their collectives" in outcome.error
        assert "Batch sizes can be the cause" in outcome.error
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("who", "how"),
    [
        (0, "score"),
        pytest.param(1, "score", marks=pytest.mark.full),
        (0, "dry run"),
        (0, "under no_sync"),
        (1, "gradient of an input"),
    ],
)
def test_what_one_rank_runs_alone_keeps_nobody_waiting(ranks, tmp_path, who, how):
    for found in values(ranks, "alone_first", who=who, how=how, folder=str(tmp_path)):
        assert found["grad"] <= 2 * EPSILON and found["ranks"] == 0
        assert found["receipt"].eligible and not found["receipt"].notes
        assert found["took"] < 45, "no limit of any wait has passed"


def test_nor_where_ranks_may_use_other_parameters(ranks, tmp_path):
    how = {"who": 1, "how": "under no_sync", "find_unused_parameters": True}
    for found in values(ranks, "alone_first", folder=str(tmp_path), **how):
        assert found["grad"] <= 2 * EPSILON and found["ranks"] == 0
        assert found["receipt"].eligible and found["took"] < 45


def test_models_may_be_called_in_other_orders_at_first(ranks):
    for found in values(ranks, "two_models_in_other_orders"):
        assert found["grad"] == 0 and found["eligible"] == [True, True]


def test_a_rank_that_recompiles_is_heard_by_torchs_guard_collectives(ranks):
    first, second = values(ranks, "recompiles_with_guard_collectives")
    assert first["right"] and second["right"] and first["graphs"] == second["graphs"]
    assert first["graphs"][1:3] == [1, 2], "all compile if one has to"
    assert (first["before"], first["after"]) == (False, True)


def test_ranks_that_capture_other_graphs_all_say_so(ranks):
    """Before any exchanges something: with the place in the user's model."""
    outcomes = ranks.outcomes(CASES + "ranks_take_other_branches", 60)
    words = {outcome.error[outcome.error.rindex("dcompile: ranks disagree") :].splitlines()[3] for outcome in outcomes}
    assert len(words) == 1, "the same on both"
    for outcome in outcomes:
        assert "PlanMismatchError: dcompile: ranks disagree on their captured graphs" in outcome.error
        assert "models.py:" in outcome.error


def test_an_exception_on_one_rank_ends_the_other(ranks):
    began = time.monotonic()
    other, failed = ranks.outcomes(CASES + "raises_on_one_rank", 100)
    assert failed.kind == "ValueError" and "mine" in failed.error
    assert other.kind == "RuntimeError" and "rank 0 was waiting for the all-reduce of gradient bucket0" in other.error
    assert time.monotonic() - began < 90


def test_the_harness_ends_a_hang_with_every_ranks_stacks(ranks):
    ranks.run(CASES + "nothing")  # a fresh pair still has to import the cases
    with pytest.raises(RanksFailed) as failure:
        ranks.run(CASES + "hangs", 1)
    assert "no answer from ranks [1] within 1 s" in str(failure.value) and "in hangs" in str(failure.value)
    assert not ranks._processes


def test_a_rank_that_is_killed_while_it_writes_to_the_store_leaves_it_to_the_others(ranks):
    """As the thread of `coordination/heartbeat.py` may be. torch's FileStore never finds the end of half an entry."""
    first, second = ranks.outcomes(CASES + "dies_while_it_writes_to_the_store", 20)
    assert (first.value, first.error) == (False, "") and second.kind == "EOFError"
