"""Every hand-written kernel computes what eager computes: otherwise being slower than it would mean nothing."""

import pytest
import torch

from benchmarks import cpu_kernels


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", cpu_kernels.NAMES)
@pytest.mark.parametrize("dtype", cpu_kernels.DTYPES)
def test_by_hand_gives_what_eager_gives(name, dtype):
    results, case = [], cpu_kernels.cases(dtype)[name]
    for make in (lambda: case.make(cpu_kernels._as_it_is), lambda: case.by_hand()):
        torch.manual_seed(0)
        step = make()
        step()
        results.append(cpu_kernels._tensors(step()))
    expected, actual = results
    assert cpu_kernels.largest_difference(actual, expected) < cpu_kernels.TOLERANCES[dtype]


def test_names_are_those_of_the_cases():
    assert tuple(cpu_kernels.cases("float32")) == cpu_kernels.NAMES


def test_thread_counts_and_dtypes_are_lists():
    parsed = cpu_kernels.parse_arguments(["--threads", "1,2", "--dtype", "bfloat16"])
    assert (parsed.threads, parsed.dtype, parsed.clock) == ([1, 2], ["bfloat16"], "auto")
    with pytest.raises(SystemExit):
        cpu_kernels.parse_arguments(["--dtype", "float17"])


def test_ratios_say_how_many_times_faster_dcompile_is():
    steps = {"plain": {"median": 1.0}, "eager": {"median": 6.0}, "dcompile": {"median": 2.0}}
    assert cpu_kernels.ratios({"steps": steps}) == {"over_plain": 0.5, "over_eager": 3.0}
