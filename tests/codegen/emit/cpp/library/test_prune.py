"""The prelude of a file: all that its kernels may mean, compiled alone; and nothing that they do not."""

from __future__ import annotations

import re
import subprocess

import pytest

from dcompile.codegen.emit.cpp.compile import find_compiler, prune_prelude
from dcompile.codegen.emit.cpp.library.base import PRELUDE

SCALAR = """
extern "C" float one(float x, const float* from, float* to) {
  turn(from, 8, to, 8, 8, 8); return logaddexp_(tanh_(x), pow_(x, expm1_(x))) + philox_(1, 2, 3) + zeros[0];
}
"""
WIDE = """
extern "C" void one(const float* x, float* y) {
#ifdef VECTORS
  const wide a = load_float32(x); stream_float32(y, select_(not_(a < 0.f), erf_(a), fmod_(a, 2.f)));
#endif
  finish_streams();
}
"""
PAIRS = """
extern "C" void one(const u16* x, u16* y) {
#ifdef VECTORS
  const auto a = load_quad(x), b = a / (sigmoid_(a) + 1.f);
  put_quad(y, to_bfloat16(select_(a > 0.f | -a == 2.f, sqrt_(a), b)));
#endif
}
"""


@pytest.mark.parametrize("text", [SCALAR, WIDE, PAIRS, ""], ids=["scalar", "wide", "pairs", "nothing"])
def test_a_file_compiles_with_what_it_needs(text):
    compiler = find_compiler(30)
    command = (*compiler.command, *compiler.flags, "-Wfatal-errors", "-fsyntax-only", "-x", "c++", "-")
    done = subprocess.run(command, input=prune_prelude(text) + text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_all_overloads_of_a_name_are_there():
    """A call with some of them might mean another than with all."""
    for name in ("abs_", "min_", "to_float32", "select_"):
        head = re.compile(rf"^.*INLINE [^(]*\b{name}\([^)]*\)|^\w+\(.*\b{name}\b.*\)$", re.MULTILINE)
        there, whole = (
            head.findall(text)
            for text in (prune_prelude(f"{name} VECTORS pair"), re.sub(r"\) (?=[A-Z])", ")\n", PRELUDE))
        )
        assert len(whole) > 3 and there == whole


def test_what_nobody_mentions_is_left_out():
    text = prune_prelude("exp_")
    assert "exp_of(" in text and "run_calls(" in text
    assert not re.findall(r"lgamma_|tanh_|philox_\(|floordiv_", text)
    assert len(prune_prelude("")) < len(PRELUDE) / 5


def test_vectors_are_for_kernels_with_wide_loops():
    assert prune_prelude("int x;").startswith("#define NO_VECTORS\n#define NO_PAIRS\n#define NO_DOUBLES\n")
    assert prune_prelude("#ifdef VECTORS").startswith("#define NO_PAIRS\n#define NO_DOUBLES\n")
    assert "#define NO_" not in prune_prelude("#ifdef VECTORS_ROUND\nquad x; float64 y;")


def test_what_python_calls_is_in_every_file() -> None:
    text = prune_prelude("")
    assert "calls_from_python" in text and "run_calls" in text and "exp_of" not in text
