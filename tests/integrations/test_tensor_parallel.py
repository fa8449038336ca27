"""Tensor-parallel decoding of Hugging Face's Llama: one process's tokens, one decode graph, its collectives planned."""

from collections.abc import Iterator

import pytest

from tests.distributed.harness import Ranks
from tests.integrations.tensor_parallel_cases import LAYERS

CASE = "tests.integrations.tensor_parallel_cases:decoded"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.mark.parametrize(
    "route",
    [
        pytest.param("manual", marks=pytest.mark.full),
        "dtensor",
        pytest.param("hf", marks=pytest.mark.full),
    ],
)
def test_tokens_are_those_of_one_process(ranks, route, tmp_path):
    for found in ranks.run(CASE, 240, route=route, folder=str(tmp_path)):
        assert found["first"] == found["second"] == found["eager"] == found["single"]
        assert len(set(found["single"])) > 3, "a model that repeats itself would prove little"
        first, second = found["first receipt"], found["second receipt"]
        print(first)
        assert (found["first graphs"], first.graphs, first.graph_breaks) == (1, 1, 0), "nothing is compiled again"
        assert first.collectives >= 2 * LAYERS and first.kernels > 0
        assert (first.fallbacks, first.notes, first.graphs_uncacheable) == ({}, (), 0)
        assert (second.built, second.graphs_cached) == (0, 1) and second.collectives == first.collectives
