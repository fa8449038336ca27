"""TRL's SFTTrainer on two ranks, full and with PEFT's LoRA: several graphs under DDP that allows unused parameters."""

from __future__ import annotations

import json

import pytest

from tests.subject import torchrun

SCRIPT = "tests/integrations/sft_script.py"
ARRIVING = "some calls copy their gradients into buckets as they arrive: the model was captured in several graphs"
pytestmark = [pytest.mark.doors, pytest.mark.timeout(450)]


def result_of(backend: str, folder, *flags: str) -> dict:
    folder.mkdir(exist_ok=True)
    command = (SCRIPT, "--backend", backend, "--folder", str(folder), *flags)
    process = torchrun(2, *command, timeout=200, DCOMPILE_RECEIPT="0", TOKENIZERS_PARALLELISM="false")
    assert process.returncode == 0, process.stderr
    line = next(line for line in process.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize("flags", [(), ("--lora",)], ids=["full", "lora"])
def test_sft_trains_the_same_and_ddp_is_taken_over(flags, tmp_path):
    eager, ours = (result_of(backend, tmp_path / backend, *flags) for backend in ("eager", "dcompile"))
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-4) and ours["losses"][-1] < ours["losses"][0]
    assert ours["ranks_equal"] and ours["saved"] == eager["saved"]
    receipt = ours["receipt"]
    assert (receipt["adapter"], receipt["eligible"], receipt["reasons"]) == ("ddp", True, [])
    assert receipt["collectives"] > 0 and receipt["graphs"] > 1
    assert any(note.startswith(ARRIVING) for note in receipt["notes"])
