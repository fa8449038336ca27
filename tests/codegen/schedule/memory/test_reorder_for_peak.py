"""Orders that need less memory: valid, of equal values, and taken only where they help."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dcompile.codegen.schedule.memory import reorder_for_peak, reuse_external
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.codegen.schedule.memory.reorder_for_peak import (
    MIN_SAVED_BYTES,
    peak_bytes,
    plan_memory_for_peak,
    reorder_for_frees,
)
from dcompile.ir.buffers import Buffer
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Collective, Extern, Program, View, Wait
from dcompile.ir.verify import verify
from tests.codegen.schedule.order.test_dependences import respects
from tests.ir.fuzz import random_program

ROWS, WIDE, NARROW = 512, 256, 64
MIB = 1 << 20


def matrix(name, rows, columns):
    return Buffer(name, "float32", (rows, columns), (columns, 1))


def whole(buffer):
    return View(buffer.name, buffer.shape, buffer.strides)


def turned(buffer):
    rows, columns = buffer.shape
    return View(buffer.name, (columns, rows), (1, columns))


def product(out, a, b):
    return Extern("aten.mm.default", (a, b), (), (out.name,), "out")


def linear_backward(*more):
    """Of y = x @ w: the activation's gradient before the weight's, as the user's graph may have it."""
    x, w, g = matrix("x", ROWS, WIDE), matrix("w", WIDE, NARROW), matrix("g", ROWS, NARROW)
    dx, dw, v, dv = matrix("dx", ROWS, WIDE), matrix("dw", WIDE, NARROW), matrix("v", WIDE, 8), matrix("dv", ROWS, 8)
    steps = (product(dx, whole(g), turned(w)), product(dw, turned(x), whole(g)), product(dv, whole(dx), whole(v)))
    inputs = ("x", "w", "g", "v")
    return Program("p", inputs, (whole(dw), whole(dv)), (x, w, g, v, dx, dw, dv), (*steps, *more), donated=("x", "g"))


def test_a_saved_activation_ends_before_its_gradient_begins():
    program = linear_backward()
    planned, plain = plan_memory_for_peak(program), plan_memory(program)
    verify(planned)
    assert [step.outs[0] for step in planned.steps] == ["dw", "dx", "dv"]
    assert planned.table["dx"].storage == "in:x" and planned.arena_bytes == 0
    assert peak_bytes(plain) - peak_bytes(planned) >= ROWS * WIDE * 4 - 0.1 * MIB


def test_programs_with_collectives_keep_their_order():
    program = linear_backward(Collective("all_reduce", "b0", "ddp", ("dw",)), Wait("b0", ("dw",)))
    assert plan_memory_for_peak(program).steps == program.steps


def test_a_call_that_takes_much_for_itself_runs_where_little_is_held():
    """Filters' gradient, for which 259 times the filters' bytes are allocated, before a saved activation ends."""
    x, g = (Buffer(name, "float32", (1, 96, 32, 32), (96 * 1024, 1, 96 * 32, 96)) for name in ("x", "g"))
    w, dw = (Buffer(name, "float32", (96, 1, 7, 7), (49, 49, 7, 1)) for name in ("w", "dw"))
    a, v = matrix("a", 4 * ROWS, WIDE), matrix("v", WIDE, 8)
    y, z = matrix("y", 4 * ROWS, 8), matrix("z", 8, 8)
    how = ((96,), (1, 1), (3, 3), (1, 1), False, (0, 0), 96, (False, True, False))
    op = "aten.convolution_backward.default"
    filters = Extern(op, (whole(g), whole(x), whole(w), *how), (), (None, "dw", None), "alloc")
    steps = (filters, product(y, whole(a), whole(v)), product(z, turned(y), whole(y)))
    outputs = (whole(dw), whole(z))
    program = Program(
        "p", ("x", "g", "w", "a", "v"), outputs, (x, g, w, dw, a, v, y, z), steps, donated=("x", "g", "a")
    )
    planned = plan_memory_for_peak(program)
    verify(planned)
    assert planned.steps == (*steps[1:2], filters, *steps[2:]), "no later than it has to be"
    assert peak_bytes(plan_memory(program)) - peak_bytes(planned) >= a.nbytes - y.nbytes - MIN_SAVED_BYTES


def test_random_programs_keep_their_values(monkeypatch):
    for module, name in (
        (reuse_external, "SMALLEST_HOST"),
        (reuse_external, "SMALLEST_GUEST"),
        (reuse_external, "MIN_SAVED_BYTES"),
        (reorder_for_peak, "MIN_SAVED_BYTES"),
    ):
        monkeypatch.setattr(module, name, 1)
    better = 0
    for seed in range(60):
        program, inputs = random_program(seed)
        program = replace(program, donated=tuple(name for name in program.inputs if name in program.table))
        moved = reorder_for_frees(program)
        assert respects(moved.steps, program.steps)
        planned, plain = plan_memory_for_peak(program), plan_memory(program)
        verify(planned)
        better += peak_bytes(planned) < peak_bytes(plain)
        assert peak_bytes(planned) <= peak_bytes(plain)
        for before, after in zip(interpret(program, inputs), interpret(planned, inputs), strict=True):
            np.testing.assert_array_equal(before, after)
    assert better > 5
