"""Running sums of several rows at a time: the interpreter's bits, whatever the number of rows and threads."""

import numpy as np
import pytest
import torch

import dcompile
from dcompile.codegen.emit.cpp.interleave_rows import MIN_INTERLEAVED_ROWS as MIN_ROWS
from dcompile.codegen.emit.cpp.interleave_rows import SCANNED_ROWS
from dcompile.codegen.emit.cpp.scans import SCAN_BLOCK
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Program, Store
from tests.codegen.emit import loops
from tests.codegen.emit.cases import random_inputs
from tests.codegen.emit.cpp.test_kernel import text
from tests.codegen.emit.harness import assert_threads_change_nothing, compiled, run

LONG = 2 * SCAN_BLOCK + 77


def decayed(rows: int, n: int) -> Program:
    """y = s * exp(-x) and z = s + t of running sums s of x and t of x * x: two scans, and numbers of each row."""
    b = loops.Body()
    at = loops.I0 * n + loops.J0
    x, w = b.load("x", at), b.load("w", loops.I0)
    s, t = b.scan("sum", b.op("mul", x, w)), b.scan("sum", b.op("mul", x, x))
    y = b.op("mul", s, b.op("exp", b.op("neg", x)))
    stores = [Store("y", at, y), Store("z", at, b.op("add", s, t))]
    shape = ("float32", (rows, n))
    return loops.program(b, (rows,), (n,), stores, x=shape, w=("float32", (rows,)), y=shape, z=shape)


def narrow(rows: int, n: int, dtype: str) -> Program:
    b = loops.Body()
    at = loops.I0 * n + loops.J0
    stores = [Store("y", at, b.narrow(b.scan("sum", b.load("x", at, dtype)), dtype))]
    return loops.program(b, (rows,), (n,), stores, x=(dtype, (rows, n)), y=(dtype, (rows, n)))


CASES = {
    **{f"sums of {rows} rows": loops.scan(rows, 40) for rows in range(MIN_ROWS, MIN_ROWS + SCANNED_ROWS + 1)},
    "sums of long rows": loops.scan(MIN_ROWS + 3, LONG),
    "sums of one block": loops.scan(MIN_ROWS, SCAN_BLOCK),
    "products in double": loops.scan(MIN_ROWS + 1, 300, "prod", "float64"),
    "no elements": loops.scan(MIN_ROWS + 1, 0),
    "bfloat16": narrow(MIN_ROWS + 2, LONG, "bfloat16"),
    "float16": narrow(MIN_ROWS + 2, 70, "float16"),
}


@pytest.fixture(scope="module")
def built():
    return compiled([*CASES.values(), decayed(MIN_ROWS + 1, LONG)])


@pytest.mark.parametrize("name", CASES)
def test_rows_abreast_agree_bit_for_bit_with_the_interpreter(name, built):
    program = CASES[name]
    assert "g_end" in text(program)
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs, built), strict=True):
        assert np.array_equal(want, got)


def test_several_scans_and_what_surrounds_them(built):
    program = decayed(MIN_ROWS + 1, LONG)
    source = text(program)
    assert source.count("c3 = ") == 2 * 2 and source.count("exp_(") == 1  # two scans, declared and stepped
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs, built), strict=True):
        assert np.allclose(want, got, rtol=2e-6, atol=1e-4)


def test_few_rows_and_rows_that_need_a_reduction_go_one_by_one():
    for program in (
        loops.scan(MIN_ROWS - 1, 40),
        loops.scanned_softmax(MIN_ROWS, 40),
        loops.scan(MIN_ROWS, 40, "max"),
    ):
        assert "g_end" not in text(program)


def test_nan_and_infinities_stay_in_their_rows():
    x = np.ones((MIN_ROWS + 1, LONG), np.float32)
    x[1, 5], x[2, LONG - 1], x[3, SCAN_BLOCK], x[MIN_ROWS, 0] = np.nan, np.inf, -np.inf, np.nan
    program = loops.scan(MIN_ROWS + 1, LONG)
    (got,) = run(program, {"x": x})
    assert np.array_equal(got, np.cumsum(x, 1, dtype=np.float32), equal_nan=True)


def test_threads_change_nothing():
    assert_threads_change_nothing(loops.scan(3 * MIN_ROWS + 2, 1200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_eager_gives_the_same(dtype):
    """Compiled with sizes that are known at run time only, along the last of three dimensions."""
    x = torch.randn(5, 9, 130).to(dtype)
    function = dcompile.compile(lambda x: x.cumsum(-1), dynamic=True)
    assert torch.equal(function(x), x.cumsum(-1))
    assert torch.equal(function(x[:4, :7, :99].contiguous()), x[:4, :7, :99].cumsum(-1))
