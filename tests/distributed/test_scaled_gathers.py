"""All-gathers of 8-bit floats under FSDP2 on two Gloo ranks: stock's values, half the bytes, one all-reduce."""

import pytest

from tests.distributed.harness import Ranks

CASE = "tests.distributed.scaled_cases:against_stock"
WEIGHT_BYTES = 4 * 12 * 40 * 2
"""Of all weights in bfloat16."""
WAYS = {
    "scales found": {"looks": True},
    "scales of the user's": {"precompute": True, "reshard": False},
    "mixed, checkpointed, accumulated": {"mixed": True, "again": True, "accumulate": True},
}


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_values_are_stocks_and_bytes_are_half(ranks, how):
    for found in ranks.run(CASE, 150, **how):
        stock, own = found["losses"]
        receipt, plain = found["receipt"], found["plain"]
        assert own == stock
        assert receipt.eligible and receipt.graph_breaks == 0
        weights = WEIGHT_BYTES * (2 if how.get("reshard", True) else 1)
        assert plain.bytes_gathered - receipt.bytes_gathered == weights // 2


def test_bytes_are_copied_from_other_ranks_memory(ranks):
    for found in ranks.run(CASE, 150, copies=True, mixed=True):
        assert found["losses"][0] == found["losses"][1]
        assert found["receipt"].eligible and found["copied"] > 0


def test_one_all_reduce_a_call_finds_all_scales(ranks):
    for found in ranks.run(CASE, 150):
        assert found["counts"] == {"all-reduce of the scales of 4 parameters": 3}
        assert any("4 parameters are gathered as float8_e4m3fn" in note for note in found["receipt"].notes)


def test_scales_of_the_users_are_used(ranks):
    """They exist behind the first optimizer's step; the first call finds its own."""
    for found in ranks.run(CASE, 150, precompute=True):
        assert found["losses"][0] == found["losses"][1]
        assert found["counts"] == {"all-reduce of the scales of 4 parameters": 1}
        assert any("their scales are the user's" in note for note in found["receipt"].notes)


@pytest.mark.parametrize(
    ("weight", "reason"), [("ScaledByPowers", "scales by a rule of their own"), ("Shifted", "more than scale and cast")]
)
def test_other_extensions_stay_stock_with_a_reason(ranks, weight, reason):
    for found in ranks.run(CASE, 150, weight=weight):
        assert found["losses"][0] == found["losses"][1]
        assert not found["receipt"].eligible and reason in found["receipt"].reasons[0]
