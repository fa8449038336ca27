"""Rows side by side, written in vectors along the lane, against the interpreter and the plain loops."""

import numpy as np
import pytest

from dcompile.codegen.emit.cpp.outer_vectorize import GROUP
from dcompile.codegen.nest.loop_nest import OUTER_VECTOR_ROWS, make_nest
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import IndexOf, Load, Program, Store
from tests.codegen.emit import loops
from tests.codegen.emit.cases import random_inputs
from tests.codegen.emit.cpp.test_kernel import text
from tests.codegen.emit.harness import compiled, run, without_vectors

I1 = var("i1")
SIZES = [
    (2, 3 * GROUP, OUTER_VECTOR_ROWS),
    (3, GROUP + 3, 2 * OUTER_VECTOR_ROWS + 32),
    (2, 5, 40),
    (1, 2 * GROUP + 1, OUTER_VECTOR_ROWS + 13),
    (2, 0, 32),
]
OPS = ["sum", "prod", "max", "min"]


def middle(sizes: tuple[int, int, int], op: str = "sum", dtype: str = "float32", heads: int = 1) -> Program:
    """A reduction over the second of three dimensions; with `heads`, over the second and third of four."""
    batches, n, columns = sizes
    b = loops.Body()
    at = loops.I0 * (n * heads * columns) + loops.J0 * (heads * columns) + var("j1") * columns + I1
    stores = [Store("y", loops.I0 * columns + I1, b.narrow(b.reduce(op, b.load("x", at, dtype)), dtype))]
    shape = (batches, n, heads, columns)
    return loops.program(b, (batches, columns), (n, heads), stores, x=(dtype, shape), y=(dtype, (batches, columns)))


def softmax(sizes: tuple[int, int, int], dtype: str = "float32") -> Program:
    """Over the second of three dimensions, of numbers that a mask of the last two may take away."""
    batches, n, columns = sizes
    b = loops.Body()
    at = loops.I0 * (n * columns) + loops.J0 * columns + I1
    shown = b.put(Load("m", loops.J0 * columns + I1, "bool"))
    x = b.op("where", shown, b.load("x", at, dtype), b.const(-1e30))
    e = b.op("exp", b.op("sub", x, b.reduce("max", x)))
    stores = [Store("y", at, b.narrow(b.op("div", e, b.reduce("sum", e)), dtype))]
    shape = (batches, n, columns)
    return loops.program(b, (batches, columns), (n,), stores, x=(dtype, shape), m=("bool", shape[1:]), y=(dtype, shape))


def scaled(sizes: tuple[int, int, int]) -> Program:
    """What a row of the second of three dimensions shares, computed once for it, and no reduction."""
    batches, n, columns = sizes
    b = loops.Body()
    at, row = loops.I0 * (n * columns) + loops.J0 * columns + I1, loops.I0 * columns + I1
    factor = b.op("div", b.load("r", row), b.load("w", row))
    place = b.put(IndexOf(loops.J0, "int64"))
    hit = b.op("eq", place, b.put(Load("t", row, "int64")), dtype="bool")
    less = b.op("sub", b.op("exp", b.load("x", at)), b.op("where", hit, factor, b.const(0.0)))
    stores = [Store("y", at, b.op("mul", less, factor))]
    shape, rows = (batches, n, columns), (batches, columns)
    return loops.program(
        b, rows, (n,), stores, x=("float32", shape), r=("float32", rows), w=("float32", rows), t=("int64", rows),
        y=("float32", shape),
    )  # fmt: skip


DTYPES = ["float32", "bfloat16", "float16"]
CASES = {
    **{f"{op} {sizes}": middle(sizes, op) for op in OPS for sizes in SIZES if sizes[1] or op == "sum"},
    **{f"{op} {dtype}": middle(SIZES[1], op, dtype) for op in OPS for dtype in DTYPES[1:]},
    **{f"{op} of two dimensions": middle((2, 3, 80), op, heads=GROUP + 1) for op in OPS},
    **{f"softmax {dtype} {sizes}": softmax(sizes, dtype) for dtype in DTYPES for sizes in SIZES if sizes[1]},
}


@pytest.fixture(scope="module")
def built():
    return compiled([*CASES.values(), middle(SIZES[0], dtype="int64")])


def nest_of(program: Program):
    return make_nest(program.steps[0])


