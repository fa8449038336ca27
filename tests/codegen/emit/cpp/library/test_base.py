"""Accuracy of the inline functions over all exponents; exactness of 16-bit conversions over all bit patterns."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.codegen.emit import loops
from tests.codegen.emit.cpp.test_avx512 import assembly
from tests.codegen.emit.harness import compiled, run

# largest error in units of the last place, measured over 7 million points of all exponents
LARGEST_ULP = {
    "exp": 1, "exp2": 1.1, "expm1": 2.8, "log": 0.9, "log1p": 2.6, "tanh": 2, "sigmoid": 2.5, "erf": 1, "sin": 0.9,
    "cos": 0.9,
}  # fmt: skip
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-45, -1e-45, 3e38, -3e38, 88.8, -103.9, 0.1], np.float32
)


def points(count: int) -> np.ndarray:
    """Every exponent, what networks hold, and the special values."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    return np.concatenate([patterns, rng.normal(0, 3, count).astype(np.float32), SPECIAL])


@pytest.fixture(scope="module")
def functions():
    return compiled([loops.unary(op, len(points(100_000))) for op in LARGEST_ULP])


def test_one_plus_erf_is_right_beside_one() -> None:
    """What counts in a GELU: to 1.21 of the last place of numbers from 1 to 2, where 1 + erf is to 0.97."""
    x = np.concatenate([points(100_000), np.linspace(-5, 5, 200_001, dtype=np.float32)])
    made = loops.unary("one_plus_erf", len(x))
    (got,) = run(made, {"x": x}, compiled([made]))
    want = 1 + torch.from_numpy(x).double().erf().numpy()
    assert np.array_equal(np.isnan(got), np.isnan(x)) and np.nanmax(np.abs(got - want)) < 1.25 * 2**-23
    assert (got[x <= -3.95] == 0).all() and (got[x >= 3.95] == 2).all() and (got[np.abs(x) < 2**-27] == 1).all()


@pytest.mark.parametrize("op", LARGEST_ULP)
def test_float_functions_are_within_their_measured_error(op, functions):
    x = points(100_000)
    (got,) = run(loops.unary(op, len(x)), {"x": x}, functions)
    wide = torch.from_numpy(x).double()
    want = (getattr(torch, op)(wide)).numpy()
    nearest = torch.from_numpy(want).float().numpy()
    assert np.array_equal(np.isnan(got), np.isnan(nearest))
    usual = np.isfinite(nearest) & np.isfinite(got) & (np.abs(nearest) >= np.finfo(np.float32).tiny)
    ulp = np.abs(got[usual] - want[usual]) / np.spacing(np.abs(nearest[usual])).astype(np.float64)
    assert ulp.max() <= LARGEST_ULP[op], x[usual][ulp.argmax()]
    unbounded = np.isinf(nearest) & (np.abs(want) > 3.41e38)
    assert np.array_equal(got[unbounded], nearest[unbounded])
    tiny = np.abs(nearest) < np.finfo(np.float32).tiny
    assert np.all(np.abs(got[tiny] - want[tiny]) <= 3e-39), "denormal results may lose precision, not their size"


LARGEST_ULP_64 = {"exp": 1, "exp2": 1, "expm1": 3.2, "log": 0.8, "log1p": 2.2, "sigmoid": 2.1, "tanh": 1.4}


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="nothing more precise to compare with")
def test_functions_of_float64_are_within_their_measured_error():
    """Over all exponents, what networks hold, and where exponentials begin to overflow or to be denormal."""
    rng = np.random.default_rng(0)
    edges = [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 5e-324, 1e308, 709.78, 709.79, -745.2, -708.5, 1024, -1074, -1075]
    patterns = rng.integers(0, 2**64, 20_000, dtype=np.uint64).view(np.float64)
    near = rng.uniform(-1, 1, 20_000), 1 + rng.normal(0, 1e-3, 10_000)
    x = np.concatenate([patterns, rng.normal(0, 3, 20_000), *near, rng.uniform(-750, 720, 20_000), edges])
    functions = compiled([loops.unary(op, len(x), "float64") for op in LARGEST_ULP_64])
    meant = {op: getattr(np, op, lambda x: 1 / (1 + np.exp(-x))) for op in LARGEST_ULP_64}
    for op, largest in LARGEST_ULP_64.items():
        (got,) = run(loops.unary(op, len(x), "float64"), {"x": x}, functions)
        with np.errstate(all="ignore"):
            want = meant[op](x.astype(np.longdouble))
            nearest = want.astype(np.float64)
        assert np.array_equal(np.isnan(got), np.isnan(nearest)) and np.array_equal(np.isinf(got), np.isinf(nearest)), op
        usual = np.isfinite(nearest) & (np.abs(nearest) >= np.finfo(np.float64).tiny)
        ulp = np.abs(got[usual] - want[usual]) / np.spacing(np.abs(nearest[usual]))
        assert ulp.max() <= largest, (op, x[usual][ulp.argmax()])
        tiny, zero = np.abs(nearest) < np.finfo(np.float64).tiny, nearest == 0
        assert np.all(np.abs(got[tiny] - nearest[tiny]) <= 1e-307), op
        assert np.array_equal(np.signbit(got[zero & (got == 0)]), np.signbit(nearest[zero & (got == 0)])), op


