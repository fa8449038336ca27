"""FSDP2 over tensor parallelism, on a mesh of data-parallel times parallel ranks: dcompile against stock."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.distributed.harness import Ranks

CASES = "tests.distributed.tp_cases:"
WIDE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
USED = "the model returns or changes a parameter in its forward: a.weight"


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.fixture(scope="module")
def four():
    group = Ranks(4)
    yield group
    group.stop()


def values(ranks, case, **keywords):
    return ranks.run(CASES + case, 240, **keywords)


def holds(found, within=0.0):
    """What is true of every training beside stock's."""
    receipt = found["receipt"]
    assert (receipt.adapter, receipt.eligible, receipt.reasons) == ("fsdp2", True, ())
    assert (receipt.graphs, receipt.graph_breaks) == (1, 0)
    assert found["ranks"] == 0 and found["keys"]
    for what in ("loss", "grad", "param", "after loading"):
        assert found[what] <= within, what


PAIRS = [
    pytest.param({"name": "two", "shape": (1, 2), "accumulate": True}, id="two layers, parallel, without sync"),
    pytest.param({"name": "mlp", "shape": (2, 1)}, id="mlp, sharded", marks=pytest.mark.full),
    pytest.param({"name": "sequence", "shape": (1, 2), "wrap": "root"}, id="along the sequence, parallel"),
    pytest.param({"name": "sequence", "shape": (2, 1), "order": "torch.compile"}, id="sharded", marks=pytest.mark.full),
    pytest.param({"name": "mixed", "shape": (1, 2), "mp_policy": WIDE}, id="bfloat16", marks=pytest.mark.full),
    pytest.param({"name": "llama", "shape": (1, 2)}, id="Llama", marks=pytest.mark.full),
    pytest.param({"name": "checkpointed", "shape": (1, 2)}, id="checkpointed, parallel"),
]


@pytest.mark.parametrize("how", PAIRS)
def test_training_equals_stock_on_two_ranks(ranks, how):
    for found in values(ranks, "against_stock", **how):
        holds(found)


def test_training_with_our_kernels_stays_close(ranks):
    for found in values(ranks, "against_stock", name="sequence", shape=(1, 2), options={}):
        assert found["receipt"].eligible and found["receipt"].kernels > 0
        assert found["ranks"] == 0 and found["relative"] <= 1e-5


@pytest.mark.parametrize("name", ["returns", pytest.param("changes", marks=pytest.mark.full)])
def test_models_that_hand_out_parameters_stay_stock(ranks, name):
    for found in values(ranks, "same_as_stock", name=name, shape=(1, 2)):
        assert (found["grad"], found["receipt"].eligible, found["receipt"].reasons) == (0, False, (USED,))


def test_checkpoints_go_both_ways(ranks, tmp_path):
    for found in values(ranks, "checkpoints", shape=(1, 2), folder=str(tmp_path)):
        assert found.pop("receipt").eligible
        assert found == {"keys0": True, "same0": 0, "keys1": True, "same1": 0, "grad": 0}


@pytest.mark.full
def test_a_dtensor_that_the_model_returns(ranks):
    for found in values(ranks, "loss_in_parallel", shape=(1, 2)):
        assert (found["loss"], found["grad"], found["receipt"].eligible) == (0, 0, True)


@pytest.mark.full
def test_ranks_share_what_is_compiled_though_their_groups_have_other_names(ranks, tmp_path):
    first, second = values(ranks, "started_again", shape=(2, 1), folder=str(tmp_path))
    assert first["group"] != second["group"]
    assert first["received"] + second["received"] == 2, "whoever came first compiled"
    for found in (first, second):
        assert (found["cached"], found["built"], found["notes"], found["grad"]) == ([0, 2], 0, (), 0)


# --- four ranks: two shards of two parallel parts each


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [
        {"name": "mlp", "shape": (2, 2), "accumulate": True},
        {"name": "sequence", "shape": (2, 2)},
        {"name": "llama", "shape": (2, 2)},
        {"name": "mlp", "shape": (2, 2), "mp_policy": WIDE, "wrap": "root"},
        {"name": "mlp", "shape": (2, 1, 2)},
        {"name": "mlp", "shape": (2, 2), "placement": 1},
    ],
    ids=str,
)
def test_training_equals_stock_on_four_ranks(four, how):
    for found in values(four, "against_stock", **how):
        holds(found)


@pytest.mark.full
def test_our_kernels_on_four_ranks_stay_close(four):
    for found in values(four, "against_stock", name="llama", shape=(2, 2), options={}):
        assert found["receipt"].eligible and found["receipt"].kernels > 0
        assert found["ranks"] == 0 and found["relative"] <= 1e-5


@pytest.mark.full
def test_uneven_parts_on_four_ranks(four):  # stock cannot load whole optimizer states into these
    for found in values(four, "same_as_stock", name="uneven", shape=(2, 2)):
        assert (found["grad"], found["receipt"].eligible) == (0, True)


@pytest.mark.full
@pytest.mark.parametrize("case", ["frozen_and_evaluated", "loss_in_parallel"])
def test_ways_to_run_on_four_ranks(four, case):
    for found in values(four, case, shape=(2, 2)):
        assert found.pop("receipt").eligible
        assert set(found.values()) == {0}


@pytest.mark.full
def test_checkpoints_of_four_ranks(four, tmp_path):
    for found in values(four, "checkpoints", shape=(2, 2), folder=str(tmp_path)):
        assert found.pop("receipt").eligible
        assert found == {"keys0": True, "same0": 0, "keys1": True, "same1": 0, "grad": 0}
