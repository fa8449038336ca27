"""FSDP2 on two Gloo ranks: dcompile against stock eager FSDP2 in the same processes."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from tests.distributed.harness import Ranks

CASES = "tests.distributed.fsdp_cases:"
STOCK = {"kernels": "aten", "distributed": "stock"}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDE = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


def values(ranks, case, **keywords):
    return ranks.run(CASES + case, 150, **keywords)


@pytest.mark.parametrize(
    ("how", "collectives"),
    [
        # gathers of the forward, those that the backward needs again, reductions
        pytest.param({"name": "mlp", "wrap": "root"}, 1 + 0 + 1, id="mlp, root"),
        pytest.param({"name": "mlp"}, 3 + 1 + 3, id="mlp"),
        pytest.param({"name": "mlp", "accumulate": True}, 7, id="mlp, without sync"),
        pytest.param({"name": "mlp", "order": "torch.compile"}, 7, id="mlp, torch.compile"),
        pytest.param({"name": "mlp", "order": "module.compile"}, 7, id="mlp, module.compile"),
        pytest.param({"name": "mlp", "reshard_after_forward": False}, 3 + 0 + 3, id="mlp, not resharded"),
        pytest.param({"name": "uneven"}, 7, id="uneven and empty shards"),
        pytest.param({"name": "uneven", "wrap": "root", "accumulate": True}, 2, id="uneven, root, without sync"),
        pytest.param({"name": "llama"}, 3 + 2 + 3, id="Llama", marks=pytest.mark.full),
        # the root's in two: the embedding, and the last projection with its norm
        pytest.param({"name": "llama_wide"}, 4 + 2 + 4, id="Llama, many tokens"),
        pytest.param({"name": "llama_tied", "accumulate": True}, 3 + 2 + 3, id="tied Llama, without sync"),
        pytest.param({"name": "checkpointed"}, 3 + 2 + 3, id="mlp, gradient checkpointing"),
        pytest.param({"name": "mlp", "wrap": "meta"}, 7, id="mlp, from meta"),
        pytest.param({"name": "mlp", "wrap": "ignored"}, 2, id="mlp, ignored parameters"),
        pytest.param({"name": "mlp", "wrap": "grouped"}, 2 + 1 + 2, id="mlp, two layers as one"),
        pytest.param({"name": "mlp", "factor": 2.0}, 7, id="mlp, a divisor of its own"),
        pytest.param({"name": "mlp", "mp_policy": BF16}, 7, id="mlp, bfloat16"),
        pytest.param({"name": "uneven", "offload_policy": OFFLOAD, "accumulate": True}, 7, id="uneven, in CPU memory"),
        pytest.param(
            {"name": "mlp", "wrap": "root", "mp_policy": WIDE, "accumulate": True}, 2, id="mlp, all of a policy"
        ),
        pytest.param({"name": "mlp", "wrap": "root", "mp_policy": FP16, "accumulate": True}, 2, id="mlp, float16"),
        pytest.param({"name": "uneven", "wrap": "root", "mp_policy": WIDE}, 2, id="uneven, all of a policy"),
    ],
)
def test_training_equals_stock_fsdp(ranks, how, collectives):
    for found in values(ranks, "against_stock", **how):
        receipt = found["receipt"]
        assert (receipt.adapter, receipt.eligible, receipt.reasons) == ("fsdp2", True, ())
        assert (receipt.graphs, receipt.graph_breaks, receipt.collectives) == (1, 0, collectives)
        assert (found["loss"], found["grad"], found["param"]) == (0, 0, 0)
        assert found["ranks"] == 0 or how.get("wrap") == "ignored"


@pytest.mark.parametrize("name", ["mlp", pytest.param("llama", marks=pytest.mark.full)])
def test_training_with_our_kernels_stays_close(ranks, name):
    for found in values(ranks, "against_stock", name=name, options={}):
        assert found["receipt"].kernels > 0 and found["receipt"].eligible
        assert found["ranks"] == 0
        assert found["loss"] <= 1e-5 and found["grad"] <= 1e-5


@pytest.mark.parametrize(
    "case", ["forwards_of_all_kinds", "kept_graph", "frozen", "autograd_grad", "left_over", "replicas"]
)
def test_ways_to_run_equal_stock_fsdp(ranks, case):
    for found in values(ranks, case):
        assert (found["grad"], found["param"], found["result"]) == (0, 0, 0)
        assert found["receipt"].eligible


@pytest.mark.parametrize("how", [{}, {"name": "llama"}, {"reshard_after_forward": False}], ids=str)
def test_recorded_steps_equal_stock_fsdp(ranks, how):
    for found in values(ranks, "recorded", **how):
        receipt = found["receipt"]
        assert (receipt.recordings, receipt.replays) == (2, 2) and not receipt.notes
        assert (found["grad"], found["param"]) == (0, 0)


def test_what_is_added_to_kept_gradients_is_not_recorded(ranks):
    for found in values(ranks, "recorded", accumulate=True):
        assert (found["grad"], found["param"]) == (0, 0)
        kept = "some calls run without a CUDA graph: gradients are kept for a later reduction, or were"
        assert any(kept in note for note in found["receipt"].notes)


def test_hooks_and_settings_equal_stock_fsdp(ranks):
    for found in values(ranks, "hooks_and_settings"):
        assert (found["grad"], found["param"], found["fired"]) == (0, 0, (6, True))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"name": "mlp", "options": STOCK}, "option distributed='stock'"),
        ({"name": "outside"}, "a part of the model is not compiled (graph break), where parameters would be missing"),
        ({"name": "returns", "wrap": "root"}, "the model returns or changes a parameter in its forward: a.weight"),
        ({"name": "changes", "wrap": "root"}, "the model returns or changes a parameter in its forward: a.weight"),
        ({"name": "mlp", "placement": 1}, "a parameter is sharded along dimension 1"),
    ],
    ids=["option", "graph break", "returns a parameter", "changes a parameter", "sharded columns"],
)
def test_what_cannot_be_taken_over_stays_stock(ranks, how, reason):
    for found in values(ranks, "stock_by_model", **how):
        assert (found["grad"], found["param"]) == (0, 0)
        assert (found["receipt"].eligible, found["receipt"].reasons) == (False, (reason,))


def test_checkpoints_go_both_ways(ranks, tmp_path):
    for found in values(ranks, "checkpoints", folder=str(tmp_path)):
        assert found == {"keys0": True, "same0": True, "keys1": True, "same1": True, "grad": 0}


def test_a_second_start_loads_its_graphs(ranks, tmp_path):
    for found in values(ranks, "started_again", folder=str(tmp_path)):
        assert found == {"cached": [0, 2], "built": 0, "eligible": True, "grad": 0}


def test_gathered_parameters_are_not_kept(ranks):
    for found in values(ranks, "memory"):
        assert found == {"gathered again": [], "kept": [640, 6400], "modules": True, "copied": 0}


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
def test_uneven_shards_on_four_ranks(four):
    for found in values(four, "against_stock", name="uneven", accumulate=True):
        # Gloo adds up parts of what it is given in different orders; stock gives it other pieces
        assert found["loss"] <= 1e-6 and found["grad"] <= 1e-6 and found["ranks"] == 0
        assert found["receipt"].eligible
