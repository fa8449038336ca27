"""A command of the nursery is like Python: arguments, input, outputs, status, signals; and torch is there already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import nursery

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there nursery.python() is Python itself")


def run(*arguments: str, given: str = "", python: str = "", **environment: str) -> tuple[int, str, str]:
    command = [python or nursery.python(), *arguments]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", "import sys; print(sys.argv, sys.stdin.read()); sys.exit(3)", "a b", "c"),
        ("-c", "import sys; sys.exit('in one line')"),
        ("-c", "import os; os.abort()"),
        ("-c", "import os; print(os.environ['GIVEN'], 'TEST_DEVICE' in os.environ, os.getcwd())"),
        ("-m", "calendar", "2026", "2"),
        ("-W", "error", "-c", "import sys; print(sys.warnoptions)"),
    ],
)
def test_it_does_what_python_does(arguments):
    ours, pythons = (run(*arguments, given="text", python=each, GIVEN="x") for each in ("", sys.executable))
    assert ours == pythons


def test_a_script_is_main_and_its_folder_is_searched(tmp_path: Path):
    (tmp_path / "beside.py").write_text("import __main__\nprint(__main__.__file__, __main__.__name__)")
    (tmp_path / "script.py").write_text("import beside, sys\nprint(sys.argv)\nraise KeyError('planted')")
    ours, pythons = (run(str(tmp_path / "script.py"), "x", python=each) for each in ("", sys.executable))
    assert ours[:2] == pythons[:2] and ours[0] == 1
    assert ours[2].endswith("KeyError: 'planted'\n")


@pytest.mark.skipif(nursery.context().get_start_method() == "spawn", reason="CUDA does not survive a fork")
def test_torch_is_there_and_nothing_is_compiled():
    status, out, err = run("-c", "import sys; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)")
    assert (status, out, err) == (0, "True True\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    process = subprocess.Popen([nursery.python(), "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(10) == -number
    process.stdout.close()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
