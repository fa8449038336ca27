"""Every hand-written kernel computes what eager computes: otherwise being slower than it would mean nothing."""

import pytest
import torch

from benchmarks import cpu_kernels, first_light


@pytest.fixture
def small(monkeypatch):
    """The same kernels on fewer and shorter rows; of multiples of 16, as what is measured: the transpose needs them."""
    sizes = {"SIZE": 320, "MATRIX": (320, 320), "ALL": (320 * 320,), "ELEMENTS": 10240, "TENSORS": 3}
    for name, value in {**sizes, "CE_ROWS": 5, "VOCABULARY": 3008, "LOGITS": (5, 3008)}.items():
        monkeypatch.setattr(cpu_kernels, name, value)
    monkeypatch.setattr(first_light, "SIZE", 320)
    monkeypatch.setattr(cpu_kernels.kernel, "__defaults__", ((320, 320),))
    cpu_kernels._logits_and_labels.cache_clear()
    yield
    cpu_kernels._logits_and_labels.cache_clear()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", cpu_kernels.NAMES)
@pytest.mark.parametrize("dtype", cpu_kernels.DTYPES)
def test_by_hand_gives_what_eager_gives(name, dtype, small):
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


def test_lines_of_several_processes_are_their_medians():
    def run(plain, dcompile, errors):
        steps = {"plain": plain, "dcompile": dcompile}
        timings = {peer: {"median": t, "fastest": t / 2, "spread": 0.1, "rounds": 7} for peer, t in steps.items()}
        line = {"name": "softmax", "dtype": "float32", "threads": 1, "steps": timings, "errors": errors}
        return {**line, **cpu_kernels.ratios(line)}

    runs = [run(1.0, 2.0, {}), run(3.0, 2.0, {"inductor": "failed"}), run(4.0, 5.0, {})]
    line = cpu_kernels.over_runs(runs)
    assert line["over_plain"] == 0.8
    assert [found["over_plain"] for found in line["runs"]] == [0.5, 1.5, 0.8]
    assert line["steps"]["plain"] == {"median": 3.0, "fastest": 0.5, "spread": 0.1, "rounds": 21}
    assert line["errors"] == {"inductor": "in 1 of 3 runs: failed"}
    assert cpu_kernels._speedup(line, "over_plain") == "0.80 (0.50-1.50)"
    assert cpu_kernels.over_runs(runs[:1]) == runs[0]
    assert cpu_kernels._speedup(runs[0], "over_plain") == "0.50"


def test_there_is_at_least_one_run():
    with pytest.raises(SystemExit):
        cpu_kernels.parse_arguments(["--runs", "0"])