@pytest.mark.parametrize("name", CASES)
def test_rows_side_by_side_agree_with_the_interpreter(name, built):
    program = CASES[name]
    assert nest_of(program).lane is not None and "load_two_" in text(program)
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs, built), strict=True):
        assert np.allclose(want, got, rtol=1.6e-2 if "16" in name else 2e-6, atol=1e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("row", [0, GROUP, 2 * GROUP])
def test_nan_and_infinities_stay_where_they_are(op, row):
    program = middle((1, 2 * GROUP + 1, OUTER_VECTOR_ROWS + 13), op)
    x = np.ones((1, 2 * GROUP + 1, 1, OUTER_VECTOR_ROWS + 13), np.float32)
    x[0, row, 0, [0, 20, OUTER_VECTOR_ROWS - 1, OUTER_VECTOR_ROWS + 12]] = np.nan
    x[0, row, 0, 30], x[0, row, 0, 31] = np.inf, -np.inf
    (got,) = run(program, {"x": x})
    (want,) = interpret(program, {"x": x})
    assert np.array_equal(want, got, equal_nan=True)
    assert np.isnan(got).sum() == 4


def test_long_sums_are_added_up_in_float64(built):
    n = 100_000
    program = middle((1, n, 16))
    x = np.full((1, n, 1, 16), 0.1, np.float32)
    (got,) = run(program, {"x": x})
    assert np.allclose(got, x.astype(np.float64).sum(1)[:, 0], rtol=1e-6)


def test_integers_and_scans_go_by_plain_loops(built):
    program = middle(SIZES[0], dtype="int64")
    assert "load_two_" not in text(program)
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs, built), strict=True):
        assert np.array_equal(want, got)


def test_without_vectors_all_rows_go_by_the_plain_loop():
    whole, ragged = (
        without_vectors(text(middle(sizes))) for sizes in ((2, 16, OUTER_VECTOR_ROWS), (2, 16, OUTER_VECTOR_ROWS + 13))
    )
    assert "l = 0; l <" in whole and "l = l_at" in ragged and "int64 l_at = 0;" in ragged


def test_numbers_of_each_channel_do_not_outvote_an_image():
    """Batch norm in evaluation: four numbers a channel, read with unit stride along channels, and an image."""
    b = loops.Body()
    at = loops.I0 * (48 * 1024) + I1 * 1024 + var("i2")
    value = b.load("x", at)
    for name in ("mean", "scale", "weight", "bias"):
        value = b.op("mul", value, b.load(name, I1))
    shape, channel = ("float32", (3, 48, 1024)), ("float32", (48,))
    stores = [Store("y", at, value)]
    numbers = dict.fromkeys(("mean", "scale", "weight", "bias"), channel)
    nest = nest_of(loops.program(b, (3, 48, 1024), (), stores, x=shape, **numbers, y=shape))
    assert nest.elements[-1].size == 1024 and all(row.tile == 1 for row in nest.rows)


@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if sizes[1]])
def test_rows_without_a_reduction_go_side_by_side_too(sizes):
    """A cross-entropy's gradient over the second of four dimensions took 2 to 6 times as long by single rows."""
    program = scaled(sizes)
    assert nest_of(program).lane is not None
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs), strict=True):
        assert np.allclose(want, got, rtol=2e-6, atol=1e-6)


def few(n: int, rows: int, picked: bool = False) -> Program:
    """A sum over a few numbers that all rows have in common, of each with the row's own."""
    b = loops.Body()
    w = b.load("w", loops.J0)
    x = b.load("x", loops.I0 * n + loops.J0) if picked else b.load("x", loops.I0)
    stores = [Store("y", loops.I0, b.reduce("sum", b.op("lgamma", b.op("add", x, w))))]
    shape = (rows, n) if picked else (rows,)
    return loops.program(
        b, (rows,), (n,), stores, x=("float32", shape), w=("float32", (n,)), y=("float32", (rows,))
    )  # fmt: skip


def test_rows_of_few_elements_go_side_by_side_where_rows_are_as_near():
    program = few(3, 2 * OUTER_VECTOR_ROWS + 5)
    assert nest_of(program).lane is not None
    assert all(
        nest_of(p).lane is None
        for p in (few(3, OUTER_VECTOR_ROWS - 1), few(16, 2 * OUTER_VECTOR_ROWS), few(3, 2 * OUTER_VECTOR_ROWS, True))
    )
    inputs = {name: np.abs(array) + 0.5 for name, array in random_inputs(program).items()}
    for want, got in zip(interpret(program, inputs), run(program, inputs), strict=True):
        assert np.allclose(want, got, rtol=2e-6, atol=2e-6)


def test_what_rows_hold_further_is_asked_for_where_they_are_large() -> None:
    """By the first pass that reads it."""
    large, small = middle((8, 4096, 300), "sum"), middle((2, 64, 300), "sum")
    assert text(large).count("ask_if_far<PAIR * 4>(") == 1 and "ask_if_far" not in text(small)
