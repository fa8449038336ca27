"""Offloaded activations under DDP and FSDP2 on two Gloo ranks: the same bits, beside collectives in the graphs."""

import pytest

CASES = "tests.distributed.offload_cases:"


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_gradients_have_the_same_bits(ranks, how, micro_batches):
    for found in ranks.run(CASES + "same_bits", 240, how=how, micro_batches=micro_batches):
        receipt = found["receipt"]
        assert found["same"]
        assert receipt.eligible and receipt.collectives > 1 and receipt.fallbacks == {}
        assert receipt.bytes_offloaded == (3 * (2 * 128 + 64) - 64) * 8 * 4
