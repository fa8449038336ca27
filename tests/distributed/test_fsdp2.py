"""FSDP2 on two Gloo ranks: what is taken over, one thing at a time. Whole trainings: `test_matrix.py`."""

import pytest

from dcompile.compat.versions import torch_version
from tests.distributed.harness import Ranks
from tests.distributed.matrix import BF16, FP16, MIXED, WIDE

CASES = "tests.distributed.fsdp_cases:"
STOCK = {"kernels": "aten", "distributed": "stock"}
IN_TURN = ("forwards_of_all_kinds", "kept_graph", "autograd_grad", "counted_when_warm", "hooks_and_settings")
IN_TURN_COPIED = ("forwards_of_all_kinds", "kept_graph", "hooks_and_settings")


NORMS = 0.0 if torch_version() < "2.15" else 2e-4
"""How far gradients of a 16-bit RMSNorm's weight are off eager's with any compiler since torch 2.15, aot_eager too."""


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


def values(ranks, case, **keywords):
    return ranks.run(CASES + case, 150, **keywords)


def trained(ranks, **how):
    """Two steps before the checkpoint show what three do: the second is the first from the gradients of a step."""
    return values(ranks, "against_stock", steps=2, **how)


@pytest.fixture(scope="module")
def in_turn(ranks):
    """Ways to run that trace the same graph, one behind the other with one pair of models."""
    return values(ranks, "in_turn", cases=IN_TURN)


def test_ignored_parameters_are_each_ranks_own(ranks):
    results = trained(ranks, name="two", wrap="ignored")
    for found in results:
        assert found["receipt"].eligible and found["receipt"].collectives == 2
        assert (found["loss"], found["grad"], found["param"], found["after loading"]) == (0, 0, 0, 0)
        assert found["keys"]
    assert max(found["ranks"] for found in results) > 0


@pytest.mark.parametrize("case", ["frozen", "left_over", "replicas"])
def test_ways_to_run_equal_stock_fsdp(ranks, case):
    for found in values(ranks, case):
        assert (found["grad"], found["param"], found["result"]) == (0, 0, 0)
        assert found["receipt"].eligible


@pytest.mark.parametrize("case", IN_TURN)
def test_ways_to_run_in_turn_equal_stock_fsdp(in_turn, case):
    for found in in_turn:
        assert (found[case]["grad"], found[case]["param"], found[case]["result"]) == (0, 0, 0)
        assert found[case]["receipt"].eligible


def test_unsharded_parameters_are_visible_until_the_backward(ranks):
    for found in values(ranks, "visible_parameters"):
        assert max(found["grad"], found["param"], found["result"]) < 1e-6
        assert found["receipt"].eligible


@pytest.mark.parametrize("name", ["classes", pytest.param("classes_tied", marks=pytest.mark.full)])
def test_a_loss_by_parts_of_its_classes_is_reduced_once(ranks, name):
    whole = values(ranks, "receipt_of_a_step", name=name)[0]
    assert whole.eligible and not whole.notes
    for found in trained(ranks, name=name, options={"kernels": "aten", "chunked_loss": 4}):
        assert found["receipt"].eligible
        assert any("chunked_loss: 4 parts" in note for note in found["receipt"].notes)
        assert max(found["loss"], found["grad"], found["param"]) < 1e-9
        assert found["receipt"].collectives == whole.collectives


@pytest.mark.parametrize(
    "how", [pytest.param({}, marks=pytest.mark.full), {"mp_policy": MIXED}], ids=["float32", "mixed"]
)
def test_layers_that_are_captured_once_equal_stock_fsdp(ranks, how):
    for found in values(ranks, "with_copied_layers", steps=2, name="deep", **how):
        assert found["copies"] >= 2 or torch_version() < "2.12", "torch 2.11 traces each of FSDP2's layers"
        assert found["receipt"].eligible and found["receipt"].graph_breaks == 0
        assert max(found["loss"], found["grad"], found["param"]) <= NORMS


@pytest.mark.parametrize("name", ["classes_tied", pytest.param("classes", marks=pytest.mark.full)])
def test_a_loss_by_parts_of_its_rows_is_reduced_once(ranks, name):
    """The head's weight is gathered for the forward, which computes its gradient."""
    for found in values(ranks, "in_chunks_of_rows", name=name, steps=2, options={"kernels": "auto"}):
        receipt = found["receipt"]
        assert receipt.eligible and any("3 parts" in note and "with their gradients" in note for note in receipt.notes)
        assert max(found["loss"], found["grad"], found["param"]) < 1e-9


