"""launch/flags.py: a flag of one name holds the same kind of value in every launch script."""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

import errors
import flags
import pytest

LAUNCH = Path(flags.__file__).parent
KINDS = {"positive": "int", "not_negative": "int"}
"""Types of flags that are checked numbers."""


def flags_of(script: Path) -> dict[str, str]:
    """Flag -> kind of its value, as the calls of `add` and `add_argument` in a script say."""
    found: dict[str, str] = {}
    for call in ast.walk(ast.parse(script.read_text())):
        if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Constant):
            continue
        name = call.args[0].value
        if isinstance(name, str) and name.startswith("--"):
            words = {word.arg: word.value for word in call.keywords}
            kind = (
                ast.unparse(words["type"]) if "type" in words else ast.unparse(words.get("action", ast.Constant("str")))
            )
            found[name] = KINDS.get(kind, kind)
    return found


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.py")), ids=lambda script: script.stem)
def test_flags_of_one_name_hold_the_same_kind_of_value(script: Path) -> None:
    common = flags_of(LAUNCH / "flags.py")
    assert {"--config", "--steps", "--compile.options"} <= common.keys()
    own = flags_of(script)
    assert {name: kind for name, kind in own.items() if name in common} == {
        name: kind for name, kind in common.items() if name in own
    }


SCRIPTS = ("train", "train_accelerate", "train_deepspeed", "train_hf_trainer", "generate", "run")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which nothing that takes seconds can be imported."""
    folder = tmp_path_factory.mktemp("poison")
    for name in ("torch", "transformers", "numpy", "dcompile"):
        (folder / f"{name}.py").write_text("raise SystemExit('too early')")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_comes_before_torch_and_names_the_script(name: str, without_torch: dict[str, str]) -> None:
    command = [sys.executable, f"launch/{name}.py", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, env=without_torch, cwd=LAUNCH.parent, check=False)
    assert (found.returncode, found.stderr) == (0, "") and f"launch/{name}.py [" in found.stdout.splitlines()[0]
    assert "(default: None)" not in found.stdout and "(default: [])" not in found.stdout


def test_of_all_ranks_the_first_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", waits.append)
    monkeypatch.setattr(errors.signal, "signal", lambda *how: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    parser = flags.Parser("train.py", "Train")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--help"])
        assert (ended.value.code, "usage" in capsys.readouterr().out) == (0, rank == 0)
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--no-such-flag"])
        assert ended.value.code == errors.USER_ERROR and waits == [errors.PATIENCE_SECONDS] * rank
        with pytest.raises(SystemExit), errors.clear_errors():
            raise errors.UserError("wrong")
        assert f"error (rank {rank}): wrong\n" in capsys.readouterr().err, "by any that torchrun does not end meanwhile"


def test_counts_are_checked() -> None:
    parser = argparse.ArgumentParser()
    flags.add_training_flags(parser, "out/x")
    args = parser.parse_args([])
    assert args.output_dir == Path("out/x") and args.checkpoint_interval > 0
    assert flags.positive("3") == 3 and flags.not_negative("0") == 0
    with pytest.raises(argparse.ArgumentTypeError, match="-1 is less than 0"):
        flags.not_negative("-1")
