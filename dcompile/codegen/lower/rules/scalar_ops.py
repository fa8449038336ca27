"""Scalar operations as functions over values of a body, in the dtype of their operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dcompile.codegen.lower.loop_builder import Body
from dcompile.ir.nodes import Const, Ref
from dcompile.ir.ops import DTYPES


def simple(op: str) -> Callable[..., Ref]:
    return lambda body, *args: body.apply(op, *args)


def sign(body: Body, x: Ref) -> Ref:
    return x if body.dtype(x) == "bool" else body.apply("sign", x)


def scale(body: Body, ref: Ref, alpha: float) -> Ref:
    if alpha == 1:
        return ref
    return body.apply("mul", ref, body.const(alpha, body.dtype(ref)))


def add(body: Body, a: Ref, b: Ref, alpha: float = 1) -> Ref:
    if body.dtype(a) == "bool":
        return body.apply("or", a, b)
    return body.apply("add", a, scale(body, b, alpha))


def sub(body: Body, a: Ref, b: Ref, alpha: float = 1) -> Ref:
    return body.apply("sub", a, scale(body, b, alpha))


def rsub(body: Body, a: Ref, b: Ref, alpha: float = 1) -> Ref:
    return body.apply("sub", b, scale(body, a, alpha))


def mul(body: Body, a: Ref, b: Ref) -> Ref:
    return body.apply("and" if body.dtype(a) == "bool" else "mul", a, b)


def div(body: Body, a: Ref, b: Ref, rounding_mode: str | None = None) -> Ref:
    if rounding_mode is None:
        return body.apply("div", a, b)
    if DTYPES[body.dtype(a)] == "int":
        return body.apply("floordiv" if rounding_mode == "floor" else "truncdiv", a, b)
    if rounding_mode == "floor":
        return floor_divide(body, a, b)
    return body.apply("trunc", body.apply("div", a, b))


def div_by_number(body: Body, a: Ref, b: Ref) -> Ref:
    """Divide as ATen's GPU kernel does by a CPU scalar: multiply by the reciprocal, and round twice."""
    return body.apply("mul", a, body.apply("div", body.const(1, body.dtype(a)), b))


def floor_divide(body: Body, a: Ref, b: Ref) -> Ref:
    """Divide floats as torch does: exact multiples of b first, so that rounding of a/b cannot cross an integer."""
    if DTYPES[body.dtype(a)] == "int":
        return body.apply("floordiv", a, b)
    zero, one = body.const(0, body.dtype(a)), body.const(1, body.dtype(a))
    remainder, exact = body.apply("fmod", a, b), body.apply("div", a, b)
    quotient = body.apply("div", body.apply("sub", a, remainder), b)
    off = body.apply(
        "and",
        body.apply("ne", remainder, zero),
        body.apply("xor", body.apply("lt", b, zero), body.apply("lt", remainder, zero)),
    )
    quotient = body.apply("where", off, body.apply("sub", quotient, one), quotient)
    floor = body.apply("floor", quotient)
    half = body.const(0.5, body.dtype(a))
    up = body.apply("gt", body.apply("sub", quotient, floor), half)
    rounded = body.apply("where", up, body.apply("add", floor, one), floor)
    # where the quotient is 0, a / b is small: times 0 it is a zero with its sign
    rounded = body.apply("where", body.apply("eq", quotient, zero), body.apply("mul", exact, zero), rounded)
    return body.apply("where", body.apply("eq", b, zero), exact, rounded)


def pow(body: Body, base: Ref, exponent: Ref, *, has_roots: bool = True) -> Ref:
    """Multiply for powers that eager computes exactly; with `has_roots`, powers of 1/2 become square roots.

    A power of 1/2 and a square root differ for -inf, whose root is NaN, and in the sign of the root of -0.
    """
    value = body.values[exponent]
    power = value.value if isinstance(value, Const) else None
    match power:
        case 0:
            return body.const(1, body.dtype(base))
        case 1:
            return base
        case 2:
            return body.apply("mul", base, base)
        case 3:
            return body.apply("mul", body.apply("mul", base, base), base)
    is_float = DTYPES[body.dtype(base)] == "float"
    if is_float and power == 0.5 and has_roots:
        return body.apply("sqrt", base)
    if is_float and power == -0.5 and has_roots:
        return body.apply("rsqrt", base)
    if is_float and power == -1:
        return body.apply("reciprocal", base)
    if is_float and power == -2:
        return body.apply("reciprocal", body.apply("mul", base, base))
    return body.apply("pow", base, exponent)