@pytest.mark.parametrize("warm", [False, True])
def test_a_mode_that_counts_collectives_counts_those_that_run(ranks, in_turn, warm):
    for found in [each["counted_when_warm"] for each in in_turn] if warm else values(ranks, "counted"):
        stock, own = found["counts"][:2], found["counts"][2:]
        assert own == stock and sum(own[0].values()) > 0
        assert (found["grad"], found["param"]) == (0, 0)
        assert found["receipt"].eligible, "the step without it is compiled"
        assert any("some calls run eagerly, with FSDP's own hooks" in note for note in found["receipt"].notes)


@pytest.mark.parametrize("how", [{"mp_policy": BF16}, {}], ids=["cast", "as gathered"])
def test_all_gather_extensions_stay_stock_and_right(ranks, how):
    """What is gathered anew for the backward is not taken for a change of what the forward has saved."""
    for found in values(ranks, "all_gather_extensions", **how):
        assert found["loss"] == 0
        assert not found["receipt"].eligible and found["receipt"].graphs > 0
        assert found["receipt"].reasons == ("parameters bring all-gather extensions (fsdp_pre_all_gather)",)


def test_collectives_of_a_compiled_backward_are_counted(ranks):
    assert all(count > 0 for count in values(ranks, "counted_backward"))


@pytest.mark.parametrize(
    ("name", "order"),
    [("composable", "compile"), pytest.param("composable", "torch.compile", marks=pytest.mark.full)],
)
def test_layers_that_hooks_run_again_are_compiled_whole(ranks, name, order):
    for found in trained(ranks, name=name, order=order):
        assert found["receipt"].eligible and found["receipt"].graph_breaks == 0
        assert (found["loss"], found["grad"], found["param"], found["ranks"]) == (0, 0, 0, 0)


def test_layers_that_hooks_run_again_beside_a_graph_break(ranks):
    for found in trained(ranks, name="composable_break", fullgraph=False):
        assert (found["loss"], found["grad"], found["param"], found["ranks"]) == (0, 0, 0, 0)


def test_checkpointed_attention_reads_no_mask(ranks):
    for found in trained(ranks, name="decoder_checkpointed", options={}):
        receipt = found["receipt"]
        assert receipt.eligible and receipt.graphs == 1 and not receipt.fallbacks
        assert any("1 attention calls were given a causal mask" in note for note in receipt.notes)
        assert max(found["loss"], found["grad"]) <= 1e-6 and found["ranks"] == 0


@pytest.mark.parametrize("cases", ["fsdp", "fsdp1"])
def test_a_model_that_nobody_holds_is_freed(ranks, cases):
    for found in ranks.run(f"tests.distributed.{cases}_cases:freed", 150):
        assert found["ours"] == found["stock"] == {"reached": True, "module": False, "parameter": False}


@pytest.mark.parametrize(
    "how",
    [
        {"reshard_after_forward": False},
        {"mp_policy": BF16},  # resharded
    ],
    ids=str,
)
def test_recorded_steps_equal_stock_fsdp(ranks, how):
    for found in values(ranks, "recorded", **how):
        receipt = found["receipt"]
        assert (receipt.recordings, receipt.replays) == (2, 2) and not receipt.notes
        assert (found["grad"], found["param"], found["left"]) == (0, 0, 0)


def test_what_is_added_to_kept_gradients_is_not_recorded(ranks):
    for found in values(ranks, "recorded", accumulate=True):
        assert (found["grad"], found["param"]) == (0, 0)
        kept = "some calls run without a CUDA graph: gradients are kept for a later reduction, or were"
        assert any(kept in note for note in found["receipt"].notes)


@pytest.mark.parametrize("how", [{"name": "uneven"}, {"name": "two", "wrap": "root", "accumulate": True}], ids=str)
def test_units_in_one_message_equal_stock_fsdp(ranks, how):
    for found in values(ranks, "packed", steps=2, **how):
        assert found["packed"] > 1 and found["receipt"].eligible
        assert (found["loss"], found["grad"], found["param"], found["after loading"]) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "how",
    [
        {"name": "uneven", "accumulate": True},
        {"name": "two", "reshard_after_forward": False},
        pytest.param({"of": "recorded"}, marks=pytest.mark.full),  # as below, of another model
        {"of": "moved"},
        {"of": "recorded", "name": "decoder", "mp_policy": MIXED},
        {"of": "written", "compiles_optimizer": False},
    ],
    ids=lambda how: ", ".join(map(str, how.values())),
)
def test_shards_that_are_copied_equal_stock_fsdp(ranks, how):
    for found in values(ranks, "copied", **({} if "of" in how else {"steps": 2}), **how):
        assert found["copied"] > 0
        assert max(found["grad"], found["param"]) <= (NORMS if how.get("name") == "decoder" else 0)
        assert found.get("loss", 0) == found.get("after loading", 0) == found.get("result", 0) == 0
        assert found.get("left", 0) == 0
        assert found["receipt"].recordings == found["receipt"].replays == (2 if how.get("of") == "recorded" else 0)


