"""Reductions in two steps mean what they meant, and only GPU programs get them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.nest import gpu_tiling
from dcompile.codegen.schedule.fusion import split_reductions
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Load, Loop, Program, Reduce, Store, View
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify
from tests.codegen.emit import cases, loops
from tests.codegen.emit.loops import I0, J0
from tests.ir.fuzz import random_program


def on_gpu(program: Program) -> Program:
    return replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers))


def spread_out(program: Program) -> Program:
    made = split_reductions.split_row_reductions(split_reductions.split_column_reductions(on_gpu(program)))
    verify(made)
    return made


def test_cpu_programs_are_left_alone():
    program = loops.rms_norm_backward(5000, 64)
    assert (
        split_reductions.split_column_reductions(program) == program
        and split_reductions.split_row_reductions(program) == program
    )


LANES = """
program lanes(x)
  x: float32[40960, 192] on cuda
  y: float32[40960, 192] on cuda
  s: float32[192] on cuda
loop both [192] x [40960]
  v = mul(x[i0 + 192*j0], 2.0)
  y[i0 + 192*j0] = v
  s[i0] = row_sum(v)
return (y, s)
"""
"""A program has 16 rows, which are neighbours in memory: 12 programs of 40960 elements for each row."""


def test_rows_that_few_programs_have_are_split():
    assert split_reductions.row_parts(parse(LANES).steps[0]) > 8
    parts, total = split_reductions.split_row_reductions(parse(LANES)).steps
    assert parts.outer[0] == total.outer[0] == 192 and len(parts.outer) == 2
    assert "y" in parts.writes, "what needs no sum is stored on the way"
    assert split_reductions.row_parts(parse(LANES.replace("192", "8448")).steps[0]) == 1, "528 programs are enough"


def test_elements_that_need_a_sum_are_stored_after_it():
    program = parse(LANES.replace("] = v", "] = div(v, row_max(v))"))
    verify(program)
    *_, last = split_reductions.split_row_reductions(program).steps
    assert last.writes == {"y"}


TURNED = """
program turned(x)
  x: float32[4096, 3072] on cuda
  y: float32[3072, 4096] on cuda
  z: float32[4096, 3072] on cuda
  m: float32[1] on cuda
loop both [] x [4096, 3072]
  v = mul(x[j1 + 3072*j0], 2.0)
  y[j0 + 4096*j1] = v
  z[j1 + 3072*j0] = v
  m[0] = row_max(v)
return (y, z, m)
"""


def test_a_part_of_a_row_stores_nothing_across_what_it_reads():
    """The row is read in the order of memory, so a transposed store would be scattered; its own loop has tiles."""
    part, total, turned = spread_out(parse(TURNED)).steps
    assert "z" in part.writes and "y" not in part.writes | total.writes
    assert turned.writes == {"y"} and gpu_tiling.make_plan(turned).kind == "turn"


UPDATED = """
program updated(m, g)
  m: float32[8, 40960] on cuda
  g: float32[8, 40960] on cuda
  y: float32[8, 40960] on cuda
  n: float32[8] on cuda
loop both [8] x [40960]
  v = add(m[j0 + 40960*i0], g[j0 + 40960*i0])
  s = row_sum(mul(v, v))
  m[j0 + 40960*i0] = v
  y[j0 + 40960*i0] = STORED
  n[i0] = s
