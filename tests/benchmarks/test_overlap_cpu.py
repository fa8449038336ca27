"""The overlap benchmark on a tiny model: both peers train alike, dcompile reduces in its graph, files are written."""

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks import overlap_cpu
from benchmarks.overlap_cpu import Sample, show, summary
from benchmarks.ranks import run_job
from tests.job import one_layer


@pytest.mark.timeout(240)
def test_two_ranks_end_with_one_line_of_json(tmp_path, capsys, monkeypatch, forks):
    def run_small(module, arguments, *rest):
        return run_job("tests.small_llama", [module, *arguments], *rest)

    monkeypatch.setattr(overlap_cpu, "run_job", run_small)
    picture = tmp_path / "x.svg"
    model = one_layer(tmp_path).with_suffix("")  # a path of its own is no file of launch/configs
    arguments = ["--config", str(model), "--length", "32", "--rounds", "2", "--peers", "stock,dcompile"]
    arguments += ["--bucket-cap-mb", "0.1", "--timeline", str(picture), "--json"]
    assert overlap_cpu.main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["took_over"] and result["collectives"] > 1 and result["complete"]
    stock, ours = result["peers"]["stock"], result["peers"]["dcompile"]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert stock["of_stock"] == 1 and ours["of_stock"] > 0 and result["settings"]["ranks"] == 2
    assert 0 <= result["overlapped"] <= 1 and 0 <= result["exposed"] < 1 and result["teardown_s"] < 5
    assert len(list(ET.fromstring(picture.read_text()))) > 20


def test_ratios_are_within_a_round(capsys):
    rounds = [{"stock": Sample(wall, wall), "dcompile": Sample(wall / 2, wall / 4)} for wall in (1.0, 4.0, 2.0)]
    found = summary(rounds)
    assert found["dcompile"]["of_stock"] == 0.5 and found["dcompile"]["cpu_of_stock"] == 0.25
    assert found["stock"]["ms"] == 2000 and found["stock"]["spread"] == 1.5
    found["dcompile"]["of_stock"] = 1.01
    show({"peers": found, "took_over": False})
    said = capsys.readouterr().out
    assert "1.010, target 1.0: MISSED" in said and "LEFT COMMUNICATION TO STOCK" in said
