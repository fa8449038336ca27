"""dcompile.bisect on two ranks: it names collectives, and places that are wrong on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.harness import Ranks

CASES = "tests.bisect.rank_cases:"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.mark.parametrize("wrapper", ("ddp", "fsdp2"))
def test_a_correct_model_has_no_difference(ranks: Ranks, wrapper: str) -> None:
    for kind, _, text in ranks.run(CASES + "planted", 200, wrapper=wrapper, fault=""):
        assert not kind and text.startswith("no difference found\n"), text


def test_a_wrong_divisor_is_found_in_the_collective(ranks: Ranks) -> None:
    for kind, name, text in ranks.run(CASES + "planted", 200, wrapper="ddp", fault="divisor"):
        assert kind == "collective" and name.startswith("all_reduce of "), text


def test_a_wrong_kernel_is_found_under_ddp(ranks: Ranks) -> None:
    for kind, _, text in ranks.run(CASES + "planted", 200, wrapper="ddp", fault="mul is printed as add"):
        assert kind == "kernel" and "op mul" in text, text


def test_a_wrong_reduce_scatter_is_found_to_be_a_collective(ranks: Ranks) -> None:
    for kind, _, text in ranks.run(CASES + "planted", 200, wrapper="fsdp2", fault="scatter"):
        assert kind == "collective" and "reduce_scatter of gradients" in text, text


def test_a_wrong_kernel_is_found_under_fsdp2(ranks: Ranks) -> None:
    for kind, _, text in ranks.run(CASES + "planted", 200, wrapper="fsdp2", fault="mul is printed as add"):
        assert kind == "kernel" and "op mul" in text, text


def test_ranks_that_differ_from_each_other_are_named(ranks: Ranks) -> None:
    for kind, name, text in ranks.run(CASES + "planted", 200, wrapper="ddp", fault="one rank"):
        assert (kind, name) == ("ranks", "rank 1 differs from rank 0"), text
