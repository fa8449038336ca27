"""Graphs that free or make the memory of inputs compute with what was there, as eager mode does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import nursery


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What is wrong with each case, from a process that may end with a segmentation fault."""
    command = [nursery.python(), "-m", "tests.capture.resized"]  # born with torch imported
    done = subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("case", ["freed", "filled", "gathered", "twice", "anew"])
def test_memory_is_read_before_it_is_freed_and_written_after_it_is_made(case: str, found: dict[str, str]) -> None:
    assert found[f"{case} False"] == ""


@pytest.mark.parametrize("case", ["freed", "gathered", "twice"])
def test_the_backward_computes_with_what_the_forward_had(case: str, found: dict[str, str]) -> None:
    assert found[f"{case} True"] == ""
