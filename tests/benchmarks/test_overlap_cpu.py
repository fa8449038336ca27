"""The overlap benchmark on a tiny model: both peers train alike, dcompile reduces in its graph, files are written."""

import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks import overlap_cpu
from benchmarks.ddp_steps import HookedBucket, HookRecorder, Marks, step_of, with_marks
from benchmarks.overlap_cpu import Sample, parse, show, summary
from benchmarks.ranks import run_job
from tests.job import one_layer

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.timeout(240)
def test_two_ranks_end_with_one_line_of_json(tmp_path, capsys, monkeypatch, forks):
    def run_small(module, arguments, *rest):
        return run_job("tests.small_llama", [module, *arguments], *rest)

    monkeypatch.setattr(overlap_cpu, "run_job", run_small)
    picture = tmp_path / "x.svg"
    model = one_layer(tmp_path).with_suffix("")  # a path of its own is no file of launch/configs
    arguments = ["--config", str(model), "--length", "32", "--rounds", "2", "--peers", "stock,dcompile"]
    arguments += ["--bucket-cap-mb", "0.1", "--timeline", str(picture), "--json"]
    arguments += ["--picture", str(tmp_path / "y.svg"), "--above", "stock"]
    assert overlap_cpu.main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["took_over"] and result["collectives"] > 1 and result["complete"]
    stock, ours = result["peers"]["stock"], result["peers"]["dcompile"]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert stock["of_stock"] == 1 and ours["of_stock"] > 0 and result["settings"]["ranks"] == 2
    assert 0 <= result["overlapped"] <= 1 and 0 <= result["exposed"] < 1 and result["teardown_s"] < 5
    assert len(list(ET.fromstring(picture.read_text()))) > 20
    texts = [found.text for found in ET.fromstring((tmp_path / "y.svg").read_text()).iter(f"{SVG}text")]
    assert [text.partition(":")[0] for text in texts if text.startswith("DDP")][:2] == ["DDP", "DDP, dcompile"]
    assert {"waiting", "on the wire"} <= set(texts) or result["drawn"]["DDP"]["exposed_ms"] == 0
    assert len(result["drawn"]["DDP, dcompile"]["all_ms"]) == overlap_cpu.DRAWN


def test_ratios_are_within_a_round(capsys):
    rounds = [{"stock": Sample(wall, wall), "dcompile": Sample(wall / 2, wall / 4)} for wall in (1.0, 4.0, 2.0)]
    found = summary(rounds)
    assert found["dcompile"]["of_stock"] == 0.5 and found["dcompile"]["cpu_of_stock"] == 0.25
    assert found["stock"]["ms"] == 2000 and found["stock"]["spread"] == 1.5
    assert "of_compiled" not in found["dcompile"], "torch.compile was not in the job"
    found["dcompile"]["of_stock"] = 1.01
    show({"peers": found, "took_over": False})
    said = capsys.readouterr().out
    assert "1.010, target 1.0: MISSED" in said and "LEFT COMMUNICATION TO STOCK" in said
    found = summary([{"torch.compile": Sample(wall, wall), "dcompile": Sample(wall * 0.84, 0)} for wall in (1, 2, 3)])
    show({"peers": found})
    assert "dcompile's step over torch.compile's: 0.840, target 0.85: met" in capsys.readouterr().out


def test_a_step_of_stock_ddp_waits_from_the_last_gradient_to_the_end_of_its_buckets():
    buckets = object.__new__(HookRecorder)
    buckets.found = [HookedBucket(8, 4.0, 4.1, 5.5), HookedBucket(16, 5.9, 6.0, 7.5), HookedBucket(4, 6.0, 6.1, 7.0)]
    buckets.computed = 6.2
    marks = Marks(begin=1.0, forward=3.0, backward=8.0, clip=8.5, optimizer=9.0, end=9.5)
    step = step_of(marks, buckets, latest=[4.5, 5.9, 6.0])
    first, second, third = step.exchanges
    assert (first.exposed, third.exposed) == (0, 0) and second.exposed == pytest.approx(1.3)
    assert first.skew == 0.5 and first.wire == 1.0 and second.wait_end == 7.5
    lanes = [(span.lane, span.begin, span.end) for span in step.spans]
    assert lanes == [
        ("compute", 1.0, 3.0), ("compute", 3.0, 6.2), ("wait", 6.2, 7.5), ("compute", 7.5, 8.0),
        ("optimizer", 8.0, 8.5), ("optimizer", 8.5, 9.0),
    ]  # fmt: skip
    assert step.idle == pytest.approx(0.5), "zero_grad and the loss"
    again = with_marks(step, Marks(3.0, 3.0, 8.0, 8.0, 9.0, 9.2))
    assert again.seconds == pytest.approx(6.2) and again.spans[0].begin == 3.0


def test_a_picture_needs_ddp_and_both_peers(capsys):
    for more in (["--kind", "fsdp2"], ["--peers", "stock,dcompile"]):
        with pytest.raises(SystemExit):
            parse(["--picture", "x.svg", *more])
    assert "DDP only" in (said := capsys.readouterr().err) and "needs torch.compile among --peers" in said
