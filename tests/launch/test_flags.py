"""launch/flags.py: a flag of one name holds the same kind of value in every launch script."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

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


def test_counts_are_checked() -> None:
    parser = argparse.ArgumentParser()
    flags.add_training_flags(parser, "out/x")
    args = parser.parse_args([])
    assert args.output_dir == Path("out/x") and args.checkpoint_interval > 0
    assert flags.positive("3") == 3 and flags.not_negative("0") == 0
    with pytest.raises(argparse.ArgumentTypeError, match="-1 is less than 0"):
        flags.not_negative("-1")
