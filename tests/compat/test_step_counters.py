"""Counters of an optimizer's steps, which are counted in their memory on a CPU."""

import pytest
import torch

from dcompile.compat.tensors import StepCounters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_counter_is_one_more_and_has_a_new_version(dtype):
    steps = [torch.tensor(float(number), dtype=dtype) for number in (0, 3, 2**24)]
    expected, before = [step + 1 for step in steps], [step._version for step in steps]
    StepCounters(steps).count()
    assert all(map(torch.equal, steps, expected)), "in float32 also where no more can be added"
    assert all(step._version > old for step, old in zip(steps, before, strict=True))


def test_counters_that_have_moved_or_are_others_are_not_the_same():
    steps = [torch.zeros(()), torch.zeros(())]
    counters = StepCounters(steps)
    assert counters.are([*steps]) and not counters.are(steps[:1]) and not counters.are([steps[0], torch.zeros(())])
    held = steps[1].data
    steps[1].data = torch.ones(())
    assert not counters.are(steps) and held.item() == 0
