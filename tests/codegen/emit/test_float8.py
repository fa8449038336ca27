"""8-bit floats in kernels of C++ and of Triton, bit for bit as programs mean them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dcompile.ir.interpret import interpret
from dcompile.ir.verify import verify
from dcompile.toolchain import triton_version
from tests import nursery
from tests.codegen.emit import float8, harness
from tests.codegen.emit.triton.test_kernel import assert_nothing_spilled, compiled, source

PROGRAMS = float8.programs()
with_triton = pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def functions() -> dict[str, object]:
    return harness.compiled([program for program, _ in PROGRAMS.values()])


@pytest.mark.parametrize("name", PROGRAMS)
def test_cpp_converts_and_copies_bit_for_bit(name, functions):
    program, inputs = PROGRAMS[name]
    verify(program)
    results = harness.run(program, inputs, functions)
    assert not any(map(float8.differs, interpret(program, inputs), results))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What is wrong with each program, from a process in which Triton interprets."""
    command = [nursery.python(), "-m", "tests.codegen.emit.interpreted_float8"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@with_triton
@pytest.mark.parametrize("name", PROGRAMS)
def test_triton_converts_and_copies_bit_for_bit(name, interpreted):
    assert interpreted[name] == ""


LARGE = {
    **{f"{dtype} of rows and columns": float8.turned(4096, 8192, dtype) for dtype in ("float8_e4m3fn", "float8_e5m2")},
    **{f"copy of {dtype}": float8.copied(4096, 8192, dtype) for dtype in ("float8_e4m3fn", "float8_e4m3fnuz")},
    "bfloat16 of float8_e4m3fn": float8.conversion("float8_e4m3fn", "bfloat16")[0],
}


@with_triton
# all for the one without such instructions, one for each other
@pytest.mark.parametrize(
    ("name", "arch"), [*((name, 80) for name in LARGE), *zip(list(LARGE)[-2:], (90, 100), strict=True)]
)
def test_every_gpu_has_machine_code(name, arch, tmp_path):
    """Without instructions for 8-bit floats, which saturate, and which compute capability 8.0 does not have."""
    ptx, _, cubin = compiled(source(LARGE[name]), arch, tmp_path)
    assert f".target sm_{arch}" in ptx and "e4m3" not in ptx and "e5m2" not in ptx
    assert_nothing_spilled(cubin, tmp_path)