def nextafter_short(body: Body, a: Ref, b: Ref, *, eps: float, least: float, most: float) -> Ref:
    """Return a float32 that rounds to the number of a shorter dtype next to `a` towards `b`.

    A step of 5/8 eps is between 1/2 and 3/2 of the distance to the next number, above and below a power of two. `least`
    is the smallest positive number, `most` the largest.
    """
    apply, zero = body.apply, body.const(0.0, "float32")
    at_zero, size = apply("eq", a, zero), apply("abs", a)
    step = apply("max", apply("mul", size, body.const(0.625 * eps, "float32")), body.const(least, "float32"))
    away = apply("or", at_zero, apply("eq", apply("gt", b, a), apply("gt", a, zero)))
    moved = apply("where", away, apply("add", size, step), apply("sub", size, step))
    moved = apply("where", apply("isinf", a), body.const(most, "float32"), moved)
    negative = apply("signbit", apply("where", at_zero, b, a))
    moved = apply("where", negative, apply("neg", moved), moved)
    found = apply("where", apply("eq", a, b), b, moved)
    return apply("where", apply("isnan", b), b, found)


def relu(body: Body, x: Ref) -> Ref:
    return body.apply("max", x, body.const(0, body.dtype(x)))


def clamp(body: Body, x: Ref, low: Ref | None = None, high: Ref | None = None) -> Ref:
    x = x if low is None else body.apply("max", x, low)
    return x if high is None else body.apply("min", x, high)


def one_minus(body: Body, x: Ref) -> Ref:
    return body.apply("sub", body.const(1, body.dtype(x)), x)


def sigmoid_backward(body: Body, grad: Ref, y: Ref) -> Ref:
    return body.apply("mul", grad, body.apply("mul", one_minus(body, y), y))


def tanh_backward(body: Body, grad: Ref, y: Ref) -> Ref:
    return body.apply("mul", grad, one_minus(body, body.apply("mul", y, y)))


def threshold_backward(body: Body, grad: Ref, x: Ref, threshold: float) -> Ref:
    dtype = body.dtype(x)
    return body.apply("where", body.apply("le", x, body.const(threshold, dtype)), body.const(0, dtype), grad)


def silu(body: Body, x: Ref) -> Ref:
    one = body.const(1, body.dtype(x))
    return body.apply("div", x, body.apply("add", one, body.apply("exp", body.apply("neg", x))))


def silu_backward(body: Body, grad: Ref, x: Ref) -> Ref:
    one = body.const(1, body.dtype(x))
    sigmoid = body.apply("div", one, body.apply("add", one, body.apply("exp", body.apply("neg", x))))
    slope = body.apply("add", one, body.apply("mul", x, one_minus(body, sigmoid)))
    return body.apply("mul", body.apply("mul", grad, sigmoid), slope)


def times(body: Body, x: Ref, factor: float) -> Ref:
    return body.apply("mul", x, body.const(factor, body.dtype(x)))


def tanh_inner(body: Body, x: Ref) -> Ref:
    cube = body.apply("mul", body.apply("mul", x, x), x)
    return times(body, body.apply("add", x, times(body, cube, 0.044715)), math.sqrt(2 / math.pi))


def gelu(body: Body, x: Ref, approximate: str = "none") -> Ref:
    one = body.const(1, body.dtype(x))
    if approximate == "tanh":
        weight = body.apply("add", one, body.apply("tanh", tanh_inner(body, x)))
    else:
        weight = body.apply("one_plus_erf", times(body, x, math.sqrt(0.5)))
    return body.apply("mul", times(body, x, 0.5), weight)


def gelu_backward(body: Body, grad: Ref, x: Ref, approximate: str = "none") -> Ref:
    one = body.const(1, body.dtype(x))
    square = body.apply("mul", x, x)
    if approximate == "tanh":
        tanh = body.apply("tanh", tanh_inner(body, x))
        left = times(body, body.apply("add", one, tanh), 0.5)
        inner = body.apply("add", one, times(body, square, 3 * 0.044715))
        slope = body.apply("mul", one_minus(body, body.apply("mul", tanh, tanh)), inner)
        right = body.apply("mul", times(body, x, 0.5 * math.sqrt(2 / math.pi)), slope)
    else:
        left = times(body, body.apply("one_plus_erf", times(body, x, math.sqrt(0.5))), 0.5)
        density = times(body, body.apply("exp", times(body, square, -0.5)), 1 / math.sqrt(2 * math.pi))
        right = body.apply("mul", x, density)
    return body.apply("mul", grad, body.apply("add", left, right))


