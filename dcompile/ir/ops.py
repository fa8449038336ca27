"""Table of ops: every operation that a loop body may apply, with its reference semantics.

Folding, the interpreter, lowering and every emitter read this table; facts about an op are its columns. Arithmetic is
never done in 8 or 16 bits. Bodies cast to float32 after a load and back before a store, so rounding happens in `cast`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

from dcompile.ir.float8 import BYTES, FLOAT8, OPAQUE
from dcompile.ir.philox import philox

DTYPES: Mapping[str, str] = {
    "bool": "bool", "uint8": "int", "int8": "int", "int16": "int", "int32": "int", "int64": "int",
    "float16": "float", "bfloat16": "float", "float32": "float", "float64": "float",
    **dict.fromkeys(FLOAT8, "float"), **dict.fromkeys(OPAQUE, "opaque"),
}  # fmt: skip
"""Dtypes that a loop may load and store, and their kind."""

COMPUTE_DTYPES = frozenset(DTYPES) - {"float16", "bfloat16"} - BYTES

DtypeRule = Literal["same", "bool", "int32", "given"]
"""same: arguments and result share one dtype; bool, int32: dtype of the result; given: the node states it (casts,
where).
"""

VectorForm = Literal["function", "arithmetic", "comparison", "logic"]
"""function: faster on explicit vectors than in those that a C++ compiler makes; logic: of truth values."""


@dataclass(frozen=True, slots=True)
class Op:
    """Scalar operation: name, number of arguments, dtype rule, kinds of argument, reference semantics in NumPy."""

    name: str
    arity: int
    rule: DtypeRule
    kinds: frozenset[str]
    meaning: Callable[..., Any]
    cost: int = 1
    """Rough arithmetic cost, in additions, for decisions about recomputing."""
    _: KW_ONLY
    vector: VectorForm | None = None
    """How it is computed on vectors of float32; None: element by element."""
    exact: bool = True
    """Whether IEEE 754 gives its result to the last bit; if not, libraries differ in the last places."""
    keeps_nan: bool = False
    """Whether a NaN that it returns is an argument's or the processor's own: no other bits are set."""
    keeps_bits: bool = False
    """Whether a result has no more significant bits than its arguments have (integer parts: one carry at most)."""
    stalls: bool = False
    """Whether it delays the loads after it: few of its kind fill what a processor has in flight."""
    on_random_bits: bool = False
    """Whether it has a vector form for an int32 and a number: random bits, and their shares."""
    fails: Callable[..., bool] | None = None
    """Which integers it fails at when it runs; None: at none."""


_ANY = frozenset(("float", "int", "bool"))
_NUMBER = frozenset(("float", "int"))
_FLOAT = frozenset(("float",))
_INTEGER = frozenset(("int", "bool"))


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.asarray(x).dtype])(x)


def _erfc(x: Any) -> Any:
    return np.vectorize(math.erfc, otypes=[np.asarray(x).dtype])(x)


def _lgamma(x: Any) -> Any:
    return np.vectorize(_lgamma_of, otypes=[np.asarray(x).dtype])(x)


def _lgamma_of(x: float) -> float:
    """Log-gamma; infinite at the poles and on overflow, where Python raises."""
    try:
        return math.inf if math.isinf(x) else math.lgamma(x)
    except (OverflowError, ValueError):
        return math.inf


def _trunc_div(a: Any, b: Any) -> Any:
    quotient = np.floor_divide(a, b)
    return quotient + ((np.remainder(a, b) != 0) & ((a < 0) != (b < 0)))


def _pow(a: Any, b: Any) -> Any:
    """NumPy's power, with torch's results for negative powers of integers, which NumPy refuses."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "f":
        return np.power(a, b)
    inverse = np.where(a == 1, 1, np.where(a == -1, 1 - 2 * (b % 2), 0)).astype(a.dtype)
    return np.where(b < 0, inverse, np.power(a, np.where(b < 0, 0, b)))


