"""Compiled scans against the interpreter: blocks of a row, rows side by side, what surrounds a scan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dcompile
from dcompile.codegen.emit.cpp.scans import SCAN_BLOCK
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Program, Store
from tests.codegen.emit import loops
from tests.codegen.emit.cases import random_inputs
from tests.codegen.emit.cpp.test_kernel import text
from tests.codegen.emit.harness import assert_threads_change_nothing, compiled, run, without_vectors

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
    "float sum": loops.scan(3, LONG),
    "float sum of one block": loops.scan(3, 100),
    "double sum": loops.scan(2, LONG, dtype="float64"),
    "integer sum": loops.scan(3, LONG, dtype="int64"),
    "product": loops.scan(3, 200, "prod"),
    "largest": loops.scan(3, LONG, "max"),
    "smallest": loops.scan(3, LONG, "min"),
    "sum down columns": loops.scan(150, 40, columns=True),
    "smallest down columns": loops.scan(150, 40, "min", columns=True),
    "no rows": loops.scan(0, 8),
    "no elements": loops.scan(4, 0),
    "one element": loops.scan(4, 1),
    "many rows": loops.scan(35, 40),
    "many long rows": loops.scan(35, LONG),
    "many rows of one block": loops.scan(32, SCAN_BLOCK),
    "products in double": loops.scan(33, 300, "prod", "float64"),
    "many rows without elements": loops.scan(33, 0),
    "bfloat16": narrow(34, LONG, "bfloat16"),
    "float16": narrow(34, 70, "float16"),
}


@pytest.fixture(scope="module")
def built():
    return compiled([*CASES.values(), SOFTMAX, DECAYED])


SOFTMAX = loops.scanned_softmax(5, LONG)
DECAYED = decayed(33, LONG)


@pytest.mark.parametrize(("rows", "n", "columns"), [(3, 100, False), (2, 20_000, False), (150, 40, True)])
def test_a_scan_that_two_passes_need(rows, n, columns):
    """Kept; computed again because the row is too long to keep; computed again for rows side by side."""
    program = loops.centred_scan(rows, n, columns)
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs), strict=True):
        assert np.allclose(want, got, rtol=1e-5, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", CASES)
def test_scans_agree_bit_for_bit_with_the_interpreter(name, built):
    inputs = random_inputs(CASES[name])
    for want, got in zip(interpret(CASES[name], inputs), run(CASES[name], inputs, built), strict=True):
        assert np.array_equal(want, got)


def test_what_surrounds_a_scan_is_vectorised_and_costly_values_are_computed_once(built):
    inputs = random_inputs(SOFTMAX)
    for want, got in zip(interpret(SOFTMAX, inputs), run(SOFTMAX, inputs, built), strict=True):
        assert np.allclose(want, got, rtol=2e-6, atol=1e-7)
    source = without_vectors(text(SOFTMAX))
    assert source.count("exp_below_(") == 1
    # two passes for the softmax; what the first scan takes; what the second takes; the stores
    assert source.count("omp simd") == 5


def test_several_scans_and_what_surrounds_them(built):
    assert text(DECAYED).count("exp_(") == 1
    inputs = random_inputs(DECAYED)
    for want, got in zip(interpret(DECAYED, inputs), run(DECAYED, inputs, built), strict=True):
        assert np.allclose(want, got, rtol=2e-6, atol=1e-4)


def test_rows_are_shared_among_threads_and_columns_lie_side_by_side():
    assert "omp parallel" in text(loops.scan(300, 400))
    columns = text(loops.scan(400, 300, columns=True))
    assert "omp parallel" in columns and "u0[l] = float32(u0[l] + " in columns and "omp simd" in columns
    assert_threads_change_nothing(loops.scan(300, 400))


def test_nan_stays_in_extremes():
    x = np.zeros((2, 50), np.float32)
    x[0, 20] = np.nan
    x[1, [10, 30]] = -1, 5
    for op in ("max", "min"):
        program = loops.scan(2, 50, op)
        (got,) = run(program, {"x": x})
        assert np.array_equal(got, getattr(np, f"{op}imum").accumulate(x, 1), equal_nan=True)


def test_nan_and_infinities_stay_in_their_rows():
    x = np.ones((33, LONG), np.float32)
    x[1, 5], x[2, LONG - 1], x[3, SCAN_BLOCK], x[32, 0] = np.nan, np.inf, -np.inf, np.nan
    program = loops.scan(33, LONG)
    (got,) = run(program, {"x": x})
    assert np.array_equal(got, np.cumsum(x, 1, dtype=np.float32), equal_nan=True)


def test_threads_change_nothing_in_many_rows():
    assert_threads_change_nothing(loops.scan(98, 1200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_eager_gives_the_same(dtype):
    """Compiled with sizes that are known at run time only, along the last of three dimensions."""
    x = torch.randn(5, 9, 130).to(dtype)
    function = dcompile.compile(lambda x: x.cumsum(-1), dynamic=True)
    assert torch.equal(function(x), x.cumsum(-1))
    assert torch.equal(function(x[:4, :7, :99].contiguous()), x[:4, :7, :99].cumsum(-1))