@pytest.fixture(scope="module")
def copied_in_turn(ranks):
    return values(ranks, "copied", of="in_turn", cases=IN_TURN_COPIED)


@pytest.mark.parametrize("case", IN_TURN_COPIED)
def test_ways_to_run_with_shards_that_are_copied_equal_stock_fsdp(copied_in_turn, case):
    for each in copied_in_turn:
        assert each[case]["copied"] > 0
        assert (each[case]["grad"], each[case]["param"], each[case]["result"]) == (0, 0, 0)


@pytest.mark.parametrize("how", [{"mp_policy": MIXED}, {"mp_policy": WIDE, "wrap": "root"}], ids=str)
def test_arguments_and_results_of_all_kinds_are_converted_as_by_stock_fsdp(ranks, how):
    for found in values(ranks, "outputs", **how):
        assert (found["grad"], found["param"], found["result"]) == (0, 0, 0)
        assert found["receipt"].eligible and found["receipt"].graph_breaks == 0


def test_changed_parameters_are_converted_whatever_changed_them(ranks):
    for found in values(ranks, "written"):
        assert (found["grad"], found["param"], found["result"]) == (0, 0, 0)
        assert found["receipt"].eligible


def test_shards_that_are_converted_for_each_gather_are_not_copied_and_it_is_said(ranks):
    options = {"kernels": "aten", "shard_copies": "gather"}
    for found in values(ranks, "copied", name="two", steps=2, mp_policy=MIXED, options=options):
        assert (found["loss"], found["grad"], found["param"], found["copied"]) == (0, 0, 0, 0)
        said = "they are converted for each gather: option shard_copies='gather'"
        assert any(said in note for note in found["receipt"].notes)


def test_shards_that_one_rank_cannot_reach_are_gathered_by_collectives_on_all(ranks):
    for found in values(ranks, "unreachable"):
        assert (found["loss"], found["grad"], found["param"], found["copied"]) == (0, 0, 0, 0)
        assert found["receipt"].notes == (
            "shards are gathered by collectives, not copied: rank 1 cannot reach them (another container)",
        )


def test_hooks_and_settings_equal_stock_fsdp(in_turn):
    for each in in_turn:
        assert each["hooks_and_settings"]["fired"] == (4, True)
        assert each["hooks_and_settings"]["again"] == 0  # programs of each reshard_after_forward are kept


def test_equal_blocks_run_the_programs_of_one(ranks):
    for found in values(ranks, "blocks_compiled_each"):
        assert (found["grad"], found["result"]) == (0, 0)
        # inference and training of the first four, of the frozen one, and of the one that stays gathered; then of the
        # one whose own hooks run
        assert found["graphs"] == [6, 6, 8] and found["equal"] == 2
        assert found["receipt"].eligible and found["receipt"].collectives > 0


@pytest.mark.parametrize("case", ["blocks_promoted", "blocks_promoted_in_wrappers"])
def test_blocks_compiled_each_become_one_program_of_their_root_while_that_holds(ranks, case):
    for found in values(ranks, case):
        assert (found["grad"], found["result"]) == (0, 0)
        for receipt in found["receipts"][1:4]:
            assert receipt.startswith("Stack: 1 graph, no graph break") and "6 parts that were compiled each" in receipt
        for receipt in found["receipts"][4:]:
            assert receipt.startswith("Block: ") and "an all-reduce hook is set" in receipt
        assert found["apart"] == 6, "each is a program of its own again"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("plain", "3 parts that were compiled each by itself run in one program"),
        ("breaks", "programs of their own: the code around them breaks the graph"),
        ("compiled by another", "programs of their own: the root is compiled by itself"),
        ("compiled late, recomputed", "3 parts that were compiled each by itself run in one program"),
    ],
)
def test_blocks_compiled_each_train_as_with_stock_whatever_their_root_does(ranks, how, said):
    for found in values(ranks, "blocks_in", how=how):
        assert (found["grad"], found["result"]) == (0, 0)
        assert said in found["receipt"] and found["seen"][0] == found["seen"][1]


