"""What is cheaper to compute again is not kept; values stay bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion import rematerialize as rematerialize_module
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.rematerialize import rematerialize
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Load
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(rematerialize_module, "MIN_RECOMPUTE_BYTES", 0)


NORM_BACKWARD = """
program p(dy, x)
  dy: float16[6, 16] on cuda
  x: float16[6, 16] on cuda
  p: float32[6, 16] on cuda
  s: float32[16] on cuda
  g: float16[6, 16] on cuda
loop product [6, 16]
  p[i0, i1] = mul(cast(dy[i0, i1], float32), cast(x[i0, i1], float32))
loop total [6, 16]
  s[i1] sum= p[i0, i1]
loop final [6, 16]
  g[i0, i1] = cast(sub(p[i0, i1], s[i1]), float16)
return (g)
"""
"""g = (dy - mean(dy)) as a batch norm's backward: the sum over rows stands between two uses of float32 images."""


def changed(text, changes):
    """A program with some parts of its text replaced."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text)


def norm_backward(*changes):
    return changed(NORM_BACKWARD, changes)


def inputs(program, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(program.table[n].shape).astype(program.table[n].dtype) for n in program.inputs}


def same(before, after, given):
    for a, b in zip(interpret(before, given), interpret(after, given), strict=True):
        np.testing.assert_array_equal(a, b)


def names(program):
    return {b.name for b in program.buffers}


def test_an_image_in_float32_is_computed_again_from_two_in_16_bits():
    program = norm_backward()
    fused = fuse(program)
    assert "p" in names(fused)
    found = rematerialize(fused)
    verify(found)
    assert "p" not in names(found)
    last = found.steps[-1]
    assert last.reads == {"dy", "x", "s"}
    same(program, found, inputs(program))
    same(program, plan_memory(found), inputs(program))


def test_on_the_cpu_it_is_kept():
    fused = fuse(norm_backward((" on cuda", "")))
    assert rematerialize(fused) is fused


def test_much_arithmetic_is_not_done_twice():
    product = "mul(cast(dy[i0, i1], float32), cast(x[i0, i1], float32))"
    heavy = norm_backward((product, "tanh(" * 6 + product + ")" * 6))
    assert "p" in names(rematerialize(fuse(heavy)))


def test_what_is_made_from_more_than_it_takes_is_kept():
    """Two inputs of float32 and a result of 16 bits: reading that is less than half."""
    program = norm_backward(
        ("dy: float16", "dy: float32"),
        ("x: float16", "x: float32"),
        ("p: float32", "p: float16"),
        ("p[i0, i1] = mul(cast(dy[i0, i1], float32), cast(x[i0, i1], float32))",
         "p[i0, i1] = cast(mul(dy[i0, i1], x[i0, i1]), float16)"),
        ("sum= p[i0, i1]", "sum= cast(p[i0, i1], float32)"),
        ("sub(p[i0, i1]", "sub(cast(p[i0, i1], float32)"),
    )  # fmt: skip
    found = rematerialize(fuse(program))
    assert "p" in names(found)
    same(program, found, inputs(program))


def test_a_sharded_parameter_is_read_first_where_it_was():
    """Otherwise, its gather would move, and on a rank with symbolic sizes it would not."""
    group = (0, "float16", "cuda")
    program = norm_backward()
    assert "p" in names(rematerialize(fuse(program), [(1, group)]))
    earlier = norm_backward(
        ("loop product", "x2 <- aten.clone.default(x) [alloc]\nloop product"),
        ("  s:", "  x2: float16[6, 16] on cuda\n  s:"),
        ("return (g)", "return (g, x2)"),
    )
    found = rematerialize(fuse(earlier), [(1, group)])
    assert "p" not in names(found)
    same(program, rematerialize(fuse(program), [(1, group)]), inputs(program))


def test_what_has_changed_since_is_not_read_again():
    change = """
        loop change [6, 16]
          was = cast(x[i0, i1], float32)
          x[i0, i1] = cast(add(was, was), float16)
    """
    program = norm_backward(("loop final", f"{change}\nloop final"))
    found = rematerialize(program)
    assert "p" in names(found)
    same(program, found, inputs(program))


def test_what_the_library_reads_is_kept():
    program = norm_backward(
        ("  s: ", "  q: float32[6, 16] on cuda\n  s: "),
        ("return (g)", "q <- aten.clone.default(p) [alloc]\nreturn (g, q)"),
    )
    assert "p" in names(rematerialize(program))


BEHIND = {
    "not below": "behind = not(lt(index(i1 - 8), 0))",
    "from": "behind = ge(index(i1), 8)",
    "not up to": "behind = not(le(index(i1 + 1), 8))",
    "above": "behind = gt(index(i1), 7)",
    "between": "place = index(i1)\nbehind = and(ge(place, 8), lt(place, 15))",
    "not outside": "place = index(i1)\nbehind = not(or(lt(place, 8), ge(place, 15)))",
}


def turned(mask, by=8):
    """A rotary embedding's backward: what is stored of a row's halves is read by the other half, under masks."""
    return parse(f"""
        program p(dy, x)
          dy: float16[6, 16] on cuda
          x: float16[6, 16] on cuda
          p: float16[6, 16] on cuda
          g: float16[6, 16] on cuda
        loop product [6, 16]
          product = mul(cast(dy[i0, i1], float32), cast(x[i0, i1], float32))
          p[i0, i1] = cast(add(product, 1.0), float16)
        loop turned [6, 16]
          {mask}
          first = cast(p[i0, i1 - {by}] if behind else 0, float32)
          second = cast(p[i0, i1 + 8] if lt(index(i1), 8) else 0, float32)
          g[i0, i1] = cast(add(add(first, second), cast(dy[i0, i1], float32)), float16)
        return (g)
    """)


@pytest.mark.parametrize("mask", BEHIND.values(), ids=BEHIND)
def test_what_is_read_under_a_mask_is_computed_under_it(mask):
    program = turned(mask)
    verify(program)
    found = rematerialize(program)
    verify(found)
    assert "p" not in names(found)
    assert not any(
        "/" in str(value.index) or "%" in str(value.index) for value in found.steps[0].body if isinstance(value, Load)
    )
    same(program, found, inputs(program))


def test_a_mask_of_values_holds_for_what_is_computed_again():
    program = turned("behind = gt(cast(x[i0, i1], float32), 0.0)", by=0)
    found = rematerialize(program)
    verify(found)
    assert "p" not in names(found)
    same(program, found, inputs(program))


TARGET_LOGITS = """
program p(logits, bias, target)
  logits: float16[6, 16] on cuda
  bias: float32[16] on cuda
  target: int64[6] on cuda
  capped: float32[6, 16] on cuda
  most: float32[6] on cuda
  found: float32[6] on cuda