def _gcd(a: Any, b: Any) -> Any:
    """Greatest common divisor in the dtype itself, as torch computes it.

    The absolute value of the smallest integer wraps, and so may the sign of the result.
    """
    with np.errstate(over="ignore", divide="ignore"):
        a, b = np.abs(np.asarray(a)), np.abs(np.asarray(b))
        while np.any(b):
            a, b = np.where(b != 0, b, a), np.where(b != 0, np.fmod(a, np.where(b != 0, b, 1)), 0).astype(a.dtype)
    return a


def _fma(a: Any, b: Any, c: Any) -> Any:
    """Add a product without rounding it first. float64 holds products of float32; its own are rounded twice."""
    wide = np.multiply(a, b, dtype=np.float64) + np.asarray(c, np.float64)
    return wide.astype(np.result_type(a, b, c))


def _sign(x: Any) -> Any:
    """Sign: -1, 0 or 1; 0 for NaN, as torch."""
    return np.greater(x, 0).astype(x.dtype) - np.less(x, 0).astype(x.dtype)


def _within(x: Any, low: Any, high: Any) -> Any:
    """Return a position unchanged. Raises IndexError unless low <= x < high."""
    if np.any((np.asarray(x) < low) | (np.asarray(x) >= high)):
        raise IndexError(f"positions from {np.min(x)} to {np.max(x)}, outside of {np.min(low)} to {np.max(high) - 1}")
    return x


def _is_outside(x: int, low: int, high: int) -> bool:
    return not low <= x < high


def _divides_by_zero(_: int, divisor: int) -> bool:
    return divisor == 0


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


