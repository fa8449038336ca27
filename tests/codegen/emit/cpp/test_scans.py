"""Compiled scans against the interpreter: blocks of a row, rows side by side, what surrounds a scan."""

from __future__ import annotations

import numpy as np
import pytest

from dcompile.codegen.emit.cpp.scans import SCAN_BLOCK
from dcompile.ir.interpret import interpret
from tests.codegen.emit import loops
from tests.codegen.emit.cases import random_inputs
from tests.codegen.emit.cpp.test_kernel import text
from tests.codegen.emit.harness import assert_threads_change_nothing, compiled, run, without_vectors

LONG = 2 * SCAN_BLOCK + 77
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
}


@pytest.fixture(scope="module")
def built():
    return compiled([*CASES.values(), SOFTMAX])


SOFTMAX = loops.scanned_softmax(5, LONG)


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
