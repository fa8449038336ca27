"""A command under a deadline: when time is up, it and every process that it started are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
_QUIET = {"PYTHONWARNINGS": "ignore:Guards may run slower:RuntimeWarning"}
"""What TorchDynamo prints on Python 3.13.0 is no output of ours."""


def one_layer(folder: Path) -> Path:
    """The smallest model with one layer, as a file of the user's own: two ranks trace it again in each run."""
    config = json.loads((ROOT / "launch/configs/llama_debug.json").read_text()) | {"num_hidden_layers": 1}
    path = folder / "model.json"
    path.write_text(json.dumps(config))
    return path


def torchrun(ranks: int, *command: str, restarts: int = 0, python: str = sys.executable) -> list[str]:
    """The command line that runs a script on this machine's CPU."""
    launcher = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return [*launcher, "--max-restarts", str(restarts), *command]


class Job:
    """A started command. Output goes to files, so that a full pipe cannot stop it."""

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        variables = {**os.environ, **_QUIET, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def output(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def family(self) -> list[psutil.Process]:
        """The command's process and all its descendants, those alive now."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait(self, seconds: float) -> int:
        """The exit status; past the deadline everything is killed and the test fails with what was printed."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            for process in self.family():
                process.kill()
            self.process.wait()
            raise AssertionError(f"not done after {seconds} s:\n{self.output}") from None

    def wait_for(self, text: str, seconds: float) -> None:
        """Wait until `text` has been printed."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.wait(0)
                raise AssertionError(f"ended without {text!r}:\n{self.output}")
            time.sleep(0.1)


def run(command: list[str], folder: Path, seconds: float = 120, **environment: str) -> tuple[int, str]:
    """Run to the end: exit status and output."""
    job = Job(command, folder, **environment)
    return job.wait(seconds), job.output
