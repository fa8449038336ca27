"""The benchmark on several GPUs, tried on two Gloo ranks and a small model: all lines run, peers compute the same,
numbers are right."""

import json

import pytest

from benchmarks import gpu_ddp_fsdp
from benchmarks.gpu_ddp_fsdp import BASE, beside_communication, lanes, merge, parse, show, verdicts
from benchmarks.ranks import run_job


@pytest.mark.timeout(280)
def test_lines_run_on_two_ranks(tmp_path, forks):
    """DDP and FSDP2, with and without mixed precision, checkpoints and several batches, in one job."""
    out, lines = tmp_path / "out.json", "tiny-ddp,tiny-fsdp2-mixed,tiny-ddp-amp"
    arguments = [gpu_ddp_fsdp.MODULE, "--only", lines, "--peers", "eager,dcompile", "--device", "cpu", "--quiet"]
    arguments += ["--rounds", "2", "--steps", "1", "--out", str(out), "--timelines", str(tmp_path)]
    assert not run_job("tests.small_llama", arguments, 2, 240, {"OMP_NUM_THREADS": "1"})
    result = json.loads(out.read_text())
    assert result["complete"] and result["ranks"] == 2 and 0 <= result["teardown_s"] < 5
    assert list(result["lines"]) == lines.split(",")
    for name, line in result["lines"].items():
        assert list(line) == ["eager", "dcompile"]
        for found in line.values():
            assert found["ms"] > 0 and found["rounds"] == 2 and found["ranks_equal"]
        ours, batches = line["dcompile"], 1 if name == "tiny-ddp" else 2
        assert ours["losses"] == pytest.approx(line["eager"]["losses"], rel=0.02)
        assert ours["took_over"] and any("all_" in said for said in ours["profile"])
        assert ours["tokens_per_s"] == pytest.approx(2 * batches * 64 / ours["ms"] * 1e3)
    assert (tmp_path / "tiny-fsdp2-mixed-x2-dcompile.svg").read_text().startswith("<svg")
    ddp = result["lines"]["tiny-ddp"]["dcompile"]
    assert ddp["collectives_in_graphs"] == 1 and any("all_reduce" in said for said in ddp["profile"])


@pytest.mark.timeout(280)
def test_blocks_are_one_program_as_the_whole_is(tmp_path, forks):
    out, name = tmp_path / "out.json", "tiny-fsdp2-blocks"
    arguments = [gpu_ddp_fsdp.MODULE, "--only", name, "--peers", "dcompile by blocks,dcompile", "--device", "cpu"]
    arguments += ["--quiet", "--rounds", "1", "--steps", "1", "--out", str(out)]
    assert not run_job("tests.small_llama", arguments, 2, 240, {"OMP_NUM_THREADS": "1"})
    blocks, whole = json.loads(out.read_text())["lines"][name].values()
    assert blocks["took_over"] and blocks["collectives_in_graphs"] == whole["collectives_in_graphs"] > 0
    assert blocks["losses"] == whole["losses"]


def test_lines_name_their_own_peers_unless_asked():
    assert parse([]).peers == [] and parse(["--peers", "eager"]).peers == ["eager"]
    assert gpu_ddp_fsdp.LINES["160M-fsdp2-mixed"].peers == (BASE, "dcompile", "dcompile reduce-overhead")
    assert not gpu_ddp_fsdp.LINES["1B-fsdp2"].peers


def test_a_profile_is_shown_by_kinds_of_kernels(capsys):
    kinds = {"matrix products": [10, 5.0], "communication": [2, 1.0]}
    show({"ranks": 2, "lines": {"1B-fsdp2-mixed": {BASE: {"kinds": kinds}, "dcompile": {"kinds": kinds}}}})
    said = capsys.readouterr().out
    assert "5.00 (10)" in said and "6.00 (12)" in said and "communication" in said


def test_a_failing_rank_ends_the_job_and_says_why(forks):
    failed = run_job(gpu_ddp_fsdp.MODULE, ["--only", "nonsense"], 2, 100)
    assert "rank 0 ended with 2" in failed and "nonsense: not one of 160M-ddp" in failed


def test_exposed_is_where_only_nccl_runs():
    found = lanes([("gemm", 0, 4), ("ncclDevKernel_AllReduce", 3, 6), ("add", 5, 7), ("add", 8, 9)], 1)
    assert found == {
        "kernels": 4, "compute_ms": 7, "comm_ms": 3, "exposed_ms": 1, "idle_ms": 1, "profiled_ms": 9,
    }  # fmt: skip
    assert lanes([], 1)["profiled_ms"] == 0


