"""Every command and every example of the README runs as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job import ROOT, one_layer, run

TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]

ENVIRONMENT = {
    # this environment as it is: no set-up of another one
    "VENV": "",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    # the whole suite within itself would never end
    "TESTS": "tests/test_readme.py::test_commands_are_found",
    # for one test
    "WORKERS": "1",
    "PYTEST_ADDOPTS": "-p no:cacheprovider",
    # variables given to the make that runs this suite would reach the ones below through these
    "MAKEFLAGS": "",
    "MAKEOVERRIDES": "",
}


def shortened(command: str, folder: Path) -> str:
    """The command with a tiny model, few steps, and its output elsewhere."""
    command = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    first, *_ = shlex.split(command)
    small = f"--config {one_layer(folder)} --seq-len 32 --output-dir {folder}"
    if command.startswith("make train"):
        command = re.sub(r"STEPS=\d+", "", command)
        given = re.search(r'ARGS="([^"]*)"', command)
        rest = re.sub(r'ARGS="[^"]*"', "", command)
        backend = "BACKEND=eager" if given else ""  # what matters there is how arguments reach the script
        return f'{rest} {backend} STEPS=2 ARGS="{given[1] if given else ""} {small}"'
    if first.endswith("torchrun"):
        # `make train` compiles in such ranks, and reads the standard library
        return f"{command} --steps 2 --data {ROOT / 'LICENSE'} --backend eager {small}"
    if first.endswith("pytest"):
        return f"{command} $TESTS"
    if "pip install" in command:
        # what else the test extra needs, tools/install.sh has found by the same constraints for this very run
        return f"{command} --quiet --dry-run --no-deps"
    if "-m venv" in command:
        # pip unpacks itself there for five seconds; the commands behind it are run by another environment's
        return command.replace("-m venv .venv", f"-m venv --without-pip {folder / 'venv'}")
    return command


def fork() -> str:
    """Python with all imported. Those that only collect `TESTS` in this file need not import torch for it."""
    from tests import nursery

    return nursery.python()


def test_commands_are_found() -> None:
    assert "make train" in COMMANDS and "make test" in COMMANDS
    assert len(COMMANDS) >= 8 and len(blocks("python")) >= 2


def test_make_train_is_the_same_by_hand() -> None:
    """So one of the two compiles for both."""
    by_hand = next(command for command in COMMANDS if "torchrun" in command)
    variables = {**os.environ, **ENVIRONMENT, "NPROC": "2"}
    command = ["make", "--no-print-directory", "-n", "train"]
    said = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    made = shlex.split(said.stdout.replace("\\\n", " "))
    assert made[1] == "launch/run.py" and made[2:] == shlex.split(by_hand)[1:]  # which is torchrun, with short errors


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    # Processes that train are forks. From nothing: torchrun itself here, launch/train.py in tests/launch/test_train.py
    # (one process), and DDP with dcompile in the second example.
    trains = command.startswith("make train") or "torchrun" in command
    python = fork() if trains else sys.executable
    environment = {**ENVIRONMENT, "PYTHON": python, "PYTHON_EXEC": python}
    status, output = run(["bash", "-ec", shortened(command, tmp_path)], tmp_path, **environment)
    assert status == 0, output
    if "make train" in command or "launch/train.py" in command:
        assert "parameters equal on all ranks: yes" in output


def only_rank() -> dict[str, str]:
    """What torchrun tells the only rank of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_example(number: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks("python")[number].replace("timeline.svg", str(tmp_path / "timeline.svg")))
    python = sys.executable if number else fork()  # the second starts from nothing
    status, output = run([python, str(script)], tmp_path, **only_rank())
    assert status == 0, output
    assert "no graph break" in output, "the receipt is printed"
    assert re.search(r"\d collectives? in the graphs, DDP's", output)
    if "dcompile.profile" in script.read_text():
        assert "all_reduce bucket0" in output and (tmp_path / "timeline.svg").read_text().startswith("<svg")