def test_functions_of_float64_are_vectors():
    """No loop calls the library."""
    for op in LARGEST_ULP_64:
        made = assembly(loops.unary(op, 4096, "float64"))
        assert re.search("[yz]mm", made) and not re.search(r"call\s+(exp|log|tanh)", made), op


@pytest.mark.parametrize("op", ["sin", "cos"])
def test_sines_near_their_zeros_and_of_large_numbers(op):
    """Where nearly all of an argument is quarter turns, up to where the library takes over, and beyond."""
    zeros = (np.arange(70_000) * (np.pi / 2)).astype(np.float32)
    x = np.concatenate([np.nextafter(zeros, np.float32(at)) for at in (0, np.inf)] + [zeros, -zeros, 2.0**40 * zeros])
    x = x.astype(np.float32)
    (got,) = run(loops.unary(op, len(x)), {"x": x})
    want = getattr(torch, op)(torch.from_numpy(x).double()).numpy()
    assert np.all(np.abs(got - want) <= 0.9 * np.spacing(np.abs(want.astype(np.float32))).astype(np.float64))
    assert np.abs(got).max() <= 1 and got[0] == (op == "cos") and np.signbit(got[3 * len(zeros)]) == (op == "sin")


NUMBERS = np.array(
    [0, -0.0, 1, -1, 2, -2, 0.5, -0.5, 3, -3, 2.5, -2.5, 5, -7, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-40, 3e38,
     -3e38, 16777215, 16777217, 33554430, 2147483648, 1e9, 0.99999994, 1.0000001], np.float32,
)  # fmt: skip


def test_powers_are_within_their_measured_error():
    """Of numbers of all sizes, of numbers close to 1, and at the edges of what a float holds."""
    rng = np.random.default_rng(0)
    a = np.exp(np.concatenate([rng.uniform(-85, 85, 50_000), rng.uniform(-0.4, 0.4, 50_000)])).astype(np.float32)
    b = np.concatenate([(rng.uniform(-89, 89, len(a)) / np.log(a.astype(np.float64))), rng.uniform(-5, 5, len(a))])
    a, b = np.concatenate([a, a, points(100_000)]), np.concatenate([b.astype(np.float32), points(100_000)[::-1]])
    b = b.astype(np.float32)
    (got,) = run(loops.binary("pow", len(a)), {"x": a, "z": b})
    want = torch.pow(torch.from_numpy(a).double(), torch.from_numpy(b).double()).numpy()
    with np.errstate(over="ignore"):
        nearest = want.astype(np.float32)
    assert np.array_equal(np.isnan(got), np.isnan(nearest)) and np.array_equal(np.isinf(got), np.isinf(nearest))
    usual = np.isfinite(nearest) & (np.abs(nearest) >= np.finfo(np.float32).tiny)
    ulp = np.abs(got[usual] - want[usual]) / np.spacing(np.abs(nearest[usual])).astype(np.float64)
    assert ulp.max() <= 1.1, (a[usual][ulp.argmax()], b[usual][ulp.argmax()])
    tiny = np.abs(nearest) < np.finfo(np.float32).tiny
    assert np.all(np.abs(got[tiny].astype(np.float64) - want[tiny]) <= 3e-45)


