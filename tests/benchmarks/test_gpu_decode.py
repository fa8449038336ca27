"""The table of decoding, and the distance that logits may have; decoding itself needs a GPU to be worth its time."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_decode
from tests.job import run
from tests.nursery import python


def test_a_table_of_several_runs(tmp_path):
    lines = {
        "eager": {"ms": 20.0, "off": 0.02, "warm_up_s": 0.1},
        "torch.compile reduce-overhead": {"ms": 5.0, "off": 0.03, "warm_up_s": 30.0},
        "dcompile": {"error": "OutOfMemoryError"},
        "dcompile reduce-overhead": {"ms": 4.0, "off": 0.02, "warm_up_s": 14.0},
    }
    files = []
    for peer, line in lines.items():
        files.append(str(tmp_path / f"{len(files)}.json"))
        (tmp_path / files[-1]).write_text(json.dumps({"floor_ms": 3.0, "lines": {peer: line}}))
    result = gpu_decode.merged(files)
    assert result["lines"] == lines and not result["complete"]
    assert gpu_decode.rows(result) == [
        ["eager", "20.00", "15%", "0.25", "2.0e-02", "0"],
        ["torch.compile reduce-overhead", "5.00", "60%", "1.00", "3.0e-02", "30"],
        ["dcompile", "failed", "", "", "", ""],
        ["dcompile reduce-overhead", "4.00", "75%", "1.25", "2.0e-02", "14"],
    ]


def test_each_number_of_sequences_has_a_floor_and_a_base_of_its_own():
    peers = {"torch.compile reduce-overhead": (5.0, 8.0), "dcompile reduce-overhead": (4.0, 5.0)}
    lines = {
        gpu_decode.line_name(peer, batch): {"ms": ms, "off": 0.02, "warm_up_s": 1.0, "batch": batch}
        for batch, place in ((1, 0), (8, 1))
        for peer, ms in ((peer, times[place]) for peer, times in peers.items())
    }
    found = gpu_decode.rows({"floor_ms": {"1": 3.0, "8": 4.0}, "lines": lines})
    assert [row[:4] for row in found] == [
        ["torch.compile reduce-overhead", "5.00", "60%", "1.00"],
        ["dcompile reduce-overhead", "4.00", "75%", "1.25"],
        ["torch.compile reduce-overhead, batch 8", "8.00", "50%", "1.00"],
        ["dcompile reduce-overhead, batch 8", "5.00", "80%", "1.60"],
    ]


def test_distance_is_relative_and_never_hides_a_nan():
    want = torch.tensor([3.0, 4.0])
    assert gpu_decode.distance(want + torch.tensor([0.0, 0.5]), want) == pytest.approx(0.1)
    assert not gpu_decode.distance(want * torch.nan, want) <= gpu_decode.TOLERANCE


def test_the_slowest_rank_counts_and_a_failure_is_every_ranks():
    fast, slow, failed = {"ms": 2.0}, {"ms": 3.0}, {"error": "OutOfMemoryError"}
    assert gpu_decode.slowest([fast, slow]) == slow
    assert gpu_decode.slowest([fast, failed]) == failed


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("route", ["manual", "dtensor"])
def test_two_ranks_on_cpus(tmp_path, route):
    command = "-m benchmarks.gpu_decode --tp 2 --device cpu --shape tiny --layers 1 --length 192 --rounds 2 --json"
    status, output = run([python(), *command.split(), "--only", "eager,dcompile", "--route", route], tmp_path)
    assert status == 0, output
    result = json.loads(output.strip().splitlines()[-1])
    assert result["complete"] and result["tp"] == 2 and list(result["lines"]) == ["eager", "dcompile"]
    assert result["lines"]["dcompile"]["same_token"] > 0.9
