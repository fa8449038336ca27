"""The benchmark of DeepSpeed on several GPUs, tried on two Gloo ranks and a small model; and its verdict."""

import importlib.util
import json

import pytest

from benchmarks import gpu_deepspeed
from benchmarks.gpu_deepspeed import parse, verdict
from benchmarks.ranks import run_job


@pytest.mark.deepspeed
@pytest.mark.timeout(580)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_lines_run_on_two_ranks(tmp_path):
    out = tmp_path / "out.json"
    arguments = [gpu_deepspeed.MODULE, "--only", "tiny-zero1,tiny-zero3", "--device", "cpu", "--quiet"]
    arguments += ["--peers", "deepspeed,deepcompile,dcompile zero", "--rounds", "1", "--steps", "1", "--out", str(out)]
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    assert not run_job("tests.small_llama", arguments, 2, 560, settings)
    result = json.loads(out.read_text())
    assert result["complete"] and result["ranks"] == 2
    for line in result["lines"].values():
        eager, ours = line["deepspeed"], line["dcompile zero"]
        assert ours["losses"] == pytest.approx(eager["losses"], rel=0.02)
        assert ours["norm"] == pytest.approx(eager["norm"], rel=0.02)
        assert ours["took_over"] and ours["graphs"] == 1 and ours["collectives_in_graphs"] > 0
        assert "error" in line["deepcompile"], "DeepCompile runs on CPUs now: compare with it"


def test_the_verdict_is_of_the_best_of_each_side():
    line = {"deepspeed": {"ms": 4.0}, "inductor": {"ms": 3.0}, "deepcompile": {"error": "no compiler"}}
    ours = {"dcompile": {"ms": 2.9}, "dcompile zero": {"ms": 2.4, "took_over": True}}
    assert verdict("1B-zero1", line | ours) == "1B-zero1, dcompile zero: step over inductor's 0.800, target 0.85: met"
    left = {"dcompile zero": {"ms": 2.7, "took_over": False, "reasons": ["zenflow"]}}
    assert verdict("1B-zero1", line | left).endswith("MISSED; ZeRO's collectives were LEFT TO DEEPSPEED: zenflow")
    assert "cannot be judged" in verdict("1B-zero1", {"dcompile": {"ms": 1.0}})


def test_unknown_lines_are_errors():
    with pytest.raises(SystemExit):
        parse(["--only", "2B-zero9"])


def test_architectures_are_given_as_deepspeed_reads_them():
    given = {"TORCH_CUDA_ARCH_LIST": "8.0;9.0a+PTX 10.0f"}
    assert gpu_deepspeed.plain_architectures(given) == {"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX 10.0"}
    assert gpu_deepspeed.plain_architectures({}) == {}
