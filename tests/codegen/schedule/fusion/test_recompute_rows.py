"""Softmax is computed in the loop that sums values by its weights, where that costs less than a launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion import rematerialize as module
from dcompile.codegen.schedule.fusion.rematerialize import recompute_rows
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import View
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify

ATTENTION = """
program p(s, v)
  s: float32[6, 32] on DEVICE
  v: bfloat16[2, 32, 16] on DEVICE
  p: float32[6, 32] on DEVICE
  y: bfloat16[6, 16] on DEVICE
loop softmax [6] x [32]
  e = exp(sub(s[i0, j0], row_max(s[i0, j0])))
  p[i0, j0] = div(e, row_sum(e))
loop summed [2, 3, 16] x [32]
  y[i1 + 3*i0, i2] = cast(row_sum(mul(p[i1 + 3*i0, j0], cast(v[i0, j0, i2], float32))), bfloat16)
return (y)
"""


def attention(*changes, device="cuda"):
    text = ATTENTION.replace("DEVICE", device)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text)


def test_weights_are_computed_where_they_are_used():
    program = attention()
    after = recompute_rows(program)
    verify(after)
    (loop,) = after.steps
    assert loop.reads == {"s", "v"} and loop.outer == (2, 3, 16)
    assert "p" not in after.table
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(program.table[name].shape).astype(np.float32) for name in program.inputs}
    for got, want in zip(interpret(after, given), interpret(program, given), strict=True):
        np.testing.assert_array_equal(got, want)


def test_other_readers_keep_the_rows():
    program = attention()
    kept = replace(program, outputs=(*program.outputs, View("p", (6, 32), (32, 1))))
    assert recompute_rows(kept) is kept
    twice = attention(("return (y)", "loop again [6, 32]\n  s2[i0, i1] = p[i0, i1]\nreturn (y, s2)"),
                      ("  y: bf", "  s2: float32[6, 32] on cuda\n  y: bf"))  # fmt: skip
    assert recompute_rows(twice) is twice


@pytest.mark.parametrize(
    "changes",
    [
        # elements of another order: a program would need all rows
        [("p[i1 + 3*i0, j0]", "p[i1 + 3*i0, 31 - j0]")],
        # the loop sums over rows, not along them
        [("loop summed [2, 3, 16] x [32]", "loop summed [32, 16] x [6]"), ("y: bfloat16[6, 16]", "y: bfloat16[32, 16]"),
         ("y[i1 + 3*i0, i2] =", "y[i0, i1] ="), ("p[i1 + 3*i0, j0]", "p[j0, i0]"), ("v[i0, j0, i2]", "v[0, i0, i1]")],
        # no reductions: fusion has had the choice
        [("row_max(s[i0, j0])", "s[i0, 0]"), ("row_sum(e)", "2.0")],
        # the scores change in between
        [("loop summed", "loop change [6, 32]\n  s[i0, i1] = 0.0\nloop summed")],
    ],
)  # fmt: skip
def test_other_loops_stay(changes):
    program = attention(*changes)
    assert recompute_rows(program) is program


def test_long_rows_and_cpus_keep_their_kernel(monkeypatch):
    assert recompute_rows(on_cpu := attention(device="cpu")) is on_cpu
    long = attention(("32]", "32768]"), ("32, 16]", "32768, 16]"))
    assert recompute_rows(long) is long
    monkeypatch.setattr(module, "MAX_REPEATED_BYTES", 100)
    assert recompute_rows(program := attention()) is program