def leaky_relu(body: Body, x: Ref, slope: float = 0.01) -> Ref:
    positive = body.apply("gt", x, body.const(0, body.dtype(x)))
    return body.apply("where", positive, x, times(body, x, slope))


def addcmul(body: Body, x: Ref, a: Ref, b: Ref, value: float = 1) -> Ref:
    return body.apply("add", x, body.apply("mul", scale(body, a, value), b))


def fma(body: Body, a: Ref, b: Ref, x: Ref) -> Ref:
    """Compute what Dynamo makes of `x.addcmul_(a, b)`: rounded twice, as ATen's addcmul is on a CPU."""
    return body.apply("add", body.apply("mul", a, b), x)


def addcdiv(body: Body, x: Ref, a: Ref, b: Ref, value: float = 1) -> Ref:
    return body.apply("add", x, body.apply("div", scale(body, a, value), b))


def lerp(body: Body, start: Ref, end: Ref, weight: Ref) -> Ref:
    """Interpolate from the nearer end, as torch, so that weight 1 gives `end` exactly."""
    difference = body.apply("sub", end, start)
    near = body.apply("lt", body.apply("abs", weight), body.const(0.5, body.dtype(weight)))
    from_start = body.apply("add", start, body.apply("mul", weight, difference))
    from_end = body.apply("sub", end, body.apply("mul", difference, one_minus(body, weight)))
    return body.apply("where", near, from_start, from_end)


def round_to_integer(op: str) -> Callable[..., Ref]:
    """Make a rounding that leaves integers as they are."""
    return lambda body, x: body.apply(op, x) if DTYPES[body.dtype(x)] == "float" else x


def asks(op: str) -> Callable[..., Ref]:
    """Make a predicate that is false for integers."""
    return lambda body, x: body.apply(op, x) if DTYPES[body.dtype(x)] == "float" else body.const(False, "bool")


def atan(body: Body, x: Ref) -> Ref:
    return body.apply("atan2", x, body.const(1, body.dtype(x)))


def ignoring_nan(op: str) -> Callable[..., Ref]:
    """Make an extremum that ignores a NaN operand. Eager's choice between two zeros differs between dtypes."""

    def meaning(body: Body, a: Ref, b: Ref) -> Ref:
        extreme = body.apply("where", asks("isnan")(body, a), b, body.apply(op, a, b))
        return body.apply("where", asks("isnan")(body, b), a, extreme)

    return meaning


def isfinite(body: Body, x: Ref) -> Ref:
    return body.apply("not", body.apply("or", asks("isnan")(body, x), asks("isinf")(body, x)))


def signbit(body: Body, x: Ref) -> Ref:
    dtype = body.dtype(x)
    if DTYPES[dtype] == "float":
        return body.apply("signbit", x)
    return body.const(False, "bool") if dtype == "bool" else body.apply("lt", x, body.const(0, dtype))


def angle(body: Body, x: Ref) -> Ref:
    """Return the angle of a real number: 0 or pi; NaN stays."""
    dtype = body.dtype(x)
    half = body.apply(
        "where", body.apply("lt", x, body.const(0, dtype)), body.const(math.pi, dtype), body.const(0, dtype)
    )
    return body.apply("where", body.apply("isnan", x), x, half)


def logical_not(body: Body, x: Ref) -> Ref:
    return body.apply("not", x)


def remainder(body: Body, a: Ref, b: Ref) -> Ref:
    return body.apply("mod", a, b)


def same(_: Body, x: Ref, *__: Any, **___: Any) -> Ref:
    return x


def round_to(body: Body, x: Ref, decimals: int) -> Ref:
    """Round to `decimals`, or to a power of ten, as torch computes it: scale, round, scale back."""
    if decimals == 0 or DTYPES[body.dtype(x)] != "float":
        return round_to_integer("round")(body, x)
    ten = body.const(10.0 ** abs(decimals), body.dtype(x))
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    return body.apply(back, body.apply("round", body.apply(there, x, ten)), ten)


def lcm(body: Body, a: Ref, b: Ref) -> Ref:
    """Compute the least common multiple; its product is taken in C's int, as in eager, before the absolute value.

    In 8 or 16 bits it would wrap before that.
    """
    common = body.apply("gcd", a, b)
    if body.dtype(a) in ("uint8", "int8", "int16"):
        a, b, common = (body.cast(ref, "int32") for ref in (a, b, common))
    zero, one = body.const(0, body.dtype(a)), body.const(1, body.dtype(a))
    whole = body.apply("truncdiv", a, body.apply("where", body.apply("eq", common, zero), one, common))
    return body.apply("abs", body.apply("mul", whole, b))
