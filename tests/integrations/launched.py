"""The scripts of launch/ as a user runs them: two ranks on the CPU, a tiny model, few steps."""

from __future__ import annotations

import json
from pathlib import Path

from tests.job import one_layer
from tests.nursery import python
from tests.subject import torchrun


def losses_of(script: str, folder: Path, steps: int, *flags: str, seconds: int = 150) -> list[float]:
    """The losses that `launch/SCRIPT.py` writes to metrics.jsonl in `folder`."""
    folder.mkdir(exist_ok=True)
    command = (
        f"launch/{script}.py", "--config", str(one_layer(folder)), "--device", "cpu", "--steps", str(steps),
        "--seq-len", "32", "--data", "LICENSE", "--output-dir", str(folder), *flags,
    )  # fmt: skip
    process = torchrun(2, *command, python=python(), timeout=seconds)
    assert process.returncode == 0, process.stderr
    assert "parameters equal on all ranks: yes" in process.stdout
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
