"""launch/train_deepspeed.py: its config, and a run on two Gloo ranks that goes on from its checkpoint."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import signal
from pathlib import Path

import pytest
import torch
import train_deepspeed
from data import END
from errors import UserError
from report import read_metrics
from transformers import AutoModelForCausalLM

from tests.job import ROOT, Job, one_layer, run, torchrun


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
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "hf") for name in ("ours", "eager")]
    tokens = torch.tensor([[END, *b"Licensed under the Apache"]])
    found, expected = (model(input_ids=tokens, labels=tokens).loss.item() for model in models)
    assert found == pytest.approx(expected, rel=1e-4) and found < math.log(258), "gathered, and trained"


@pytest.mark.deepspeed
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_a_signal_ends_it_with_a_checkpoint(tmp_path: Path) -> None:
    command = torchrun(
        2, "launch/train_deepspeed.py", f"--config={one_layer(tmp_path)}", "--deepspeed=zero1", "--device=cpu",
        "--batch-size=1", "--seq-len=32", f"--data={ROOT / 'LICENSE'}", "--log-freq=1", "--backend=eager",
        f"--output-dir={tmp_path / 'out'}", "--resume=auto",
    )  # fmt: skip
    job = Job([*command, "--steps=100000", "--checkpoint-interval=0"], tmp_path)
    job.wait_for("step 2", 300)
    assert not list((tmp_path / "out/checkpoints").glob("*")), "none is due yet"
    job.process.send_signal(signal.SIGTERM)
    job.wait(60)
    (saved,) = (tmp_path / "out/checkpoints").glob("step-*")
    assert f"stopped by SIGTERM: {saved} has step" in job.output and "go on with --resume auto" in job.output
    done = int(saved.name.removeprefix("step-"))
    assert run([*command, f"--steps={done + 1}"], tmp_path, 300)[0] == 0
    assert [line["step"] for line in read_metrics(tmp_path / "out/metrics.jsonl") if "loss" in line][-1] == done + 1
    assert (tmp_path / "out/hf/model.safetensors").is_file()
