"""The tape of an optimizer's numbers."""

import math

import pytest
import torch

from dcompile.capture.train_step.host_numbers import StateNumber, Tape, _bfloat16, _float16

RATE, COUNT = ("setting", 0, "lr", -1), ("state", 0, "step", -1)


def test_a_count_that_changes_later_is_read_as_it_was():
    tape = Tape()
    count = StateNumber(tape.source(COUNT, 2.0), torch.float32)
    product = tape.source(RATE, 0.5) * count
    count += 1
    assert tape.values[product.at] == 1.0
    assert tape.replayed({RATE: 0.25, COUNT: 8.0}.get)[product.at] == 2.0


@pytest.mark.parametrize(("rounded", "dtype"), [(_bfloat16, torch.bfloat16), (_float16, torch.float16)])
def test_factors_are_rounded_as_by_torch(rounded, dtype):
    numbers = torch.randn(2000, dtype=torch.float64) * 10 ** torch.linspace(-9, 6, 2000, dtype=torch.float64)
    numbers = torch.cat([numbers.float().double(), torch.tensor([0.0, math.inf, -math.inf, 2.0**-24])])
    assert [rounded(x) for x in numbers.tolist()] == numbers.float().to(dtype).tolist()
    assert math.isnan(rounded(math.nan))
