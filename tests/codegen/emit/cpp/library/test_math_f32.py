"""Accuracy of the functions that networks call less often, over all exponents and where they are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.codegen.emit import loops
from tests.codegen.emit.cpp.library.test_base import NUMBERS, points
from tests.codegen.emit.harness import run

# largest error in units of the last place, measured over 12 million points
LARGEST_ULP = {
    "tan": 2.2, "asin": 1.6, "acos": 1.6, "atan": 1.6, "sinh": 2, "cosh": 2, "erfc": 4, "log2": 1.2, "log10": 1.5,
    "asinh": 2, "acosh": 2, "atanh": 2, "lgamma": 1.4,
}  # fmt: skip


def within_domains(count: int) -> np.ndarray:
    """Also numbers up to 1, where arcs are defined, from 1 on, and up to where exponentials end."""
    rng = np.random.default_rng(1)
    ranges = [rng.uniform(low, high, count).astype(np.float32) for low, high in ((-1, 1), (1, 3), (-11, 11), (-90, 90))]
    return np.concatenate([points(count), *ranges])


def assert_within(got: np.ndarray, want: np.ndarray, most: float, x: np.ndarray) -> None:
    nearest = torch.from_numpy(want).float().numpy()
    assert np.array_equal(np.isnan(got), np.isnan(nearest)), x[np.isnan(got) != np.isnan(nearest)]
    usual = np.isfinite(nearest) & np.isfinite(got) & (np.abs(nearest) >= np.finfo(np.float32).tiny)
    ulp = np.abs(got[usual] - want[usual]) / np.spacing(np.abs(nearest[usual])).astype(np.float64)
    assert ulp.max() <= most, (ulp.max(), x[usual][ulp.argmax()])
    unbounded = np.isinf(nearest) & (np.abs(want) > 3.41e38)
    assert np.array_equal(got[unbounded], nearest[unbounded])
    tiny = np.abs(nearest) < np.finfo(np.float32).tiny
    assert np.all(np.abs(got[tiny] - want[tiny]) <= 3e-39), "denormal results may lose precision, not their size"


@pytest.mark.parametrize("op", LARGEST_ULP)
def test_float_functions_are_within_their_measured_error(op):
    x = within_domains(100_000)
    if op == "atan":
        (got,) = run(loops.binary("atan2", len(x)), {"x": x, "z": np.ones_like(x)})
    else:
        (got,) = run(loops.unary(op, len(x)), {"x": x})
    want = getattr(torch, op)(torch.from_numpy(x).double()).numpy()
    assert_within(got, want, LARGEST_ULP[op], x)
    zeros = want == 0
    assert np.array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]))


@pytest.mark.parametrize("op", ["atan2", "hypot"])
def test_functions_of_two_numbers_are_within_their_measured_error(op):
    """Of numbers of all sizes, of numbers alike, and of special ones."""
    rng = np.random.default_rng(0)
    near = rng.normal(0, 3, (2, 100_000)).astype(np.float32)
    special = np.array([(a, b) for a in NUMBERS for b in NUMBERS], np.float32).T
    a = np.concatenate([points(100_000), near[0], special[0]])
    b = np.concatenate([points(100_000)[::-1], near[1], special[1]])
    (got,) = run(loops.binary(op, len(a)), {"x": a, "z": b})
    want = getattr(torch, op)(torch.from_numpy(a).double(), torch.from_numpy(b).double()).numpy()
    assert_within(got, want, 2 if op == "atan2" else 0.51, np.stack([a, b], 1))
    known = want == 0
    assert np.array_equal(np.signbit(got[known]), np.signbit(want[known]))


def test_tangents_near_their_zeros_and_poles_and_of_large_numbers():
    zeros = (np.arange(70_000) * (np.pi / 2)).astype(np.float32)
    x = np.concatenate([np.nextafter(zeros, np.float32(at)) for at in (0, np.inf)] + [zeros, -zeros, 2.0**40 * zeros])
    x = x.astype(np.float32)
    (got,) = run(loops.unary("tan", len(x)), {"x": x})
    want = torch.tan(torch.from_numpy(x).double()).numpy()
    assert_within(got, want, 2.2, x)