@pytest.mark.parametrize("options", [{}, {"promote": False}])
def test_a_stage_of_a_pipeline_is_left_to_fsdp_with_the_reason(ranks, options):
    for found in values(ranks, "pipelined_stage", options=options):
        assert found["grad"] == 0 and found["count"] == 8
        assert "not eligible: torch.distributed.pipelining reduces gradients itself" in found["receipt"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"name": "two", "options": STOCK}, "option distributed='stock'"),
        ({"name": "returns", "wrap": "root"}, "the model returns or changes a parameter in its forward: a.weight"),
        ({"name": "changes", "wrap": "root"}, "the model returns or changes a parameter in its forward: a.weight"),
    ],
    ids=["option", "returns a parameter", "changes a parameter"],
)
def test_what_cannot_be_taken_over_stays_stock(ranks, how, reason):
    for found in values(ranks, "stock_by_model", **how):
        assert (found["grad"], found["param"]) == (0, 0)
        assert (found["receipt"].eligible, found["receipt"].reasons) == (False, (reason,))


@pytest.mark.parametrize(
    ("how", "graphs"),
    [
        ({"name": "layers_then_torchs"}, 5),
        pytest.param({"name": "layers"}, 5, marks=pytest.mark.full),
        pytest.param({"name": "llama_broken"}, None, marks=pytest.mark.full),
        pytest.param({"name": "llama_broken_tied", "wrap": "root", "accumulate": True}, None, marks=pytest.mark.full),
        ({"name": "decides"}, 3),
        pytest.param({"name": "layers", "wrap": "root", "accumulate": True}, 5, marks=pytest.mark.full),
        pytest.param({"name": "layers", "reshard_after_forward": False}, 5, marks=pytest.mark.full),
        pytest.param({"name": "layers", "wrap": "meta", "saved": "parts"}, 5, marks=pytest.mark.full),
        pytest.param({"name": "layers", "mp_policy": BF16}, 5, marks=pytest.mark.full),
        # conversions of inputs and outputs are graphs of their own
        pytest.param(
            {"name": "shared", "wrap": "root", "mp_policy": WIDE, "accumulate": True}, 4, marks=pytest.mark.full
        ),
        pytest.param({"name": "layers", "order": "module.compile", "replicas": 2}, 5, marks=pytest.mark.full),
        pytest.param({"name": "layers", "order": "torch.compile", "placement": 1}, 5, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_each_graph_behind_a_break_gathers_and_reduces_its_own(ranks, how, graphs):
    for found in trained(ranks, fullgraph=False, **how):
        receipt = found["receipt"]
        assert (receipt.eligible, receipt.reasons) == (True, ())
        assert receipt.graphs == graphs if graphs else receipt.graphs > 5  # as versions of torch cut it
        assert receipt.collectives >= 4
        differences = [found[what] for what in ("loss", "grad", "param", "buffer", "after loading", "ranks")]
        assert differences == [0] * 6 and found["keys"]


@pytest.mark.parametrize("name", ["layer", pytest.param("shared", marks=pytest.mark.full)])
def test_graphs_behind_a_break_take_shards_from_the_other_ranks_memory(ranks, name):
    for found in values(ranks, "copied", name=name, steps=2, fullgraph=False):
        assert found["copied"] > 0 and found["receipt"].eligible
        assert (found["loss"], found["grad"], found["param"], found["after loading"]) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("hows", "reason"),
    [
        (("caught",), "parameter b.weight is used outside the compiled graphs (aten.linalg_vector_norm.default at m"),
        (("no_grad",), "a graph break leaves a part of the forward under torch.no_grad, or a checkpoint that runs it"),
        (("view",), "the model returns or changes a parameter in its forward: b.weight"),
        pytest.param(("hooks",), "a graph break leaves a part of the forward under hooks for saved tensors, as a",
                     marks=pytest.mark.full),
        pytest.param(("unshard",), "the model gathers parameters in its forward (unshard)", marks=pytest.mark.full),
        pytest.param(("memory",), "the memory of a parameter is asked for outside", marks=pytest.mark.full),
        pytest.param(("tanh", "short", "nothing"), "", marks=pytest.mark.full),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_lies_between_graphs(ranks, hows, reason):
    for found in values(ranks, "between_graphs", hows=hows):
        assert (found["grad"], found["param"], found["result"]) == (0, 0, 0)
        receipt = found["receipt"]
        assert receipt.eligible == (not reason) and len(receipt.reasons) == bool(reason)
        assert all(text.startswith(reason) for text in receipt.reasons)


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        ("layer", "parameter b.weight is used outside the compiled graphs (aten.t.default at models.py:"),
        pytest.param("hooks", "a graph break leaves a part of the forward under hooks", marks=pytest.mark.full),
    ],
)
def test_gradients_kept_for_a_later_step_go_to_fsdp_with_all_else(ranks, late, reason):
    hows = ("nothing", "nothing", "nothing", late)
    for found in values(ranks, "between_graphs", hows=hows, accumulate=True):
        assert (found["grad"], found["param"], found["result"]) == (0, 0, 0)
        assert found["eligible"] == [True, True, True, False, False]
        assert any(reason in text for text in (*found["receipt"].reasons, *found["receipt"].notes))


def test_breaks_with_cuda_graphs_stay_stock(ranks):
    for found in values(ranks, "recorded", name="shared", wrap="root"):
        assert (found["grad"], found["param"]) == (0, 0)
        assert found["receipt"].reasons == (
            "a part of the model is not compiled (graph break), which is not supported with CUDA graphs",
        )


def test_checkpoints_go_both_ways(ranks, tmp_path):
    for found in values(ranks, "checkpoints", folder=str(tmp_path)):
        assert found == {"keys0": True, "same0": True, "keys1": True, "same1": True, "grad": 0}


def test_a_second_start_loads_its_graphs(ranks, tmp_path):
    for found in values(ranks, "started_again", folder=str(tmp_path)):
        assert found == {"cached": [0, 2], "built": 0, "eligible": True, "grad": 0}


def test_gathered_parameters_are_not_kept(ranks):
    for found in values(ranks, "memory"):
        assert found == {"gathered again": [], "kept": [640, 6400], "sharded": [True, False], "copied": 0}


@pytest.mark.full
def test_sharded_columns_are_not_kept(ranks):
    for found in values(ranks, "memory", placement=1):
        assert found["gathered again"] == [] and found["sharded"] == [True, True]


def test_ranks_that_go_apart_behind_a_break_run_or_say_so(ranks):
    assert all(found["receipt"].eligible for found in values(ranks, "ranks_go_apart", how="tanh"))
    for how, text in (("short", "ranks disagree on their sharded coll"), ("layer", "ranks disagree on their use of")):
        first, second = ranks.outcomes(CASES + "ranks_go_apart", 100, how=how)
        assert first.error and second.kind == "PlanMismatchError" and text in second.error


@pytest.mark.parametrize(("where", "what"), [("forward", "the all-gather gather0 of"), ("backward", "the all-gather")])
def test_an_error_on_one_rank_ends_the_other_which_names_the_collective(ranks, where, what):
    first, second = ranks.outcomes(CASES + "one_rank_fails", 100, where=where)
    assert second.kind == "ValueError" and "mine" in second.error
    assert first.kind == "RuntimeError" and f"rank 0 was in {what}" in first.error
    assert "another rank has failed, stalled, or does not run this step" in first.error


# --- four ranks


@pytest.fixture(scope="module")
def four():
    group = Ranks(4)
    yield group
    group.stop()


@pytest.mark.full
@pytest.mark.parametrize("how", [{}, {"name": "uneven"}, {"mp_policy": FP16, "wrap": "root"}], ids=str)
def test_replicas_of_shards_equal_stock_fsdp(four, how):
    for found in values(four, "replicas", mesh=(2, 2), **how):
        assert (found["grad"], found["receipt"].eligible) == (0, True)


@pytest.mark.full
def test_blocks_apart_gather_over_those_ranks_for_each_other(four):
    """Each call of `fully_shard` has a group of its own, so no block runs what was compiled for another."""
    how = {"by": "apart", "reshard_after_forward": 2, "options": {"kernels": "auto"}, "steps": 2}
    for found in four.run("tests.distributed.by_blocks_cases:against_stock", 200, **how):
        assert found["receipt"].eligible and found["receipt"].graphs == 4 and found["ranks"] == 0
        assert any("of them in vain" in note for note in found["receipt"].notes)
        assert found["relative"] <= 1e-5


@pytest.mark.full
def test_backwards_gather_over_the_ranks_that_a_forward_leaves_parts_with(four):
    for found in values(four, "parts_for_the_backward"):
        assert found["over"] == {
            "forward": [4, 4, 4], "backward": [2, 2], "again": [4, 4], "evaluation": [4, 4, 4], "next": [2, 2, 4, 4, 4],
        }  # fmt: skip
        # Gloo adds up parts of what it is given in different orders; stock gives it other pieces
        assert found["grad"] <= 1e-6 and found["param"] == 0 and found["receipt"].eligible
