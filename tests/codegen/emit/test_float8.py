"""8-bit floats in kernels of C++ and of Triton, bit for bit as programs mean them."""

from __future__ import annotations

import re

import pytest

from dcompile.codegen.emit.triton import worker
from dcompile.codegen.emit.triton.compile import OPTIONS
from dcompile.codegen.emit.triton.library import INSTRUCTIONS
from dcompile.ir.interpret import interpret
from dcompile.ir.verify import verify
from dcompile.toolchain import triton_version
from tests.codegen.emit import float8, harness
from tests.codegen.emit.triton.test_kernel import assert_nothing_spilled, compiled, dumped, source

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
    return harness.interpreted_by("tests.codegen.emit.interpreted_float8")


@with_triton
@pytest.mark.parametrize("name", PROGRAMS)
def test_triton_converts_and_copies_bit_for_bit(name, interpreted):
    assert interpreted[name] == ""


LARGE = {
    "float8_e4m3fn of rows and columns": float8.turned(4096, 8192, "float8_e4m3fn"),
    "clamped float8_e5m2 of rows and columns": float8.turned(4096, 8192, "float8_e5m2", clamps=True),
    **{f"copy of {dtype}": float8.copied(4096, 8192, dtype) for dtype in ("float8_e4m3fn", "float8_e4m3fnuz")},
    "bfloat16 of float8_e4m3fn": float8.conversion("float8_e4m3fn", "bfloat16")[0],
}
CASTS = list(LARGE)[:2]


@with_triton
# all for the one without such instructions, one or two for each other
@pytest.mark.parametrize(
    ("name", "arch"), [*((name, 80) for name in LARGE), *zip(LARGE, (100, 90, 90, 89, 90), strict=True)]
)
def test_every_gpu_has_machine_code(name, arch, tmp_path):
    """With instructions for 8-bit floats only from compute capability 8.9 on."""
    ptx, _, cubin = compiled(source(LARGE[name]), arch, tmp_path)
    assert f".target sm_{arch}" in ptx and ("cvt.rn.satfinite.e" in ptx) == (arch >= 89 and name in CASTS)
    assert_nothing_spilled(cubin, tmp_path)
    # four rows at a time: no byte passes through shared memory alone
    assert name == "bfloat16 of float8_e4m3fn" or not re.search(
        r"(ST|LD)S\.[US](8|16)", dumped("-sass", cubin, tmp_path)
    )


@with_triton
def test_what_ptxas_refuses_is_compiled_with_integers(tmp_path, monkeypatch):
    kernel = source(float8.conversion("float32", "float8_e4m3fn")[0])
    described = {
        "name": kernel.name, "text": kernel.text,
        "functions": [{"name": n.function, "warps": n.warps, "types": n.types} for n in kernel.launches],
    }  # fmt: skip
    assert worker.FLOAT8 == INSTRUCTIONS and f"{INSTRUCTIONS}False" in kernel.text
    compile_function, refused = worker.compile_function, []

    def refuse_instructions(function, *args):
        made = compile_function(function, *args)
        if "satfinite" in made.asm["ptx"]:
            refused.append(function)
            raise RuntimeError("ptxas failed")
        return made

    monkeypatch.setattr(worker, "compile_function", refuse_instructions)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    archive = worker.compile_kernel(described, 90, dict(OPTIONS), tmp_path)
    assert refused and archive.startswith(b'[{"function"')
