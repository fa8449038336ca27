"""Frozen parameters, and results that no loss uses, on two Gloo ranks: what is exchanged, and what gets a gradient."""

import pytest

from tests.distributed.harness import Ranks

CASES = "tests.distributed.unused_cases:"
UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


def values(ranks, case, **keywords):
    return ranks.run(CASES + case, 150, **keywords)


@pytest.mark.parametrize("how", [{}, UNUSED, STATIC, UNUSED | {"apart": True}], ids=str)
def test_frozen_parameters_have_no_place_in_buckets_until_they_are_trained(ranks, how):
    for found in values(ranks, "frozen", **how):
        assert found["receipt"].eligible and found["grad"] <= 2**-20
        assert found["trained"] <= found["elements"] < 2 * found["trained"], "with their alignment"
