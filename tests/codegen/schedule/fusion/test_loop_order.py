"""GPU loops go through a row as it lies in memory, and mean what they meant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion.loop_order import order_inner_loops
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Program, Store
from dcompile.ir.verify import verify
from tests.codegen.emit import loops
from tests.codegen.emit.loops import Body
from tests.ir.fuzz import random_program


def on_gpu(program: Program) -> Program:
    return replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers))


def group_sums(op: str = "sum") -> Program:
    """Of each group of 4 among 12 channels of 50 pixels, which lie channels-last."""
    body = Body()
    x = body.load("x", var("j1") * 12 + var("i0") * 4 + var("j0"))
    dtype = "float32" if op == "sum" else "int64"
    stores = [Store("y", var("i0"), body.reduce(op, x, dtype))]
    return loops.program(body, (3,), (4, 50), stores, x=("float32", (600,)), y=(dtype, (3,)))


def test_neighbours_in_memory_come_one_after_another():
    (loop,) = order_inner_loops(on_gpu(group_sums())).steps
    assert loop.inner == (50, 4), "pixels outside, the group's channels inside"


def scaled_both_ways(rows: int = 40, columns: int = 8) -> Program:
    """A matrix divided by its largest element, stored by rows and by columns."""
    body = Body()
    x = body.load("x", var("j0") * columns + var("j1"))
    scaled = body.op("div", x, body.reduce("max", x, "float32"))
    stores = [Store("y", var("j0") * columns + var("j1"), scaled), Store("z", var("j1") * rows + var("j0"), scaled)]
    shape = ("float32", (rows, columns))
    return loops.program(body, (), (rows, columns), stores, x=shape, y=shape, z=("float32", (columns, rows)))


def test_a_turned_store_does_not_turn_what_a_reduction_reads():
    (loop,) = order_inner_loops(on_gpu(scaled_both_ways())).steps
    assert loop.inner == (40, 8), "rows of the input outside, their elements inside"


def test_the_cpu_and_what_asks_where_a_value_lies_keep_their_order():
    assert order_inner_loops(group_sums()) == group_sums()
    asking = on_gpu(group_sums("argmax"))
    assert order_inner_loops(asking) == asking


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_keep_their_meaning(seed):
    program, inputs = random_program(seed, 8, exact=True)
    made = order_inner_loops(on_gpu(program))
    verify(made)
    for want, got in zip(interpret(program, inputs), interpret(made, inputs), strict=True):
        assert np.array_equal(want, got, equal_nan=True)
