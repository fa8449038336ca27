"""Lightning's Trainer and Fabric on two ranks: DDP is taken over, and all else is as without dcompile."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.subject import run, torchrun

SCRIPT = "tests/integrations/lightning_script.py"


def result_of(door: str, backend: str, folder) -> dict:
    folder.mkdir(exist_ok=True)
    process = torchrun(2, SCRIPT, "--door", door, "--backend", backend, "--folder", str(folder), timeout=200)
    assert process.returncode == 0, process.stderr
    line = next(line for line in process.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.doors
@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    "door", ["trainer", "trainer, step", "fabric", "fabric, torch.compile", "fabric, step", "fully_shard"]
)
def test_training_is_the_same_and_ddp_is_taken_over(door, tmp_path):
    eager, ours = (result_of(door, backend, tmp_path / backend) for backend in ("eager", "dcompile"))
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-5) and ours["losses"][-1] < ours["losses"][0]
    assert ours["keys"] == eager["keys"] and ours["ranks_equal"]
    assert ours.get("val", 0.0) == pytest.approx(eager.get("val", 0.0), rel=1e-5)
    receipt = ours["receipt"]
    adapter = "fsdp2" if door == "fully_shard" else "ddp"
    assert (receipt["adapter"], receipt["eligible"], receipt["reasons"]) == (adapter, True, [])
    assert receipt["graphs"] == 1 and receipt["collectives"] > 0
    joined = [
        note for note in receipt["notes"] if re.search("the updates of [1-9][0-9]* steps ran in the backward", note)
    ]
    assert bool(joined) == door.endswith("step"), receipt["notes"]
    assert receipt["graph_breaks"] == (0 if door.startswith("fabric") else 1), "self.log in the middle of a step"


@pytest.mark.doors
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.filterwarnings("ignore")
def test_steps_are_the_modules_own_again_behind_a_fit(tmp_path):
    import lightning
    import torch

    import dcompile
    from dcompile.errors import OptionError
    from dcompile.integrations.lightning import DcompileCallback, compile
    from tests.integrations.lightning_script import Lit, loader

    callback, module = DcompileCallback(options={"receipt": False}), Lit()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=2, callbacks=[callback], default_root_dir=tmp_path, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader())
    assert not {"training_step", "log", "log_dict"} & vars(module).keys()
    assert dcompile.receipt(module).graphs == 1
    with pytest.raises(OptionError, match=r"unknown option 'kernel', did you mean 'kernels'"):
        DcompileCallback(options={"kernel": "aten"})
    with pytest.raises(OptionError, match=r"Linear is not from fabric.setup; use dcompile.compile"):
        compile(torch.nn.Linear(2, 2))


@pytest.mark.usefixtures("forks")
def test_without_lightning_the_error_names_the_command():
    result = run(
        sys.executable, "-c", "import sys; sys.modules['lightning'] = None; import dcompile.integrations.lightning"
    )
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].endswith("(it is not installed): pip install 'lightning>=2.5'")