def test_powers_of_special_numbers_are_eagers():
    pairs = np.array([(a, b) for a in NUMBERS for b in NUMBERS], np.float32)
    a, b = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    (got,) = run(loops.binary("pow", len(a)), {"x": a, "z": b})
    want = torch.pow(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    assert np.allclose(got, want, rtol=1.2e-7, atol=3e-45, equal_nan=True)
    known = ~np.isnan(want)
    assert np.array_equal(np.signbit(got[known]), np.signbit(want[known]))


def test_remainders_are_exact():
    """Of numbers of all sizes, of near multiples, and of special numbers: the bits of the library's."""
    rng = np.random.default_rng(0)
    near = np.concatenate([rng.uniform(-9, 9, 100_000), rng.uniform(1, 2, 100_000)]).astype(np.float32)
    b = np.concatenate([points(100_000), near])
    whole = rng.integers(-(2**24), 2**24, len(b)) >> rng.integers(0, 24, len(b))
    with np.errstate(all="ignore"):
        a = (b.astype(np.float64) * whole).astype(np.float32)
    a = np.concatenate([a, np.nextafter(a, np.float32(0)), rng.permutation(points(100_000)), points(50_000)])
    b = np.concatenate([b, b, b[: len(a) - 2 * len(b)]])
    pairs = np.array([(x, y) for x in NUMBERS for y in NUMBERS], np.float32)
    a, b = np.concatenate([a[: len(b)], pairs[:, 0]]), np.concatenate([b, pairs[:, 1]])
    with np.errstate(all="ignore"):
        left = np.fmod(a, b)
        wanted = {"fmod": left, "mod": np.where((left != 0) & ((left < 0) != (b < 0)), left + b, left)}
    for op, want in wanted.items():
        (got,) = run(loops.binary(op, len(a)), {"x": a, "z": b})
        assert np.array_equal(got, want, equal_nan=True)
        assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_values_round_trip_and_round_as_torch_does(dtype):
    every = np.arange(65536, dtype=np.uint16)
    tensor = torch.from_numpy(every.view(np.int16)).view(getattr(torch, dtype))
    wide = tensor.float().numpy()
    with np.errstate(all="ignore"):
        near = [wide * np.float32(1 + 2**-k) for k in (9, 11, 12, 24)]
    near = np.concatenate([*near, wide, SPECIAL, points(50_000)])
    (got,) = run(loops.unary("cast", len(near), out=dtype), {"x": near})
    want = torch.from_numpy(near).to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(got, want, equal_nan=True)
    values = wide if dtype == "bfloat16" else tensor.numpy()
    body = loops.Body()
    x = body.load("x", loops.I0, dtype)
    p = loops.program(body, (65536,), (), [loops.Store("y", loops.I0, x)], x=(dtype, (65536,)), y=("float32", (65536,)))
    (back,) = run(p, {"x": values})
    assert np.array_equal(back, wide, equal_nan=True)


FRACTIONS = np.array([0.0, -0.0, 0.9, -0.9, 1.5, -1.5, 100.99, -100.99, 127.5], np.float32)
WHOLE = ["int8", "uint8", "int16", "int32", "int64", "bool"]


@pytest.fixture(scope="module")
def casts():
    return compiled([loops.unary("cast", len(FRACTIONS), out=target) for target in WHOLE])


@pytest.mark.parametrize("target", WHOLE)
def test_float_to_integer_truncates_as_eager(target, casts):
    x = np.abs(FRACTIONS) if target == "uint8" else FRACTIONS
    (got,) = run(loops.unary("cast", len(x), out=target), {"x": x}, casts)
    assert np.array_equal(got.astype(np.int64), torch.from_numpy(x).to(getattr(torch, target)).long().numpy())


PAIRS = np.array([(a, b) for a in (-7, -1, 0, 1, 7, -128, 127) for b in (-3, -1, 1, 3, 127, -128)])


INTEGER_OPS = {
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.remainder, "fmod": torch.fmod, "add": torch.add, "mul": torch.mul, "sub": torch.sub,
    "shl": lambda a, b: a << (b & 7), "shr": lambda a, b: a >> (b & 7), "xor": torch.bitwise_xor,
}  # fmt: skip
INTEGERS = ["int8", "int16", "int32", "int64"]


def integers(op, dtype):
    """Two operands."""
    low = np.iinfo(dtype).min
    a, b = PAIRS[:, 0].astype(dtype), PAIRS[:, 1].astype(dtype)
    a[0], a[1] = low, low
    if op in ("shl", "shr"):
        b = b & 7
    keep = ~((a == low) & (b == -1)) if op in ("floordiv", "truncdiv", "mod", "fmod") else slice(None)  # traps in eager
    return np.ascontiguousarray(a[keep]), np.ascontiguousarray(b[keep])


@pytest.fixture(scope="module")
def integer_arithmetic():
    return compiled([loops.binary(op, len(integers(op, kind)[0]), kind) for op in INTEGER_OPS for kind in INTEGERS])


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", INTEGER_OPS)
def test_integer_arithmetic_wraps_and_rounds_as_eager(op, dtype, integer_arithmetic):
    a, b = integers(op, dtype)
    (got,) = run(loops.binary(op, len(a), dtype), {"x": a, "z": b}, integer_arithmetic)
    assert np.array_equal(got, INTEGER_OPS[op](torch.from_numpy(a), torch.from_numpy(b)).numpy())


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize(("op", "torch_op"), [
    ("floordiv", lambda a, b: torch.div(a, b, rounding_mode="floor")), ("mod", torch.remainder),
])  # fmt: skip
def test_integers_of_all_sizes_are_divided_by_each_other_and_by_numbers(op, torch_op, dtype):
    """64 bits take a way of their own where both fit into 32, numbers are divided by without a division."""
    info, rng = np.iinfo(dtype), np.random.default_rng(0)
    sizes = [int(info.max) >> k for k in range(0, info.bits - 1, 5)]
    a = np.concatenate([rng.integers(-m if info.min else 0, m, 2000, dtype, endpoint=True) for m in sizes])
    b = rng.permutation(a)
    b[b == 0] = 1
    by_each_other = loops.binary(op, len(a), dtype)
    numbers = {1, 7, 64, int(info.max), *((-1, -7, int(info.min)) if info.min else ())}
    by_number = {number: by(op, number, dtype, len(a) - (number == -1)) for number in numbers}
    built = compiled([by_each_other, *by_number.values()])
    (got,) = run(by_each_other, {"x": a, "z": b}, built)
    assert np.array_equal(got, torch_op(torch.from_numpy(a), torch.from_numpy(b)).numpy())
    a[:2] = info.min, info.max
    for number, made in by_number.items():
        x = a[1:] if number == -1 else a
        want = torch_op(torch.from_numpy(x), torch.tensor(number, dtype=getattr(torch, dtype))).numpy()
        assert np.array_equal(run(made, {"x": x}, built)[0], want), number


def by(op, number, dtype, count):
    body = loops.Body()
    value = body.op(op, body.load("x", loops.I0, dtype), body.const(number, dtype), dtype=dtype)
    shape = (dtype, (count,))
    return loops.program(body, (count,), (), [loops.Store("y", loops.I0, value)], x=shape, y=shape)


FLOAT_OPS = {
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "mod": torch.remainder, "fmod": torch.fmod,
    "min": torch.minimum, "max": torch.maximum, "pow": torch.pow, "atan2": torch.atan2, "hypot": torch.hypot,
    "nextafter": torch.nextafter,
}  # fmt: skip
CORNERS = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 7.0, np.inf, -np.inf, np.nan, 1e-3]


