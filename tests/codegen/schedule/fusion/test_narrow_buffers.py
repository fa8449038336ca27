"""What 16 bits hold is stored in 16 bits; values stay bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion.narrow_buffers import keep_wide_values, narrow_buffers
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

WIDENED = """
program p(x, w)
  x: float32[6, 16] on cuda
  w: float16[6, 16] on cuda
  h: float32[6, 16] on cuda
  s: float32[16] on cuda
  y: float32[6, 16] on cuda
loop h [6, 16]
  v = cast(cast(x[i0, i1], float16), float32)
  h[i0, i1] = v
loop s [6, 16]
  s[i1] sum= h[i0, i1]
loop y [6, 16]
  in = lt(index(i0), 3)
  y[i0, i1] = sub(mul(h[i0, i1] if in else 0, s[i1]), h[-i0 + 5, i1])
return (y)
"""


def same(before, after):
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal(before.table[n].shape).astype(before.table[n].dtype) for n in before.inputs}
    for a, b in zip(interpret(before, given), interpret(after, given), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_widened_value_is_stored_as_it_was_before():
    program = parse(WIDENED)
    found = narrow_buffers(program)
    verify(found, before=program)
    assert found.table["h"].dtype == "float16" and found.table["s"].dtype == "float32"
    same(program, found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" on cuda", ""),  # the CPU's vectors widen at a cost
        ("return (y)", "return (y, h)"),  # the caller gets the dtype that was promised
        ("cast(cast(x[i0, i1], float16), float32)", "mul(x[i0, i1], 2.0)"),
        ("cast(cast(x[i0, i1], float16), float32)", "cast(cast(w[i0, i1], float32), float32)"),
        ("loop y", "h2 <- aten.neg.default(h[6, 16]) [alloc]\nloop y"),  # a library call reads it
    ],
    ids=["cpu", "output", "no cast", "as wide", "library"],
)
def test_others_stay(old, new):
    text = WIDENED.replace(old, new).replace(
        "  y: f", "  h2: float32[6, 16] on cuda\n  y: f" if "h2" in new else "  y: f"
    )
    program = parse(text)
    assert narrow_buffers(program) == program


def test_random_programs_keep_every_value():
    fewer = 0
    for seed in range(60):
        program, given = random_program(seed, 10)
        there = replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers))
        found = narrow_buffers(there)
        verify(found)
        fewer += found != there
        for a, b in zip(interpret(there, given), interpret(found, given), strict=True):
            np.testing.assert_array_equal(a, b)
    assert fewer >= 3


ROUNDED = """
program p(x, w)
  x: float16[6, 16]
  w: float16[6, 16]
  y: float16[6, 16]
  s: float32[6]
loop y [6, 16]
  a = cast(x[i0, i1], float32)
  b = cast(cast(mul(a, 3.0), float16), float32)
  c = cast(cast(mul(b, cast(w[i0, i1], float32)), float16), float32)
  y[i0, i1] = cast(add(c, b), float16)
loop s [6, 16]
  s[i0] sum= cast(cast(mul(cast(x[i0, i1], float32), 1.1), float8_e4m3fn), float32)
return (y, s)
"""


def test_values_stay_wide_until_they_are_stored():
    program = parse(ROUNDED)
    found = keep_wide_values(program)
    verify(found, before=program)
    loop, quantized = found.steps
    casts = [value.dtype for value in loop.body if isinstance(value, Apply) and value.op == "cast"]
    assert sorted(casts) == ["float16", "float32", "float32"], "two loads are widened, and one store is narrowed"
    assert quantized == program.steps[1], "8 bits are a quantization, which the user wants"


def test_values_that_stay_wide_are_nearer_to_float64():
    program = parse(ROUNDED)
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal((6, 16)).astype(program.table[n].dtype) for n in ("x", "w")}
    true = given["x"].astype(float) * 3 * (given["w"].astype(float) + 1)
    before, after = (interpret(each, given)[0].astype(float) for each in (program, keep_wide_values(program)))
    assert np.abs(after - true).sum() < np.abs(before - true).sum()


def test_a_loop_without_roundings_is_the_same():
    program = parse(WIDENED)
    assert keep_wide_values(program).steps[1:] == program.steps[1:]
