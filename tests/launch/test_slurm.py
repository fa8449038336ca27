"""launch/train.slurm with a Slurm that is made up: the torchrun of every host, and that it trains."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests import nursery
from tests.job import ROOT, one_layer, run

SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames localhost,other" ] && printf "localhost\\nother\\n"\n'
SRUN = {"print": '#!/bin/sh\nprintf "%s\\n" "$@"\n', "run": '#!/bin/sh\nexec "$@"\n'}


def slurm(folder: Path, srun: str, nodes: int) -> dict[str, str]:
    """An environment as sbatch gives it, with commands of Slurm's in `folder`."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN[srun])):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "localhost,other",
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_CPUS_PER_TASK": "16", "SLURM_SUBMIT_DIR": str(ROOT),
    }  # fmt: skip


def test_every_host_starts_one_torchrun_that_meets_on_the_first(tmp_path: Path) -> None:
    command = ["bash", "launch/train.slurm", "--wrap", "fsdp"]
    done = subprocess.run(command, cwd=ROOT, env=slurm(tmp_path, "print", 2), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == shlex.split(
        ".venv/bin/python launch/run.py --nnodes 2 --nproc-per-node gpu --max-restarts 3 --rdzv-backend c10d "
        "--rdzv-id 1234567-0 --rdzv-endpoint localhost:34567 "
        "launch/train.py --output-dir out/slurm-1234567 --resume auto --wrap fsdp"
    )


@pytest.mark.full
def test_it_trains_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    how = {**slurm(tmp_path, "run", 1), "NPROC": "2", "PYTHON": nursery.python(), "PYTHON_EXEC": nursery.python()}
    small = [f"--config={one_layer(tmp_path)}", "--seq-len=32", "--data=LICENSE", "--device=cpu", "--backend=eager"]
    for steps in (2, 3):
        command = ["bash", "launch/train.slurm", *small, f"--output-dir={tmp_path}", f"--steps={steps}"]
        status, output = run(command, tmp_path, **how)
        assert status == 0 and "parameters equal on all ranks: yes" in output, output
    assert f"continuing from {tmp_path / 'step-000002'}, step 2" in output
