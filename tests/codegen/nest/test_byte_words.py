"""Transposed bytes by words: which stores are, and that positions and values stay."""

from __future__ import annotations

import numpy as np
import pytest

from dcompile.codegen.nest.gpu_tiling import by_words, make_plan
from dcompile.codegen.nest.loop_nest import flatten_loop
from dcompile.ir.index import as_index
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Loop, Program, Store
from tests.codegen.emit import float8, loops


def planned(program: Program) -> tuple[Loop, object]:
    (loop,) = program.steps
    return loop, make_plan(loop)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "uint8", "int8"])
def test_a_transposed_copy_of_bytes_is_stored_by_words(dtype):
    _, plan = planned(float8.copied(64, 96, dtype))
    assert plan.words == ((0, 1, 2, 3),) and len(plan.nest.stores) == 4
    groups = {axis.name: axis.size for axis in plan.nest.elements}
    assert sorted(groups.values()) == [16, 96]
    first = plan.nest.stores[0].index
    assert [made.index - first for made in plan.nest.stores] == [as_index(row) for row in range(4)]


def test_rows_in_both_orders_keep_what_they_store():
    """The repeated nest, as a loop, computes the same bytes."""
    program = float8.turned(48, 80, "float8_e4m3fn", clamps=True)
    loop, plan = planned(program)
    sizes = {axis.name: axis.size for axis in plan.nest.elements}
    assert (sizes["i0"], len(plan.words), len(plan.nest.stores)) == (12, 1, 8)
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((48, 80)).astype(np.float32), "s": np.float32(200).reshape(())}
    again = Loop(loop.name, (12,), (80,), plan.nest.body, plan.nest.stores, loop.origin)
    repeated = Program(program.name, program.inputs, program.outputs, program.buffers, (again,))
    for want, got in zip(interpret(program, inputs), interpret(repeated, inputs), strict=True):
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize(
    "program",
    [float8.copied(66, 96, "uint8"), float8.copied(64, 96, "bfloat16"), float8.turned(50, 80, "float8_e5m2")],
    ids=["rows that are no multiple of four", "two bytes", "both orders of such rows"],
)
def test_other_stores_stay_single(program):
    _, plan = planned(program)
    assert plan.kind == "turn" and not plan.words


def test_bytes_that_are_read_across_stay_single():
    """A sum of a matrix and its transpose reads both ways."""
    body = loops.Body()
    x, y = body.load("x", loops.I0 * 64 + loops.J0, "int8"), body.load("x", loops.J0 * 64 + loops.I0, "int8")
    stores = [Store("y", loops.J0 * 64 + loops.I0, body.op("add", x, y))]
    square = ("int8", (64, 64))
    program = loops.program(body, (64,), (64,), stores, x=square, y=square)
    nest = flatten_loop(program.steps[0])
    rows, elements = nest.rows[0], nest.elements[0]
    assert by_words(nest, elements, rows) is None and by_words(nest, rows, elements) is None
