"""Which ranks had gradients, as the flags of reduced buckets say."""

import pytest
import torch

from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.gradient_presence import RanksWithGradients

BUCKET = Bucket("b", "bfloat16", "cpu", "ddp", (4,), ("x",), (0,), 34, idle=(7,), idle_offsets=(16,), marks=2)


class Memory:
    """A bucket of one gradient and two flags."""

    def __init__(self, *values):
        self.flat = torch.tensor(values, dtype=torch.bfloat16)


@pytest.mark.parametrize("one", [1.0, 0.25, 1 / 3])
def test_flags_are_counted_as_they_were_scaled_before_the_sum(one):
    ranks = RanksWithGradients()
    memory = Memory(5.0, 3 * one, one)
    ranks.note(BUCKET, memory, one)
    assert ranks.counts() == {4: 3, 7: 1}
    del memory
    assert ranks.counts() == {}, "flags are not kept alive for somebody who may ask"
