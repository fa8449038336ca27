"""Timing is interleaved and fair, and a child's failure is reported, not swallowed."""

import itertools
import json
import math
import time
from collections import Counter

import pytest

from benchmarks import common


def test_interleaved_times_are_those_of_one_call():
    order = []

    def sleeper(name, seconds):
        def call():
            order.append(name)
            time.sleep(seconds)

        return call

    timings = common.time_interleaved({"a": sleeper("a", 0.004), "b": sleeper("b", 0.012)}, seconds=0.3)
    assert 0.004 <= timings["a"].fastest <= timings["a"].median
    assert timings["b"].fastest >= 0.012
    assert timings["a"].rounds == timings["b"].rounds >= 7
    changes = sum(x != y for x, y in itertools.pairwise(order))
    assert changes >= timings["a"].rounds, "peers were not run in turn"


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_each_peer_runs_behind_each_other_one_equally_often(count):
    turns = common.orders(list(range(count)))
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    behind = Counter(pair for turn in turns for pair in itertools.pairwise(turn))
    assert set(behind) == {(a, b) for a in range(count) for b in range(count) if a != b}
    assert len(set(behind.values())) == 1 and len({turn[0] for turn in turns}) == count


def test_spread_is_the_middle_half_over_the_median():
    timing = common.Timing.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.median, timing.fastest, timing.spread) == (3.0, 1.0, 1.0)


def test_geomean():
    assert common.geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert common.geomean([]) is None


def test_table_lines_up():
    text = common.table(["name", "ms"], [["a", "10.0"], ["long name", "1.0"]])
    assert text.splitlines() == ["name         ms", "---------  ----", "a          10.0", "long name   1.0"]


def test_nan_is_the_worst_difference_wherever_it_comes():
    assert common.worst_of(iter((0.1, 0.3, 0.2))) == 0.3 and common.worst_of(()) == 0
    assert all(common.worst_of(numbers) == math.inf for numbers in ((math.nan, 0.1), (0.1, math.nan), (math.inf,)))


def test_a_failing_child_is_an_error_with_its_last_line():
    result = common.in_fresh_process("benchmarks.no_such_module", [], threads=1, timeout=60)
    assert "No module named benchmarks.no_such_module" in result["error"]


def test_a_child_that_hangs_is_ended():
    result = common.in_fresh_process("timeit", ["-n", "1", "import time; time.sleep(60)"], threads=1, timeout=0.5)
    assert "still running after" in result["error"]


def test_peak_memory_sees_what_is_freed_again():
    before = common.resident_mib()
    peak = common.peak_mib_during(lambda: bytearray(64 << 20).clear(), calls=1)
    assert 60 < peak - before < 90
    assert common.resident_mib() - before < 20


def test_results_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    environment = common.environment(threads=2)
    assert {"cpu", "cores", "threads", "torch", "compiler", "date"} <= environment.keys()
    path = common.save("first_light", "cpu", {"environment": environment})
    assert path.name.startswith("first_light-cpu-2") and path.suffix == ".json"
    assert json.loads(path.read_text())["environment"] == environment


def test_merging_takes_the_last_figure_of_a_file_of_several_runs(tmp_path):
    new, old = ({"lines": {"1B": {"dcompile": {"ms": ms}, **more}}} for ms, more in ((1.0, {}), (2.0, {"eager": {}})))
    file = tmp_path / "gpu_train-nvidia-h200.json"
    file.write_text(json.dumps({"benchmark": "gpu_train", "runs": [new, old]}))
    assert common.last_peers(common.stored([file])) == {"1B": {"dcompile": {"ms": 1.0}, "eager": {}}}
    file.write_text(json.dumps({"runs": [{}]}))
    with pytest.raises(SystemExit, match="holds no lines"):
        common.stored([file])
