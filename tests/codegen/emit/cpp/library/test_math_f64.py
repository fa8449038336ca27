"""Accuracy of float64's sines, error functions, powers and remainders, over all exponents and where they are used."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from tests.codegen.emit import loops
from tests.codegen.emit.cpp.test_avx512 import assembly
from tests.codegen.emit.harness import compiled, run

# largest error in units of the last place, measured over a million points; those of ATen and of the library beside it
LARGEST_ULP = {"sin": 0.61, "cos": 0.61, "pow": 0.7}  # pow, ATen: 0.64
ERF_ULP = 2  # 1.1, and the library's own error, against which it is held
EDGES = np.array([
    0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, -2, 3, 5e-324, -5e-324, 1e-310, 1e308, -1e308,
    2.2250738585072014e-308, 1e-9, 27.2, 26.5, -6, 710.4, -711, 1e9, 1.1e9, 1e15, -1e22, 2.0**53, 2.0**53 + 2,
])  # fmt: skip
precise = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="nothing more precise to compare with")


def points(count: int) -> np.ndarray:
    """All exponents, what is usual, where arcs are defined, and whole quarter turns with their neighbours."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**64, count, dtype=np.uint64).view(np.float64)
    turns = np.concatenate([np.arange(count), rng.integers(0, 2**28, count)]) * (np.pi / 2)
    near = [rng.normal(0, 3, count), rng.uniform(-1, 1, count), 1 + rng.normal(0, 1e-3, count)]
    return np.concatenate([patterns, *near, rng.uniform(-720, 720, count), turns, np.nextafter(turns, 0), EDGES])


def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of all exponents, alike, near multiples, powers that overflow, and special ones."""
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 2**64, (2, count), dtype=np.uint64).view(np.float64)
    near, special = rng.normal(0, 3, (2, count)), np.array([(a, b) for a in EDGES for b in EDGES]).T
    multiple = near[1] * (rng.integers(-(2**50), 2**50, count) >> rng.integers(0, 50, count))
    powers = np.stack([1 + rng.normal(0, 1e-2, count), rng.uniform(-5e4, 5e4, count)])
    given = [patterns, near, np.stack([multiple, near[1]]), np.stack([np.nextafter(multiple, 0), near[1]]), powers]
    a, b = np.concatenate([*given, special], 1)
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


@pytest.fixture(scope="module")
def functions():
    one, two = len(points(5_000)), len(pairs(5_000)[0])
    alone = [loops.unary(op, one, "float64") for op in ("sin", "cos", "erf")]
    return compiled([*alone, *(loops.binary(op, two, "float64") for op in ("pow", "fmod", "mod", "nextafter"))])


def assert_within(got: np.ndarray, want: np.ndarray, most: float, what: str) -> None:
    with np.errstate(all="ignore"):
        nearest = want.astype(np.float64)
    assert np.array_equal(np.isnan(got), np.isnan(nearest)) and np.array_equal(np.isinf(got), np.isinf(nearest)), what
    usual = np.isfinite(nearest) & (np.abs(nearest) >= np.finfo(np.float64).tiny)
    ulp = np.abs(got[usual] - want[usual]) / np.spacing(np.abs(nearest[usual]))
    assert ulp.max() <= most, (what, ulp.max(), int(ulp.argmax()))
    tiny, zero = np.abs(nearest) < np.finfo(np.float64).tiny, nearest == 0
    assert np.all(np.abs(got[tiny] - nearest[tiny]) <= 5e-324), what
    assert np.array_equal(np.signbit(got[zero & (got == 0)]), np.signbit(nearest[zero & (got == 0)])), what


@precise
def test_sines_are_within_their_measured_error(functions):
    x = points(5_000)
    for op in ("sin", "cos"):
        (got,) = run(loops.unary(op, len(x), "float64"), {"x": x}, functions)
        with np.errstate(all="ignore"):
            want = getattr(np, op)(x.astype(np.longdouble))
        assert_within(got, want, LARGEST_ULP[op], op)


def test_the_error_function_is_near_the_library(functions):
    x = points(5_000)
    (got,) = run(loops.unary("erf", len(x), "float64"), {"x": x}, functions)
    assert_within(got, np.array([math.erf(one) for one in x]), ERF_ULP, "erf")


@precise
def test_powers_are_within_their_measured_error(functions):
    a, b = pairs(5_000)
    (got,) = run(loops.binary("pow", len(a), "float64"), {"x": a, "z": b}, functions)
    with np.errstate(all="ignore"):
        want = np.power(*(n.astype(np.longdouble) for n in (a, b)))
    assert_within(got, want, LARGEST_ULP["pow"], "pow")


def test_remainders_and_neighbours_are_exact(functions):
    """The bits of the library's."""
    a, b = pairs(5_000)
    with np.errstate(all="ignore"):
        left = np.fmod(a, b)
        wanted = {"fmod": left, "mod": np.where((left != 0) & ((left < 0) != (b < 0)), left + b, left)}
        wanted["nextafter"] = np.nextafter(a, b)
    for op, want in wanted.items():
        (got,) = run(loops.binary(op, len(a), "float64"), {"x": a, "z": b}, functions)
        assert np.array_equal(got, want, equal_nan=True), op
        assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0])), op


