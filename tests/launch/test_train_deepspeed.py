"""launch/train_deepspeed.py: its config, and a run on two Gloo ranks that goes on from its checkpoint."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import train_deepspeed
from common import UserError
from report import read_metrics

from tests.job import ROOT, one_layer, run, torchrun


def flags(**given: object) -> argparse.Namespace:
    defaults = {"deepspeed": "zero2", "batch_size": 3, "grad_accum": 2, "clip_norm": 0.5, "dtype": "bf16"}
    return argparse.Namespace(**(defaults | given))


@pytest.mark.parametrize("stage", range(4))
def test_auto_stands_for_a_flag(stage: int) -> None:
    config = train_deepspeed.deepspeed_config(flags(deepspeed=f"zero{stage}"))
    assert config["train_micro_batch_size_per_gpu"] == 3 and config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.5 and config["bf16"] == {"enabled": True}
    assert config["zero_optimization"]["stage"] == stage
    assert "auto" not in json.dumps(config)


def test_a_config_of_the_users_own_keeps_its_values(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 8, "gradient_clipping": "auto"}))
    config = train_deepspeed.deepspeed_config(flags(deepspeed=str(path)))
    assert config["train_micro_batch_size_per_gpu"] == 8 and config["gradient_clipping"] == 0.5
    assert "bf16" not in config
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        train_deepspeed.deepspeed_config(flags(deepspeed=str(path)))
    with pytest.raises(UserError, match="zero0, zero1, zero2, zero3"):
        train_deepspeed.deepspeed_config(flags(deepspeed="zero9"))


@pytest.mark.deepspeed
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_it_trains_and_goes_on(tmp_path: Path) -> None:
    common = (
        f"--config={one_layer(tmp_path)}", "--deepspeed=zero3", "--device=cpu", "--batch-size=2", "--seq-len=32",
        "--grad-accum=2", f"--data={ROOT / 'LICENSE'}", "--log-freq=1",
    )  # fmt: skip
    script, losses = "launch/train_deepspeed.py", {}
    for name, backend, more in (
        ("ours", "dcompile", ("--steps=2",)),
        ("ours", "dcompile", ("--steps=4", "--resume=auto")),
        ("eager", "eager", ("--steps=4",)),
    ):
        folder = tmp_path / name
        command = torchrun(2, script, *common, f"--backend={backend}", f"--output-dir={folder}", *more)
        status, output = run(command, tmp_path, 390)
        assert status == 0, output
        if backend == "dcompile":
            assert "collectives in the graphs, ZeRO 3" in output
        losses[name] = [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert losses["ours"] == pytest.approx(losses["eager"], rel=1e-4) and len(losses["ours"]) == 4
    assert losses["ours"][-1] < losses["ours"][0]
