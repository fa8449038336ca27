"""A sample of the campaign of planted faults, which `python -m tests.faults.campaign` runs as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import campaign, collective_faults
from tests.faults.fault_models import MODELS


def test_a_sample_of_faults_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "found.jsonl"
    monkeypatch.setenv("DCOMPILE_VERIFY", "0")
    campaign.run_model("waves", output, 0, each=5)
    found = [line for line in campaign.lines(output) if "fault" in line]
    wrong = [line for line in found if line["changes"]]
    assert len(found) == 5 and len(wrong) >= 3
    assert all(line["sentinel"] and line["named"] for line in wrong), campaign.summary(output)


def test_correct_models_raise_no_alarm_and_their_distance_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "clean.jsonl"
    campaign.run_clean(["margin"], output, 4)
    assert [line["checks"] for line in campaign.lines(output)] == [8, 8]
    assert not any(line["alarms"] for line in campaign.lines(output))
    assert all(0 < max(share for share, _ in line["shares"]) < 1 for line in campaign.lines(output))
    assert "alarm" not in campaign.clean_summary(output)


def test_a_fault_that_ends_its_process_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process writes that a fault begins, and is started again behind it."""
    output, starts = tmp_path / "found.jsonl", list[list[str]]()

    def run(command: list[str], **_: object) -> None:
        starts.append(command)
        campaign.write(output, {"begins": "first", "model": "waves"} if len(starts) == 1 else {"ends": "waves"})

    monkeypatch.setattr(campaign.subprocess, "run", run)
    campaign.run_all(["waves"], output, float("inf"))
    assert [command[-1] for command in starts] == ["0", "1"]
    assert json.loads(output.read_text().splitlines()[1])["error"] == "it ended the process"


def test_faults_of_collectives_are_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, faults = tmp_path / "found.jsonl", collective_faults.FAULTS["ddp"]
    chosen = {name: faults[name] for name in ("missing wait", "swapped shards")}
    monkeypatch.setattr(collective_faults, "FAULTS", {"ddp": chosen})
    monkeypatch.setattr(collective_faults, "MODELS", ("perceptron",))
    campaign.run_ranks(output, float("inf"))
    *wrong, right = campaign.lines(output)
    assert [line["changes"] and line["sentinel"] and line["named"] for line in wrong] == [True, True]
    assert not right["changes"] and not right["sentinel"] and not right["named"]


def test_there_are_thirty_models() -> None:
    assert len(MODELS) == 30