loop caps [6] x [16]
  y = mul(tanh(cast(logits[i0, j0], float32)), 30.0)
  capped[i0, j0] = y
  most[i0] = row_max(y)
loop picked [6]
  at = target[i0]
  found[i0] = sub(capped[i0, at], most[i0])
return (found)
"""
"""What cross-entropy reads of logits between two bounds: each row's largest one, and the one of its class."""


def target_logits(*changes):
    program = changed(TARGET_LOGITS, changes)
    given = inputs(program)
    given["target"] = np.array([3, 0, 15, 7, 7, 1])
    return program, given


def test_what_a_gather_reads_is_computed_where_it_reads():
    program, given = target_logits()
    found = rematerialize(program)
    verify(found)
    assert "capped" not in names(found)
    assert found.steps[-1].reads == {"logits", "target", "most"}
    same(program, found, given)


@pytest.mark.parametrize(
    "source",
    ["add(cast(logits[i0, j0], float32), bias[j0])", "add(cast(logits[i0, j0], float32), cast(index(j0), float32))"],
)
def test_a_gather_of_what_is_made_from_other_places_reads_memory(source):
    """From an address alone, a kernel does not know the column."""
    program, given = target_logits(("cast(logits[i0, j0], float32)", source))
    found = rematerialize(program)
    assert "capped" in names(found)
    same(program, found, given)


def test_random_programs_keep_every_value():
    fewer = 0
    for seed in range(60):
        program, given = random_program(seed, 10)
        there = fuse(replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers)))
        found = rematerialize(there)
        verify(found)
        fewer += len(found.buffers) < len(there.buffers)
        same(there, found, given)
    assert fewer >= 5
