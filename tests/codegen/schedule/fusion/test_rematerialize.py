"""What is cheaper to compute again is not kept; values stay bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion import rematerialize as rematerialize_module
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.rematerialize import rematerialize
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Buffer, Const, Extern, IndexOf, Load, Loop, Program, Store, View
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

F, H = "float32", "float16"
R, C = 6, 16
I0, I1 = var("i0"), var("i1")


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(rematerialize_module, "MIN_RECOMPUTE_BYTES", 0)


def buffer(name, dtype, *shape, device="cuda"):
    return Buffer(name, dtype, shape, contiguous_strides(shape), device)


def norm_backward(device="cuda", heavy=False):
    """g = (dy - mean(dy)) as a batch norm's backward: the sum over rows stands between two uses of float32 images."""
    wide = [Load("dy", I0 * C + I1, H), Apply("cast", (0,), F), Load("x", I0 * C + I1, H), Apply("cast", (2,), F)]
    wide += [Apply("mul", (1, 3), F)]
    for _ in range(6 if heavy else 0):
        wide.append(Apply("tanh", (len(wide) - 1,), F))
    product = Loop("product", (R, C), (), tuple(wide), (Store("p", I0 * C + I1, len(wide) - 1),))
    total = Loop("total", (R, C), (), (Load("p", I0 * C + I1, F),), (Store("s", I1, 0, "sum"),))
    body = (Load("p", I0 * C + I1, F), Load("s", I1, F), Apply("sub", (0, 1), F), Apply("cast", (2,), H))
    final = Loop("final", (R, C), (), body, (Store("g", I0 * C + I1, 3),))
    buffers = [
        buffer("dy", H, R, C),
        buffer("x", H, R, C),
        buffer("p", F, R, C),
        buffer("s", F, C),
        buffer("g", H, R, C),
    ]
    buffers = [replace(b, device=device) for b in buffers]
    return Program("p", ("dy", "x"), (View("g", (R, C), (C, 1)),), tuple(buffers), (product, total, final))


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
    fused = fuse(norm_backward(device="cpu"))
    assert rematerialize(fused) is fused


def test_much_arithmetic_is_not_done_twice():
    assert "p" in names(rematerialize(fuse(norm_backward(heavy=True))))


def test_what_is_made_from_more_than_it_takes_is_kept():
    """Two inputs of float32 and a result of 16 bits: reading that is less than half."""
    program = norm_backward()
    swap = {"dy": F, "x": F, "p": H}
    buffers = tuple(replace(b, dtype=swap.get(b.name, b.dtype)) for b in program.buffers)
    body = (Load("dy", I0 * C + I1, F), Load("x", I0 * C + I1, F), Apply("mul", (0, 1), F), Apply("cast", (2,), H))
    product = Loop("product", (R, C), (), body, (Store("p", I0 * C + I1, 3),))
    total = Loop("total", (R, C), (), (Load("p", I0 * C + I1, H), Apply("cast", (0,), F)), (Store("s", I1, 1, "sum"),))
    final = Loop(
        "final",
        (R, C),
        (),
        (
            Load("p", I0 * C + I1, H),
            Apply("cast", (0,), F),
            Load("s", I1, F),
            Apply("sub", (1, 2), F),
            Apply("cast", (3,), H),
        ),
        (Store("g", I0 * C + I1, 4),),
    )
    program = replace(program, buffers=buffers, steps=(product, total, final))
    found = rematerialize(fuse(program))
    assert "p" in names(found)
    same(program, found, inputs(program))


def test_what_has_changed_since_is_not_read_again():
    program = norm_backward()
    product, total, final = program.steps
    body = (Load("x", I0 * C + I1, H), Apply("cast", (0,), F), Apply("add", (1, 1), F), Apply("cast", (2,), H))
    change = Loop("change", (R, C), (), body, (Store("x", I0 * C + I1, 3),))
    program = replace(program, steps=(product, total, change, final))
    found = rematerialize(program)
    assert "p" in names(found)
    same(program, found, inputs(program))


def test_what_the_library_reads_is_kept():
    program = norm_backward()
    call = Extern("aten.clone.default", (View("p", (R, C), (C, 1)),), (), ("q",), "alloc")
    program = replace(program, buffers=(*program.buffers, buffer("q", F, R, C)), steps=(*program.steps, call))
    assert "p" in names(rematerialize(replace(program, outputs=(*program.outputs, View("q", (R, C), (C, 1))))))


BEHIND = {
    "not below": [IndexOf(I1 - 8, "int64"), Const(0, "int64"), Apply("lt", (0, 1), "bool"), Apply("not", (2,), "bool")],
    "from": [IndexOf(I1, "int64"), Const(8, "int64"), Apply("ge", (0, 1), "bool")],
    "not up to": [IndexOf(I1 + 1, "int64"), Const(8, "int64"), Apply("le", (0, 1), "bool"), Apply("not", (2,), "bool")],
    "above": [IndexOf(I1, "int64"), Const(7, "int64"), Apply("gt", (0, 1), "bool")],
    "between": [
        IndexOf(I1, "int64"), Const(8, "int64"), Apply("ge", (0, 1), "bool"), Const(15, "int64"),
        Apply("lt", (0, 3), "bool"), Apply("and", (2, 4), "bool"),
    ],
    "not outside": [
        IndexOf(I1, "int64"), Const(8, "int64"), Apply("lt", (0, 1), "bool"), Const(15, "int64"),
        Apply("ge", (0, 3), "bool"), Apply("or", (2, 4), "bool"), Apply("not", (5,), "bool"),
    ],
}  # fmt: skip


def turned(mask, by=8):
    """A rotary embedding's backward: what is stored of a row's halves is read by the other half, under masks."""
    product = [Load("dy", I0 * C + I1, H), Load("x", I0 * C + I1, H), Apply("cast", (0,), F), Apply("cast", (1,), F)]
    product += [Apply("mul", (2, 3), F), Const(1.0, F), Apply("add", (4, 5), F), Apply("cast", (6,), H)]
    first = Loop("product", (R, C), (), tuple(product), (Store("p", I0 * C + I1, 7),))
    body = list(mask)
    body += [Load("p", I0 * C + I1 - by, H, len(body) - 1), Apply("cast", (len(body),), F)]
    behind = len(body) - 1
    body += [IndexOf(I1, "int64"), Const(8, "int64")]
    body.append(Apply("lt", (len(body) - 2, len(body) - 1), "bool"))
    body += [Load("p", I0 * C + I1 + 8, H, len(body) - 1), Apply("cast", (len(body),), F)]
    body.append(Apply("add", (behind, len(body) - 1), F))
    body += [Load("dy", I0 * C + I1, H), Apply("cast", (len(body),), F)]
    body.append(Apply("add", (len(body) - 3, len(body) - 1), F))
    body.append(Apply("cast", (len(body) - 1,), H))
    second = Loop("turned", (R, C), (), tuple(body), (Store("g", I0 * C + I1, len(body) - 1),))
    buffers = tuple(buffer(name, H, R, C) for name in ("dy", "x", "p", "g"))
    return Program("p", ("dy", "x"), (View("g", (R, C), (C, 1)),), buffers, (first, second))


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
    mask = [Load("x", I0 * C + I1, H), Apply("cast", (0,), F), Const(0.0, F), Apply("gt", (1, 2), "bool")]
    program = turned(mask, by=0)
    found = rematerialize(program)
    verify(found)
    assert "p" not in names(found)
    same(program, found, inputs(program))


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