def test_what_is_left_to_the_library_depends_on_no_neighbour():
    """Sines of large numbers, and remainders of large quotients, anywhere in a vector or behind the last one."""
    count = 21
    sine, left = loops.unary("sin", count, "float64"), loops.binary("fmod", count, "float64")
    functions = compiled([sine, left])
    for at in range(count):
        x, z = np.full(count, 0.7), np.full(count, 0.3)
        x[at] = 1e22
        assert np.allclose(run(sine, {"x": x}, functions)[0], np.sin(x), rtol=2e-16, atol=0), at
        assert np.array_equal(run(left, {"x": x, "z": z}, functions)[0], np.fmod(x, z)), at


def test_loops_are_vectors():
    """No loop calls the library; what is far is asked of a function of vectors."""
    far = {"sin": "far_sin", "fmod": "far_fmod"}
    for op, made in (("sin", loops.unary), ("erf", loops.unary), ("pow", loops.binary), ("fmod", loops.binary)):
        text = re.split(r"^fused_\w+:", assembly(made(op, 4096, "float64")), flags=re.MULTILINE)[1]
        assert re.search("[yz]mm", text) and not re.search(rf"call\s+{op}(@|\b)", text), op
        assert op not in far or re.search(rf"call\s+_ZGV[bcde]N[248]vvv_{far[op]}\b", text), op


def test_loops_whose_results_are_wanted_under_a_condition_are_vectors():
    """g++ may not call a function of vectors, nor anything else, only where a select asks for it."""
    body = loops.Body()
    x = body.load("x", loops.I0, "float64")
    above = body.op("lt", body.const(0.0, "float64"), x, dtype="bool")
    value = body.op("where", above, body.op("sin", x, dtype="float64"), x, dtype="float64")
    shape = ("float64", (4096,))
    made = loops.program(body, (4096,), (), [loops.Store("y", loops.I0, value)], x=shape, y=shape)
    assert re.search(r"call\s+_ZGV[bcde]N[248]vvv_far_sin\b", assembly(made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_neighbour_of_a_number(dtype):
    numbers = torch.tensor([0.0, -0.0, 1, -1, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max], dtype=dtype)
    a, b = (n.reshape(-1).contiguous() for n in torch.meshgrid(numbers, numbers, indexing="ij"))
    kind = str(dtype).removeprefix("torch.")
    (got,) = run(loops.binary("nextafter", len(a), kind), {"x": a.numpy(), "z": b.numpy()})
    want = torch.nextafter(a, b).numpy()
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))
