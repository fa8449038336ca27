"""Sizes that a library call tells in the middle of a graph, on a GPU: values without one, by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcompile.machine import triton_version
from tests.dynamic import late_cases

pytestmark = pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
NAMES = [f"{name}{kind}" for name in late_cases.FUNCTIONS for kind in ("", " dynamic")]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    """What is wrong with each case, and its host programs, from a process in which Triton interprets."""
    command = [sys.executable, "-m", "tests.dynamic.late_cases"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_late_sizes_on_a_gpu_give_eagers_values(name, found):
    assert found[name]["problem"] == ""


@pytest.mark.parametrize("name", NAMES)
def test_what_needs_no_late_size_is_a_kernel(name, found):
    for text in found[name]["texts"]:
        assert "run.launches(" in text, text