def peer(ms, **more):
    return {"ms": ms, "exposed_ms": 1.0, "profiled_ms": 100.0, "peak_mib": 100.0, "reserved_mib": 150.0, **more}


def test_kernels_are_timed_alone_and_beside_collectives():
    events = [("nccl", 10, 14), ("gemm", 0, 2), ("gemm", 3, 5), ("gemm", 10, 13), ("gemm", 13, 19), ("add", 20, 21)]
    gemm, add = beside_communication(events, 2)
    assert gemm == ("gemm", 2.0, 6.5, 2e3, 3e3), "the last one was beside it for less than half of its time"
    assert add == ("add", 0.5, 0.5, 1e3, None)


def test_verdicts_are_of_the_fastest_mode(capsys):
    line = {
        BASE: peer(100.0),
        "dcompile": peer(90.0, took_over=True, peak_mib=80.0),
        "dcompile reduce-overhead": peer(80.0, took_over=True, replays=4, reserved_mib=140.0),
    }
    said = verdicts("1B-fsdp2", line)
    assert [text.split(": ", 1)[1] for text in said] == [
        "step over torch.compile's 0.800, target 0.85: met",
        "exposed part of the step 0.010, target 0.03: met",
        "peak memory over torch.compile's 0.933, target 0.9: MISSED",
    ]
    assert (
        "LEFT TO STOCK: no hooks"
        in verdicts("1B-ddp", {BASE: peer(2.0), "dcompile": peer(1.0, reasons=["no hooks"])})[-1]
    )
    assert "cannot be judged" in verdicts("1B-ddp", {BASE: {"error": "x"}})[0]
    show({"ranks": 2, "lines": {"1B-fsdp2": {**line, "eager": {"error": "out of memory"}}}})
    assert "out of memory" in capsys.readouterr().out


def test_float8_is_judged_by_bfloat16s_step():
    def peer(ms, gathered):
        return {"ms": ms, "took_over": True, "bytes_gathered": gathered}

    line = {BASE: {"ms": 9.0}, "dcompile": peer(8.0, 200), "dcompile float8": peer(6.0, 104)}
    assert [text.split(": ", 1)[1] for text in verdicts("8B-layers-fsdp2-float8", line)] == [
        "float8's step over bfloat16's 0.750, target 0.77: met",
        "float8 gathers 0.520 of bfloat16's bytes",
    ]


def test_results_are_merged(tmp_path):
    for name, lines, ranks in (
        ("a", {"1B-ddp": {BASE: {"ms": 1}}}, 2),
        ("b", {"1B-ddp": {"dcompile": {"ms": 2}}}, 2),
        ("c", {}, 4),
    ):
        (tmp_path / name).write_text(json.dumps({"lines": lines, "ranks": ranks, "complete": name != "b"}))
    both = merge([tmp_path / "a", tmp_path / "b"])
    assert both["lines"] == {"1B-ddp": {BASE: {"ms": 1}, "dcompile": {"ms": 2}}} and not both["complete"]
    with pytest.raises(SystemExit, match="do not belong together"):
        merge([tmp_path / "a", tmp_path / "c"])


def test_unknown_names_are_refused(capsys):
    assert parse(["--only", "1B-ddp"]).only == ["1B-ddp"]
    with pytest.raises(SystemExit):
        parse(["--peers", "dcompiler"])
    assert "dcompiler: not one of eager" in capsys.readouterr().err


def test_a_step_within_a_budget_is_compared_with_torch_compiles_at_the_same_peak():
    peers = {
        BASE: {"ms": 100.0, "peak_mib": 1000.0},
        "torch.compile budget 0.4": {"ms": 140.0, "peak_mib": 600.0},
        "dcompile": {"ms": 80.0, "peak_mib": 1000.0},
        "dcompile budget 0.75": {"ms": 96.0, "peak_mib": 800.0},
        "dcompile budget 0.5": {"ms": 150.0, "peak_mib": 500.0},
    }
    near, below = gpu_ddp_fsdp.over_budgets("1B-budgets", peers)
    assert near.endswith("peak 800 MiB (0.80), 96.0 ms, 0.800 of torch.compile's there, target 0.9: met")
    assert below.endswith("peak 500 MiB (0.50), 150.0 ms; torch.compile needs more memory")
    assert gpu_ddp_fsdp.over_budgets("1B-ddp", {BASE: peers[BASE], "dcompile": peers["dcompile"]}) == []
