"""Modules under DDP and FSDP one level inside what is compiled: taken over, or the receipt says why not."""

import re

import pytest
import torch

from tests.distributed.harness import Ranks

CASES = "tests.distributed.inside_cases:"
TAKEN = ("ddp in_function", "ddp as_argument", "ddp in_module", "fsdp2 in_function", "fsdp2 in_module")
REASONS = {
    "ddp left_stock": "option distributed='stock'",
    "ddp of_another_backend": "compiled by another backend",
    "ddp parts": "dcompile.compile(ddp_module)",
}


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(CASES + "all_ways", 150)


@pytest.mark.parametrize("way", TAKEN)
def test_a_module_inside_is_taken_over(found, way):
    for each in found:
        receipt = each[way]["receipt"]
        assert each[way]["equal"]
        assert receipt.eligible and receipt.adapter == way.partition(" ")[0] and receipt.collectives > 0


@pytest.mark.parametrize("way", REASONS)
def test_what_is_left_to_the_wrapper_has_a_reason(found, way):
    for each in found:
        receipt = each[way]["receipt"]
        assert each[way]["equal"] and receipt.collectives == 0
        if "another_backend" in way and receipt.eligible:
            assert torch.__version__ < "2.13", "older ones do not show the frame of DDP's forward"
            continue
        assert not receipt.eligible
        assert any(REASONS[way] in reason for reason in receipt.reasons)


def test_one_receipt_tells_of_all(found):
    for way in TAKEN:
        (printed,) = found[0][way]["printed"]
        assert re.search(rf"collectives? in the graphs, {way.partition(' ')[0].upper()}'s(; |$)", printed, re.MULTILINE)


def test_profile_measures_what_is_inside(ranks):
    assert ranks.run(CASES + "profiled", 150)[0] == ["all_reduce"]
