"""Loops that free memory come early on GPUs: what a forward saves in 8 bits, before other layers run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.memory import reorder_for_peak as module
from dcompile.codegen.schedule.memory.reorder_for_peak import hoist_frees, plan_memory_for_peak
from dcompile.ir.buffers import Buffer
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Extern, Load, Loop, Program, Store, View
from tests.codegen.emit.loops import I0
from tests.codegen.schedule.order.test_dependences import respects
from tests.ir.fuzz import random_program

SIZE = 2048


def matrix(name: str, dtype: str = "bfloat16") -> Buffer:
    return Buffer(name, dtype, (SIZE, SIZE), (SIZE, 1), "cuda")


def view(name: str) -> View:
    return View(name, (SIZE, SIZE), (SIZE, 1))


def saving(layers: int) -> Program:
    """Products one after another; what the backward needs of each result is cast at the end."""
    names = [f"x{n}" for n in range(layers + 1)]
    steps: list[Extern | Loop] = [
        Extern("aten.mm.default", (view(a), view("w")), (), (b,), "alloc") for a, b in itertools.pairwise(names)
    ]
    buffers = [matrix("w"), *map(matrix, names)]
    for n in range(layers, 0, -1):
        body = (Load(f"x{n}", I0, "bfloat16"), Apply("cast", (0,), "float32"), Apply("cast", (1,), "float8_e5m2"))
        steps.append(Loop(f"s{n}", (SIZE * SIZE,), (), body, (Store(f"s{n}", I0, 2),)))
        buffers.append(matrix(f"s{n}", "float8_e5m2"))
    return Program("p", ("x0", "w"), tuple(view(f"s{n}") for n in range(1, layers + 1)), tuple(buffers), tuple(steps))


def names(program: Program) -> list[str]:
    return [step.name if isinstance(step, Loop) else step.outs[0] for step in program.steps]


def test_what_is_saved_in_8_bits_is_computed_before_the_next_layers():
    program = saving(3)
    assert names(program) == ["x1", "x2", "x3", "s3", "s2", "s1"]
    moved = plan_memory_for_peak(program)
    assert names(moved) == ["x1", "x2", "s1", "x3", "s3", "s2"]


def test_the_order_stays_where_it_lowers_no_peak():
    program = saving(1)
    assert hoist_frees(program) is program


def test_programs_on_a_cpu_keep_their_order():
    program = saving(3)
    host = replace(program, buffers=tuple(replace(buffer, device="cpu") for buffer in program.buffers))
    assert names(plan_memory_for_peak(host))[:3] != ["x1", "x2", "s1"]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_keep_their_meaning(seed, monkeypatch):
    monkeypatch.setattr(module, "MIN_FREED_BYTES", 1)
    program, inputs = random_program(seed, 10, exact=True)
    moved = hoist_frees(program)
    assert respects(moved.steps, program.steps) or moved is program
    for want, got in zip(interpret(program, inputs), interpret(moved, inputs), strict=True):
        assert np.array_equal(want, got, equal_nan=True)
