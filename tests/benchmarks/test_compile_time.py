"""The benchmark of compile time: what it makes of logs and of the runs it compares."""

import pytest

from benchmarks import common, compile_time

LOG = [
    "forward0 lower: 100.0 ms",
    "forward0 fuse: 250.0 ms, 60 -> 38",
    "forward0 plan_memory: 50.0 ms, 38 -> 38",
    "forward0 emit: 20.0 ms",
    "forward0 host: 30.0 ms",
    "forward0: planned in 450.0 ms, 60 -> 38 steps",
    "forward0 build: 500.0 ms",
    "backward0: from the cache",
]


def test_the_stages_add_up_to_the_first_step():
    found = compile_time.stages(LOG, {"aot": 2.0, "compile": 1.05}, step=6.0, run=0.5)
    assert sum(found.values()) == pytest.approx(6.0)
    assert (found["lower"], found["schedule"], found["emit"], found["build"]) == pytest.approx((0.1, 0.3, 0.05, 0.5))
    assert found["load"] == pytest.approx(0.1) and found["dynamo"] == pytest.approx(2.45)


def run_of(seconds, **counts):
    counts = {"kernels": 2, "kernel_calls": 4, "built": 0, "graphs_cached": 2} | counts
    stages = dict.fromkeys(compile_time.STAGES, seconds / 8)
    return {"total": seconds + 1, "seconds": seconds, "cpu": seconds, "counts": counts, "stages": stages}


def lines_of(**counts):
    found = {
        "cold": [run_of(9.0), run_of(4.0), run_of(3.0)],
        "warm": [run_of(2.0, **counts), run_of(3.0)],
        "aot_eager": [run_of(2.0)],
    }
    line = compile_time.compared({**found, "inductor": [run_of(16.0)]})
    return [{"name": "llama_4", "errors": {}, **line}, {"name": "bert", "errors": {"warm": "exit 1"}}]


def test_figures_are_of_medians_and_failures_make_it_incomplete():
    result = compile_time.summary(lines_of(), threads=1)
    assert result["worst_cold_over_inductor"] == pytest.approx(0.25)  # of three starts, one much slower
    assert result["worst_total_over_inductor"] == pytest.approx(5 / 17)
    assert sum(result["lines"][0]["stages"]["cold"].values()) == pytest.approx(4.0)
    assert result["worst_warm_beyond_aot_eager"] == pytest.approx(0.5)
    assert result["warm_compiled_nothing"] and not result["complete"]
    assert "bert: warm: exit 1" in compile_time.page(result)


def test_without_peers_there_is_nothing_to_compare_and_the_page_says_so():
    line = compile_time.compared({"cold": [run_of(4.0)], "warm": [run_of(2.0)]})
    result = compile_time.summary([{"name": "bert", "errors": {}, **line}], threads=1)
    assert result["complete"] and result["worst_warm_beyond_aot_eager"] is None
    assert " - " in compile_time.page(result)


def test_each_round_starts_all_peers_and_only_warm_starts_share_a_cache(monkeypatch):
    starts = []

    def start(module, arguments, threads, timeout, settings):
        starts.append((arguments[1], settings.get("DCOMPILE_CACHE_DIR")))
        return run_of(float(len(starts)))

    monkeypatch.setattr(common, "in_fresh_process", start)
    compile_time.main(["--only", "bert", "--rounds", "2"])
    kept = starts[0][1]
    others = [("inductor", None), ("aot_eager", None)]
    assert kept is not None and starts[:4] == [("dcompile", kept), *others[::-1], ("dcompile", kept)]
    assert starts[4:] == [("dcompile", None), ("dcompile", kept), *others]


def test_a_stopped_run_goes_on_and_failed_lines_are_run_again(tmp_path):
    kept, ran = tmp_path / "lines.jsonl", []

    def run(name):
        ran.append(name)
        return {"name": name, "errors": {"warm": "exit 1"} if name == "bert" else {}}

    assert [line["name"] for line in common.resumed(["gpt2", "bert"], run, kept)] == ["gpt2", "bert"]
    names = ["bert", "gpt2", "resnet"]
    assert [line["name"] for line in common.resumed(names, run, kept)] == names
    assert ran == ["gpt2", "bert", "bert", "resnet"]
    common.resumed(["gpt2"], run, None)
    assert ran[-1] == "gpt2"


@pytest.mark.parametrize("counts", [{"built": 1}, {"graphs_cached": 1}])
def test_a_warm_start_that_worked_is_said(counts):
    assert not compile_time.summary(lines_of(**counts), threads=1)["warm_compiled_nothing"]


def test_every_line_can_be_made():
    for name in compile_time.CASES:
        model, batch = compile_time.make("llama_1" if name == "llama_32" else name)
        assert sum(1 for _ in model.parameters()) > 0 and batch
