"""Every hand-written kernel computes what eager computes: otherwise being slower than it would mean nothing."""

import pytest
import torch

from benchmarks import cpu_kernels


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", cpu_kernels.CASES)
def test_by_hand_gives_what_eager_gives(name):
    results = []
    for make in (lambda case: case.make(cpu_kernels._as_it_is), lambda case: case.by_hand()):
        torch.manual_seed(0)
        step = make(cpu_kernels.CASES[name])
        step()
        results.append(cpu_kernels._tensors(step()))
    expected, actual = results
    assert cpu_kernels.largest_difference(actual, expected) < cpu_kernels.CASES[name].tolerance


def test_ratios_say_how_many_times_faster_dcompile_is():
    steps = {"plain": {"median": 1.0}, "eager": {"median": 6.0}, "dcompile": {"median": 2.0}}
    assert cpu_kernels.ratios({"steps": steps}) == {"over_plain": 0.5, "over_eager": 3.0}
