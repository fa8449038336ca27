"""launch/run.py: torchrun whose last line is what went wrong."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import run
from errors import USER_ERROR
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests import nursery
from tests.job import run as run_job


def failing(exitcode: int):
    failure = ProcessFailure(local_rank=1, pid=77, exitcode=exitcode, error_file="/no/such/file")

    def torchrun(arguments: list[str]) -> None:
        assert arguments == ["script.py"]
        raise ChildFailedError("script.py", {1: failure})

    return torchrun


@pytest.mark.parametrize(
    ("exitcode", "status", "said"),
    [
        (USER_ERROR, USER_ERROR, ""),
        (1, 1, "launch: rank 1 (process 77) failed first: it exited with status 1\n"),
        (-9, 137, "launch: rank 1 (process 77) failed first: it was killed by SIGKILL\n"),
    ],
)
def test_a_failure_is_one_line_at_most(exitcode, status, said, capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["script.py"], failing(exitcode))
    assert ended.value.code == status and capsys.readouterr().err == said


def test_a_signal_ends_it_without_a_traceback():
    def torchrun(arguments: list[str]) -> None:
        raise SignalException("stop", signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        run.main([], torchrun)
    assert ended.value.code == 143


def test_clear_errors_stay_the_last_lines(tmp_path: Path):
    script = ["--standalone", "--nproc-per-node=1", "launch/train.py", "--device=cpu", "--data=/no/such/text"]
    status, output = run_job([nursery.python(), "launch/run.py", *script], tmp_path)
    assert status == USER_ERROR
    assert output == "error (rank 0): --data /no/such/text: no such file or folder\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--backend=tvm", "launch/train.py: error: argument --backend: invalid choice: 'tvm'"),
        ("--config=llama_7t", "error (rank 0): --config llama_7t: no such file"),
        pytest.param(
            "--compile.options=bucket=1", "error (rank 0): dcompile: unknown option 'bucket'", marks=pytest.mark.full
        ),
        pytest.param(
            "--output-dir=/dev/null/out",
            "error (rank 0): --output-dir /dev/null/out: Not a directory",
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_error_of_all_ranks_is_said_once(wrong: str, said: str, tmp_path: Path):
    script = ["--standalone", "--nproc-per-node=2", "launch/train.py", "--device=cpu", "--config=llama_debug"]
    where = f"--output-dir={tmp_path / 'out'}"
    status, output = run_job([nursery.python(), "launch/run.py", *script, where, wrong], tmp_path)
    assert status == USER_ERROR and output.count("error") == 1, output
    assert said in output.splitlines()[-1] and "Traceback" not in output


@pytest.mark.full  # a usual run has it without torchrun's summary
def test_the_summary_of_torchrun_itself_ends_with_the_error(tmp_path: Path):
    script = ["--standalone", "--nproc-per-node=1", "launch/train.py", "--device=cpu", "--data=/no/such/text"]
    status, output = run_job([sys.executable, "-m", "torch.distributed.run", *script], tmp_path)
    assert status == 1
    assert "traceback : --data /no/such/text: no such file or folder" in output.splitlines()[-2]