@pytest.fixture(scope="module")
def float_arithmetic():
    return compiled([loops.binary(op, len(CORNERS) ** 2, kind) for op in FLOAT_OPS for kind in ("float32", "float64")])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", FLOAT_OPS)
def test_float_arithmetic_keeps_eagers_corner_cases(op, dtype, float_arithmetic):
    pairs = np.array([(a, b) for a in CORNERS for b in CORNERS], dtype)
    a, b = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    (got,) = run(loops.binary(op, len(a), dtype), {"x": a, "z": b}, float_arithmetic)
    want = FLOAT_OPS[op](torch.from_numpy(a), torch.from_numpy(b)).numpy()
    assert np.allclose(got, want, rtol=1e-6, atol=0, equal_nan=True)


UNARY = [
    "floor", "ceil", "trunc", "round", "sign", "abs", "isnan", "isinf", "sqrt", "sin", "cos", "log2", "signbit", "asin",
    "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "lgamma",
]  # fmt: skip
SAMPLE = np.concatenate([np.linspace(-4, 4, 33), SPECIAL]).astype(np.float32)


def on_sample(op):
    return loops.unary(op, len(SAMPLE), out="bool" if op.startswith("is") or op == "signbit" else None)


@pytest.fixture(scope="module")
def unary():
    return compiled([on_sample(op) for op in UNARY])


@pytest.mark.parametrize("op", UNARY)
def test_remaining_unary_ops_match_eager(op, unary):
    (got,) = run(on_sample(op), {"x": SAMPLE}, unary)
    want = getattr(torch, op)(torch.from_numpy(SAMPLE)).numpy()
    assert np.allclose(got, want, rtol=3e-7, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mantissas_and_exponents_are_eagers(dtype):
    """Of numbers of every exponent, denormal ones too."""
    least = np.finfo(dtype).smallest_subnormal
    kind = np.uint32 if dtype == "float32" else np.uint64
    patterns = np.random.default_rng(0).integers(0, np.iinfo(kind).max, 20_000, kind).view(dtype)
    x = np.concatenate([patterns, SPECIAL.astype(dtype), np.array([least, -5 * least, np.finfo(dtype).tiny], dtype)])
    asked = {"mantissa": dtype, "exponent": "int32"}
    made = {op: loops.unary(op, len(x), dtype, out) for op, out in asked.items()}
    built = compiled(list(made.values()))
    for want, (op, out) in zip(torch.from_numpy(x).frexp(), asked.items(), strict=True):
        (got,) = run(made[op], {"x": x}, built)
        assert got.dtype == out
        np.testing.assert_array_equal(got, want.numpy(), err_msg=op)
        assert op == "exponent" or (np.signbit(got) == np.signbit(x))[~np.isnan(x)].all()
