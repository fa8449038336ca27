"""The numerics matrix: two ranks with ATen's kernels always, a sample of the rest, all of it by `make dist-matrix`."""

import pytest

from tests.distributed.harness import Ranks
from tests.distributed.matrix import ROWS

CLOSE = 1e-5
"""Relative difference of losses where sums may run in another order: own kernels, or more than two ranks."""
STEPS = 2
"""A first one, which compiles and in which DDP finds its buckets, and one like all later ones. Three backwards follow
them: one whose gradients stay, and two behind a checkpoint."""
EPSILON = 2**-23
"""One rounding of a float32 number, relative to its size."""


SAMPLE = [
    next(row for row in ROWS if row.name == name)
    for name in (
        "DDP: mlp, a group of half the ranks",
        "DDP: mlp, bf16 hook, no_sync, two buckets",
        "FSDP1: mlp, HYBRID_SHARD",
        "FSDP2: mlp, replicas, no_sync, parts saved",
        "FSDP2: weights tied over a graph break, no_sync",
    )
]
"""Rows that four ranks run otherwise than two: with several groups, or with sums that have an order."""
LLAMAS = [row for row in ROWS if row.name in ("DDP: llama", "FSDP1: llama", "FSDP2: tied Llama, no_sync")]


def rows(usual):
    """All rows; those that are not `usual` for `make dist-matrix` only."""
    return [pytest.param(row, id=row.name, marks=() if row in usual else pytest.mark.full) for row in ROWS]


@pytest.fixture(scope="module")
def pair():
    ranks = Ranks()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


def run(ranks, row, kernels):
    if row.missing:
        pytest.skip(f"this torch's DDP has no {row.needs}")
    results = ranks.run(row.case, 240, **row.how, steps=STEPS, options={"kernels": kernels})
    for found in results:
        receipt = found["receipt"]
        assert (receipt.adapter, receipt.eligible, receipt.reasons) == (row.adapter, not row.reasons, row.reasons)
        assert receipt.graphs == row.graphs and receipt.graph_breaks == max(row.graphs - 1, 0)
        wanted = row.own_collectives if kernels == "auto" and row.own_collectives else row.collectives
        assert receipt.collectives >= (row.graphs if wanted is None else wanted) or row.reasons
        assert wanted in (None, receipt.collectives)
        assert not row.note or any(row.note in note for note in receipt.notes)
        assert receipt.kernels > 0 or kernels == "aten" or not row.graphs
        assert found["ranks"] == 0, "ranks differ from one another"
        assert found["keys"], "checkpoints have other keys than stock's"
    return results


# the tied Llama has all that the other has, and more
@pytest.mark.parametrize("row", rows([row for row in ROWS if row.always and row.name != "DDP: llama"]))
def test_two_ranks_equal_stock(pair, row):
    for found in run(pair, row, "aten"):
        for what in ("param", "buffer", "after loading"):
            assert found[what] <= row.tolerance, what
        assert found["loss"] <= row.tolerance or found["relative"] <= (EPSILON if row.tolerance else 0)
        assert found["grad"] <= (2 * EPSILON if row.tolerance else 0)


BITWISE = [
    row for row in ROWS
    if row.name in ("DDP: layer shared over a graph break", "FSDP2: layer shared over a graph break, no_sync",
                    "DDP: tied Llama, no_sync", "FSDP2: mlp, gradient checkpointing")
]  # fmt: skip
"""Rows of a usual run: where gradients of several graphs are added, that is left to DDP and FSDP2."""


@pytest.mark.parametrize("row", rows(BITWISE))
def test_two_ranks_have_stocks_bits(pair, row):
    if row.missing:
        pytest.skip(f"this torch's DDP has no {row.needs}")
    for found in pair.run(row.case, 240, **row.how, steps=STEPS, options={"numerics": "bitwise"}):
        assert all(found[what] == 0 for what in ("param", "buffer", "after loading", "loss", "grad", "ranks"))
        several = row.graphs > 1
        assert found["receipt"].numerics == "bitwise" and found["receipt"].eligible == (not several and not row.reasons)


# of FSDP1 and FSDP2, a usual run has small models with our kernels on four ranks
@pytest.mark.parametrize("row", rows([row for row in LLAMAS if row.name.startswith("DDP")]))
def test_two_ranks_with_our_kernels_stay_close(pair, row):
    for found in run(pair, row, "auto"):
        assert found["relative"] <= CLOSE
        if "llama" in row.how["name"]:
            assert found["receipt"].bytes_copied == 0, "gradients are written where they are sent from"


def on_four(row, kernels):
    """A usual run has each row of the sample once, with these kernels or those."""
    usual = row in SAMPLE and kernels == ("auto", "aten")[SAMPLE.index(row) % 2]
    return pytest.param(row, kernels, id=f"{row.name}-{kernels}", marks=() if usual else pytest.mark.full)


@pytest.mark.parametrize(("row", "kernels"), [on_four(row, kernels) for row in ROWS for kernels in ("aten", "auto")])
def test_four_ranks_stay_close(four, row, kernels):
    for found in run(four, row, kernels):
        # gradients sent in 16 bits: no further from stock than a few times what other sums make of stock itself
        assert found["relative"] <= max(CLOSE, 4 * found.get("scatter", 0))
