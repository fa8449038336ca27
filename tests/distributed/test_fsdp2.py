"""FSDP2 on two Gloo ranks: dcompile against stock eager FSDP2 in the same processes."""

import pytest

from tests.distributed.harness import Ranks

CASES = "tests.distributed.fsdp_cases:"


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
        pytest.param({"name": "llama"}, 3 + 2 + 3, id="Llama"),
        # the root's in two: the embedding, and the last projection with its norm
        pytest.param({"name": "llama_wide"}, 4 + 2 + 4, id="Llama, many tokens"),
        pytest.param({"name": "llama_tied", "accumulate": True}, 3 + 2 + 3, id="tied Llama, without sync"),
    ],
)
def test_training_equals_stock_fsdp(ranks, how, collectives):
    for found in values(ranks, "against_stock", **how):
        receipt = found["receipt"]
        assert (receipt.adapter, receipt.eligible, receipt.reasons) == ("fsdp2", True, ())
        assert (receipt.graphs, receipt.graph_breaks, receipt.collectives) == (1, 0, collectives)
        assert (found["loss"], found["grad"], found["param"], found["ranks"]) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_training_with_our_kernels_stays_close(ranks, name):
    for found in values(ranks, "against_stock", name=name, options={}):
        assert found["receipt"].kernels > 0 and found["receipt"].eligible
        assert found["ranks"] == 0
        assert found["loss"] <= 1e-5 and found["grad"] <= 1e-5


@pytest.mark.parametrize("case", ["forwards_of_all_kinds", "kept_graph", "frozen", "autograd_grad", "left_over"])
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
    ("case", "reason"),
    [
        ("stock_by_option", "option distributed='stock'"),
        ("graph_break", "a part of the model is not compiled (graph break), where parameters would be missing"),
    ],
)
def test_what_cannot_be_taken_over_stays_stock(ranks, case, reason):
    for found in values(ranks, case):
        assert (found["grad"], found["param"]) == (0, 0)
        assert (found["receipt"].eligible, found["receipt"].reasons) == (False, (reason,))


def test_checkpoints_go_both_ways(ranks, tmp_path):
    for found in values(ranks, "checkpoints", folder=str(tmp_path)):
        assert found == {"keys0": True, "same0": True, "keys1": True, "same1": True, "grad": 0}


def test_gathered_parameters_are_not_kept(ranks):
    for found in values(ranks, "memory"):
        assert found == {"gathered again": [], "kept": [640, 6400], "modules": True, "copied": 0}