OPS: Mapping[str, Op] = {
    op.name: op
    for op in (
        Op("add", 2, "same", _NUMBER, np.add, vector="arithmetic", keeps_nan=True),
        Op("sub", 2, "same", _NUMBER, np.subtract, vector="arithmetic", keeps_nan=True),
        Op("mul", 2, "same", _NUMBER, np.multiply, vector="arithmetic", keeps_nan=True),
        Op("fma", 3, "same", _FLOAT, _fma, vector="function", keeps_nan=True),
        Op("div", 2, "same", _FLOAT, np.divide, 4, vector="arithmetic", keeps_nan=True, stalls=True),
        Op("floordiv", 2, "same", _NUMBER, np.floor_divide, 8, fails=_divides_by_zero),  # towards -inf
        Op("truncdiv", 2, "same", frozenset(("int",)), _trunc_div, 8, fails=_divides_by_zero),  # towards 0
        # the sign of the divisor, as Python; the sign of the dividend, as C
        Op("mod", 2, "same", _NUMBER, np.remainder, 8, vector="function", fails=_divides_by_zero),
        Op("fmod", 2, "same", _NUMBER, np.fmod, 8, vector="function", fails=_divides_by_zero),
        Op("min", 2, "same", _ANY, np.minimum, vector="arithmetic", keeps_nan=True, keeps_bits=True),  # NaN wins
        Op("max", 2, "same", _ANY, np.maximum, vector="arithmetic", keeps_nan=True, keeps_bits=True),  # NaN wins
        # integers wrap around; to a negative power they are 1, -1 or 0
        Op("pow", 2, "same", _NUMBER, _pow, 20, exact=False, vector="function"),
        Op("atan2", 2, "same", _FLOAT, np.arctan2, 20, exact=False, vector="function"),
        Op("neg", 1, "same", _NUMBER, np.negative, vector="arithmetic", keeps_nan=True, keeps_bits=True),
        Op("abs", 1, "same", _NUMBER, np.abs, vector="arithmetic", keeps_nan=True, keeps_bits=True),
        Op("sign", 1, "same", _NUMBER, _sign, keeps_nan=True, keeps_bits=True),
        Op("reciprocal", 1, "same", _FLOAT, np.reciprocal, 4, vector="arithmetic", keeps_nan=True, stalls=True),
        Op("sqrt", 1, "same", _FLOAT, np.sqrt, 4, vector="arithmetic", keeps_nan=True, stalls=True),
        Op("rsqrt", 1, "same", _FLOAT, lambda x: 1 / np.sqrt(x), 8, vector="arithmetic", keeps_nan=True, stalls=True),
        Op("exp", 1, "same", _FLOAT, np.exp, 10, exact=False, vector="function", keeps_nan=True),
        Op("exp2", 1, "same", _FLOAT, np.exp2, 10, exact=False, vector="function", keeps_nan=True),
        Op("expm1", 1, "same", _FLOAT, np.expm1, 15, exact=False, vector="function", keeps_nan=True),
        Op("log", 1, "same", _FLOAT, np.log, 10, exact=False, vector="function", keeps_nan=True),
        Op("log1p", 1, "same", _FLOAT, np.log1p, 15, exact=False, vector="function", keeps_nan=True),
        Op("log2", 1, "same", _FLOAT, np.log2, 10, exact=False, vector="function"),
        Op("log10", 1, "same", _FLOAT, np.log10, 10, exact=False, vector="function"),
        Op("sin", 1, "same", _FLOAT, np.sin, 15, exact=False, vector="function"),
        Op("cos", 1, "same", _FLOAT, np.cos, 15, exact=False, vector="function"),
        Op("tan", 1, "same", _FLOAT, np.tan, 20, exact=False, vector="function"),
        Op("tanh", 1, "same", _FLOAT, np.tanh, 15, exact=False, vector="function", keeps_nan=True),
        Op("sigmoid", 1, "same", _FLOAT, _sigmoid, 15, exact=False, vector="function", keeps_nan=True),
        Op("erf", 1, "same", _FLOAT, _erf, 15, exact=False, vector="function", keeps_nan=True),
        Op(
            "one_plus_erf", 1, "same", _FLOAT, lambda x: 1 + _erf(x), 14, exact=False, vector="function", keeps_nan=True
        ),
        Op("erfc", 1, "same", _FLOAT, _erfc, 20, exact=False, vector="function"),
        Op("lgamma", 1, "same", _FLOAT, _lgamma, 40, exact=False),
        Op("asin", 1, "same", _FLOAT, np.arcsin, 20, exact=False, vector="function"),
        Op("acos", 1, "same", _FLOAT, np.arccos, 20, exact=False, vector="function"),
        Op("sinh", 1, "same", _FLOAT, np.sinh, 20, exact=False, vector="function"),
        Op("cosh", 1, "same", _FLOAT, np.cosh, 20, exact=False, vector="function"),
        Op("asinh", 1, "same", _FLOAT, np.arcsinh, 20, exact=False, vector="function"),
        Op("acosh", 1, "same", _FLOAT, np.arccosh, 20, exact=False, vector="function"),
        Op("atanh", 1, "same", _FLOAT, np.arctanh, 20, exact=False, vector="function"),
        Op("gcd", 2, "same", frozenset(("int",)), _gcd, 40),
        Op("hypot", 2, "same", _FLOAT, np.hypot, 10, exact=False),
        Op("logaddexp", 2, "same", _FLOAT, np.logaddexp, 30, exact=False),  # log(exp(a) + exp(b))
        Op("nextafter", 2, "same", _FLOAT, np.nextafter, 4),  # from the first towards the second
        Op("mantissa", 1, "same", _FLOAT, lambda x: np.frexp(x)[0], 4),  # from 1/2 up to 1
        Op("exponent", 1, "int32", _FLOAT, lambda x: np.frexp(x)[1], 4),  # power of two: x is mantissa * 2**exponent
        Op("floor", 1, "same", _FLOAT, np.floor, vector="arithmetic", keeps_nan=True, keeps_bits=True),
        Op("ceil", 1, "same", _FLOAT, np.ceil, vector="arithmetic", keeps_nan=True, keeps_bits=True),
        Op("trunc", 1, "same", _FLOAT, np.trunc, vector="arithmetic", keeps_nan=True, keeps_bits=True),
        Op("round", 1, "same", _FLOAT, np.rint, vector="arithmetic", keeps_nan=True, keeps_bits=True),  # half to even
        Op("isnan", 1, "bool", _FLOAT, np.isnan, vector="comparison"),
        Op("isinf", 1, "bool", _FLOAT, np.isinf),
        Op("signbit", 1, "bool", _FLOAT, np.signbit, vector="comparison"),  # true for -0.0 and NaN with a sign
        Op("eq", 2, "bool", _ANY, np.equal, vector="comparison"),
        Op("ne", 2, "bool", _ANY, np.not_equal, vector="comparison"),
        Op("lt", 2, "bool", _ANY, np.less, vector="comparison", on_random_bits=True),
        Op("le", 2, "bool", _ANY, np.less_equal, vector="comparison"),
        Op("gt", 2, "bool", _ANY, np.greater, vector="comparison"),
        Op("ge", 2, "bool", _ANY, np.greater_equal, vector="comparison"),
        Op("and", 2, "same", _INTEGER, np.bitwise_and, vector="logic", on_random_bits=True),
        Op("or", 2, "same", _INTEGER, np.bitwise_or, vector="logic"),
        Op("xor", 2, "same", _INTEGER, np.bitwise_xor, vector="logic"),
        Op("not", 1, "same", _INTEGER, np.invert, vector="logic"),
        Op("shl", 2, "same", frozenset(("int",)), np.left_shift),
        Op("shr", 2, "same", frozenset(("int",)), np.right_shift, on_random_bits=True),
        # (key, position, draw): 32 random bits, see ir/philox.py; int64 arguments
        Op("philox", 3, "int32", frozenset(("int",)), philox, 40, vector="function"),
        # (position, low, high): the position, on CPUs; the program fails unless low <= position < high
        Op("within", 3, "same", frozenset(("int",)), _within, 2, fails=_is_outside),
        Op("where", 3, "given", _ANY, np.where, keeps_nan=True),  # (bool, a, b): a and b of the result's dtype
        # rounds to nearest even; float to int truncates; x != 0 for bool
        Op("cast", 1, "given", _ANY, lambda x: x, keeps_nan=True, on_random_bits=True),
    )
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """Reduction: its identity, by dtype, and reference semantics over an axis.

    `combine` is the op that joins two partial results; None if there is none.
    """

    name: str
    combine: str | None
    meaning: Callable[..., Any]
    identity: Callable[[str], float | int | bool]


def _lowest(dtype: str) -> float | int | bool:
    kind = DTYPES[dtype]
    return -math.inf if kind == "float" else False if kind == "bool" else int(np.iinfo(dtype).min)


def _sum_exp(values: Any, axis: int = -1) -> Any:
    """Sum of the exponentials of differences to a row's maximum: the divisor of a softmax."""
    with np.errstate(invalid="ignore"):  # NaN for a row of infinities, as from eager
        return np.exp(values - np.max(values, axis=axis, keepdims=True)).sum(axis=axis)


def _highest(dtype: str) -> float | int | bool:
    kind = DTYPES[dtype]
    return math.inf if kind == "float" else True if kind == "bool" else int(np.iinfo(dtype).max)


REDUCTIONS: Mapping[str, Reduction] = {
    r.name: r
    for r in (
        Reduction("sum", "add", np.sum, lambda _: 0),
        Reduction("prod", "mul", np.prod, lambda _: 1),
        Reduction("max", "max", np.max, _lowest),  # NaN wins
        Reduction("min", "min", np.min, _highest),  # NaN wins
        Reduction("any", "or", np.any, lambda _: False),
        Reduction("all", "and", np.all, lambda _: True),
        # position in the inner space, row-major; the first of equals; NaN wins
        Reduction("argmax", None, np.argmax, lambda _: 0),
        Reduction("argmin", None, np.argmin, lambda _: 0),
        Reduction(
            "sum_exp", None, _sum_exp, lambda _: 0
        ),  # of exp(x - max(x)), in one pass: `schedule/fusion/loop_order.py`
    )
}

SCANS: Mapping[str, Reduction] = {
    r.name: r
    for r in (
        Reduction("sum", "add", np.add.accumulate, lambda _: 0),
        Reduction("prod", "mul", np.multiply.accumulate, lambda _: 1),
        Reduction("max", "max", np.maximum.accumulate, _lowest),  # NaN wins
        Reduction("min", "min", np.minimum.accumulate, _highest),  # NaN wins
        Reduction("logsumexp", "logaddexp", np.logaddexp.accumulate, _lowest),
    )
}
"""Inclusive scans: `meaning` over an axis gives one result per element."""
