"""What 16 bits hold is stored in 16 bits; values stay bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion.narrow_buffers import narrow_buffers
from dcompile.ir.interpret import interpret
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
