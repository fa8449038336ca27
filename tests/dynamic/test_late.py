"""Sizes that a library call tells in the middle of a graph: on the CPU, and as for a GPU, by Triton's interpreter.

Those that are symbolic from the start are interpreted by `make test-full TESTS=tests/dynamic` alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dcompile.toolchain import triton_version
from tests import nursery
from tests.dynamic import late_cases

needs_triton = pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
NAMES = [*late_cases.FUNCTIONS, *(pytest.param(f"{n} dynamic", marks=pytest.mark.full) for n in late_cases.FUNCTIONS)]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, object]]:
    """What is wrong with each case, and its host programs, from a process in which Triton interprets."""
    names = [*late_cases.FUNCTIONS]
    names += [f"{name} dynamic" for name in names] if request.config.getoption("--full") else []
    command = [nursery.python(), "-m", "tests.dynamic.late_cases", *names]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


LONG = {"two": True, "chosen": None}
"""Cases that take longest, in one of both ways in a usual run: what else is symbolic is alike in all of them."""


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        pytest.param(
            name,
            dynamic,
            id=f"{name}-{'dynamic' if dynamic else 'fixed'}",
            marks=() if LONG.get(name, dynamic) == dynamic else pytest.mark.full,
        )
        for name in late_cases.FUNCTIONS
        for dynamic in (None, True)
    ],
)
def test_late_sizes_on_the_cpu(name, dynamic):
    wrong, receipt = late_cases.problem(late_cases.FUNCTIONS[name], "cpu", dynamic)
    assert not wrong, wrong
    assert receipt.kernels and receipt.fallbacks.keys() <= {"aten.index.Tensor", "aten.index_put.default"}, str(receipt)


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_late_sizes_on_a_gpu_give_eagers_values(name, found):
    assert found[name]["problem"] == ""


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_late_sizes_are_given_to_kernels(name, found):
    """The forward's; its backward, if it has one, is told them by its arguments."""
    for text in found[name]["texts"]:
        assert "run.launches(" in text, text
    forward = found[name]["texts"][0]
    assert re.search(r"_launch\d+\(stream, .*\bu\w+", forward), forward
    assert "run.grid(" in forward or name.startswith("counted"), "there the size is the length of two rows"