return (y, n, m)
"""
"""The norm of a momentum that is updated in place, as Muon computes it for each matrix of a stack."""


@pytest.mark.parametrize(
    ("stored", "stage"),
    [("v", 0), ("g[j0 + 40960*i0]", 0), ("mul(g[j0 + 40960*i0], s)", 0)],
    ids=["the sum", "another input", "a product behind the reduction"],
)
def test_what_is_updated_in_place_is_read_by_no_later_stage(stored, stage):
    program = parse(UPDATED.replace("STORED", stored))
    verify(program)
    made = split_reductions.split_row_reductions(program)
    verify(made)
    steps = [step for step in made.steps if isinstance(step, Loop)]
    assert len(steps) > 1, "8 programs would not occupy a GPU"
    assert [number for number, step in enumerate(steps) if "m" in step.writes] == [stage]
    given = {name: np.random.default_rng(0).integers(-3, 4, (8, 40960)).astype(np.float32) for name in "mg"}
    results = [interpret(one, {name: array.copy() for name, array in given.items()}) for one in (program, made)]
    assert all(map(np.array_equal, *results))


def test_a_row_value_that_is_overwritten_keeps_its_row_whole():
    (loop,) = parse(UPDATED.replace("STORED", "v")).steps
    assert split_reductions.row_parts(loop) > 1
    assert split_reductions.row_parts(replace(loop, body=(*loop.body, Load("n", I0, "float32")))) == 1


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_keep_their_meaning(seed, monkeypatch):
    for module, name, value in (
        (split_reductions, "MIN_SPLIT_ROW_ELEMENTS", 8),
        (split_reductions, "PART_ELEMENTS", 3),
        (split_reductions, "PROGRAMS", 4),
        (split_reductions, "MAX_PERSISTENT_ELEMENTS", 8),
    ):
        monkeypatch.setattr(module, name, value)
    program, inputs = random_program(seed, 8, exact=True)
    for want, got in zip(interpret(program, inputs), interpret(spread_out(program), inputs), strict=True):
        assert np.array_equal(want, got, equal_nan=True)


@pytest.mark.parametrize(
    ("program", "steps"),
    [
        (loops.row_sum(1, 1 << 20), 2),
        (loops.row_sum(2, 100_003), 2),  # a prime: parts of unequal length
        (loops.softmax(2, 65536), 5),
        (loops.argmax(1, 50_001), 4),
        (loops.rms_norm_backward(5000, 64), 2),
        (loops.softmax(500, 1000), 1),
    ],
    ids=["sum", "uneven", "softmax", "argmax", "columns", "rows enough"],
)
def test_work_is_shared_among_programs(program, steps):
    made = spread_out(program)
    assert len(made.steps) == steps
    inputs = cases.random_inputs(program)
    for want, got in zip(interpret(program, inputs), interpret(made, inputs), strict=True):
        assert np.allclose(want, got, rtol=1e-4, atol=1e-4)


def test_what_elements_need_of_a_long_row_is_computed_once():
    """A scale in float64, by the second stage and not by each program of the loop over elements."""
    b = loops.Body()
    x = b.load("x", I0 * 70000 + J0)
    wide = b.op("cast", b.reduce("max", b.op("abs", x)), dtype="float64")
    scale = b.op("cast", b.op("reciprocal", wide, dtype="float64"), dtype="float32")
    stores = [Store("y", I0 * 70000 + J0, b.op("mul", x, scale)), Store("s", I0, scale)]
    shape = ("float32", (2, 70000))
    program = loops.program(b, (2,), (70000,), stores, x=shape, y=shape, s=("float32", (2,)))
    made = spread_out(program)
    part, second, elements = made.steps
    found = [any(value.dtype == "float64" for value in step.body) for step in (part, second, elements)]
    assert found == [False, True, False] and len(elements.reads) == 2
    inputs = cases.random_inputs(program)
    for want, got in zip(interpret(program, inputs), interpret(made, inputs), strict=True):
        assert np.array_equal(want, got)


def test_more_row_values_than_reductions_are_computed_again():
    b = loops.Body()
    x = b.load("x", J0)
    most = b.reduce("max", x)
    parts = [b.op(op, most) for op in ("exp", "neg", "sin")]
    program = loops.program(
        b, (), (70000,), [Store("y", J0, b.op("add", b.op("mul", b.op("add", x, parts[0]), parts[1]), parts[2]))],
        x=("float32", (70000,)), y=("float32", (70000,)),
    )  # fmt: skip
    *_, elements = spread_out(program).steps
    assert len(elements.reads) == 2


def test_a_sum_over_other_axes_becomes_a_loop_of_its_own():
    """dx of each row and, over the first and the last axis, a sum for every channel."""
    b = loops.Body()
    at = var("i0") * 3 * 40 + var("i1") * 40 + var("j0")
    x = b.load("x", at)
    centred = b.op("sub", x, b.reduce("max", x))
    stores = [Store("y", at, centred), Store("channels", var("i1"), centred, "sum")]
    program = loops.program(
        b, (50, 3), (40,), stores,
        x=("float32", (50, 3, 40)), y=("float32", (50, 3, 40)), channels=("float32", (3,)),
    )  # fmt: skip
    made = spread_out(program)
    assert all(store.mode == "set" for step in made.steps if isinstance(step, Loop) for store in step.stores)
    inputs = cases.random_inputs(program)
    for want, got in zip(interpret(program, inputs), interpret(made, inputs), strict=True):
        assert np.allclose(want, got, rtol=1e-4, atol=1e-4)


def scanned_and_combined(mode: str, in_place: bool) -> Program:
    """Sums of rows as they grow; of each column, the products of what is read, and `mode` of the sums."""
    b, at = loops.Body(), I0 * 40 + J0
    x = b.load("x", at)
    grown = b.scan("sum", x)
    stores = [Store("x" if in_place else "grown", at, grown), Store("products", J0, x, "prod")]
    stores.append(Store("combined", J0, grown, mode))
    shapes = {"x": (6, 40), "grown": (6, 40), "products": (40,), "combined": (40,)}
    made = loops.program(b, (6,), (40,), stores, **{n: ("float32", shape) for n, shape in shapes.items()})
    buffers = tuple(buffer for buffer in made.buffers if buffer.name != "grown" or not in_place)
    outputs = tuple(View(store.buffer, shapes[store.buffer], made.table[store.buffer].strides) for store in stores)
    return replace(made, inputs=("x",), buffers=buffers, outputs=outputs)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_columns_beside_a_scan_of_rows_too_long_for_a_program_are_combined_by_loops_of_their_own(
    mode, in_place, monkeypatch
):
    monkeypatch.setattr(split_reductions, "MAX_PERSISTENT_ELEMENTS", 32)
    program = scanned_and_combined(mode, in_place)
    made, inputs = spread_out(program), cases.random_inputs(program)
    first, *others = made.steps
    assert len(others) == 2 and {store.mode for store in first.stores} == {"set"}
    assert ("products_values" in first.writes) == in_place  # else read again from x
    for want, got in zip(interpret(program, inputs), interpret(made, inputs), strict=True):
        assert np.allclose(want, got, rtol=1e-5, atol=1e-5)


def test_parts_are_added_up_in_a_fixed_order():
    made = spread_out(loops.rms_norm_backward(5000, 64))
    walk, total = made.steps
    assert isinstance(walk, Loop) and isinstance(total, Loop)
    assert any(store.mode == "sum" and "//" in str(store.index) for store in walk.stores)
    assert all(store.mode == "set" for store in total.stores)
    assert any(isinstance(value, Reduce) for value in total.body)
