"""Rules for operations on one element at a time: a table from ATen op to a small function over values of a body."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dcompile.codegen.lower.body import Body, Coords
from dcompile.codegen.lower.graph import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.indices import Shape
from dcompile.codegen.lower.rule import Result, Rule, common_dtype, opmath
from dcompile.codegen.lower.tensor import T, broadcast, computed
from dcompile.ir.nodes import Const, Ref
from dcompile.ir.ops import DTYPES

Promotion = Literal["result", "common", "bool"]
"""Operands become the result's dtype, their own common dtype, or truth values, before the operation."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """`meaning(body, *operands, **settings)` in the compute dtype, on that many leading arguments."""

    meaning: Callable[..., Ref]
    operands: int
    promotion: Promotion = "result"
    heavy: bool = False
    ops: int = 1
    exact_numbers: bool = False
    """A number after the first operand keeps the compute dtype's precision, as ATen's CPU kernels of mul and div have
    it (measured on torch 2.13; add, sub and comparisons round it to the tensor's dtype first)."""

    def __call__(self, _: Lowering, value: torch.Tensor, /, *args: Any, **settings: Any) -> T:
        shape, dtype = shape_of(value), dtype_name(value.dtype)
        operands, extra = args[: self.operands], args[self.operands :]
        common = "bool" if self.promotion == "bool" else dtype
        if self.promotion == "common":
            common = common_dtype(operands)
        compute, meaning = opmath(common), self.meaning
        seen = [broadcast(arg, shape) if isinstance(arg, T) else arg for arg in operands]
        exact = [
            self.exact_numbers and position > 0 and not (isinstance(arg, T) and (arg.shape or not shape))
            for position, arg in enumerate(operands)
        ]

        def at(body: Body, coords: Coords) -> Ref:
            refs: list[Ref | None] = []
            for arg, is_exact in zip(seen, exact, strict=True):
                if arg is None:
                    refs.append(None)
                    continue
                ref = body.trace(arg, coords) if isinstance(arg, T) else body.const(arg, compute)
                refs.append(body.cast(ref if is_exact else to_dtype(body, ref, common), compute))
            return to_dtype(body, meaning(body, *refs, *extra, **settings), dtype)

        tensors = tuple(arg for arg in seen if isinstance(arg, T))
        return computed(shape, dtype, at, tensors, ops=self.ops, heavy=self.heavy)


def to_dtype(body: Body, ref: Ref, dtype: str) -> Ref:
    """A cast by way of a compute dtype: integers become 16-bit floats through float32, as in eager."""
    source = body.dtype(ref)
    if source == dtype:
        return ref
    if DTYPES[source] != "float" and dtype in ("bfloat16", "float16"):
        ref = body.cast(ref, "float32")
    return body.cast(ref, dtype)


def _simple(op: str) -> Callable[..., Ref]:
    return lambda body, *args: body.apply(op, *args)


def _sign(body: Body, x: Ref) -> Ref:
    return x if body.dtype(x) == "bool" else body.apply("sign", x)


def _scaled(body: Body, ref: Ref, alpha: float) -> Ref:
    if alpha == 1:
        return ref
    return body.apply("mul", ref, body.const(alpha, body.dtype(ref)))


def _add(body: Body, a: Ref, b: Ref, alpha: float = 1) -> Ref:
    if body.dtype(a) == "bool":
        return body.apply("or", a, b)
    return body.apply("add", a, _scaled(body, b, alpha))


def _sub(body: Body, a: Ref, b: Ref, alpha: float = 1) -> Ref:
    return body.apply("sub", a, _scaled(body, b, alpha))


def _rsub(body: Body, a: Ref, b: Ref, alpha: float = 1) -> Ref:
    return body.apply("sub", b, _scaled(body, a, alpha))


def _mul(body: Body, a: Ref, b: Ref) -> Ref:
    return body.apply("and" if body.dtype(a) == "bool" else "mul", a, b)


def _div(body: Body, a: Ref, b: Ref, rounding_mode: str | None = None) -> Ref:
    if rounding_mode is None:
        return body.apply("div", a, b)
    if DTYPES[body.dtype(a)] == "int":
        return body.apply("floordiv" if rounding_mode == "floor" else "truncdiv", a, b)
    if rounding_mode == "floor":
        return _floor_divide(body, a, b)
    return body.apply("trunc", body.apply("div", a, b))


def _floor_divide(body: Body, a: Ref, b: Ref) -> Ref:
    """Floats as torch: exact multiples of b first, so that rounding of a/b cannot cross an integer."""
    if DTYPES[body.dtype(a)] == "int":
        return body.apply("floordiv", a, b)
    zero, one = body.const(0, body.dtype(a)), body.const(1, body.dtype(a))
    remainder = body.apply("fmod", a, b)
    quotient = body.apply("div", body.apply("sub", a, remainder), b)
    off = body.apply(
        "and",
        body.apply("ne", remainder, zero),
        body.apply("ne", body.apply("lt", b, zero), body.apply("lt", remainder, zero)),
    )
    quotient = body.apply("where", off, body.apply("sub", quotient, one), quotient)
    floor = body.apply("floor", quotient)
    half = body.const(0.5, body.dtype(a))
    up = body.apply("gt", body.apply("sub", quotient, floor), half)
    rounded = body.apply("where", up, body.apply("add", floor, one), floor)
    rounded = body.apply("where", body.apply("eq", quotient, zero), zero, rounded)
    return body.apply("where", body.apply("eq", b, zero), body.apply("div", a, b), rounded)


def _pow(body: Body, base: Ref, exponent: Ref) -> Ref:
    """Powers that eager computes exactly are products here too."""
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
    if is_float and power == 0.5:
        return body.apply("sqrt", base)
    if is_float and power == -0.5:
        return body.apply("rsqrt", base)
    if is_float and power == -1:
        return body.apply("reciprocal", base)
    if is_float and power == -2:
        return body.apply("reciprocal", body.apply("mul", base, base))
    return body.apply("pow", base, exponent)


def _relu(body: Body, x: Ref) -> Ref:
    return body.apply("max", x, body.const(0, body.dtype(x)))


def _clamp(body: Body, x: Ref, low: Ref | None = None, high: Ref | None = None) -> Ref:
    x = x if low is None else body.apply("max", x, low)
    return x if high is None else body.apply("min", x, high)


def _one_minus(body: Body, x: Ref) -> Ref:
    return body.apply("sub", body.const(1, body.dtype(x)), x)


def _sigmoid_backward(body: Body, grad: Ref, y: Ref) -> Ref:
    return body.apply("mul", grad, body.apply("mul", _one_minus(body, y), y))


def _tanh_backward(body: Body, grad: Ref, y: Ref) -> Ref:
    return body.apply("mul", grad, _one_minus(body, body.apply("mul", y, y)))


def _threshold_backward(body: Body, grad: Ref, x: Ref, threshold: float) -> Ref:
    dtype = body.dtype(x)
    return body.apply("where", body.apply("le", x, body.const(threshold, dtype)), body.const(0, dtype), grad)


def _silu(body: Body, x: Ref) -> Ref:
    one = body.const(1, body.dtype(x))
    return body.apply("div", x, body.apply("add", one, body.apply("exp", body.apply("neg", x))))


def _silu_backward(body: Body, grad: Ref, x: Ref) -> Ref:
    one = body.const(1, body.dtype(x))
    sigmoid = body.apply("div", one, body.apply("add", one, body.apply("exp", body.apply("neg", x))))
    slope = body.apply("add", one, body.apply("mul", x, _one_minus(body, sigmoid)))
    return body.apply("mul", body.apply("mul", grad, sigmoid), slope)


def _times(body: Body, x: Ref, factor: float) -> Ref:
    return body.apply("mul", x, body.const(factor, body.dtype(x)))


def _tanh_inner(body: Body, x: Ref) -> Ref:
    cube = body.apply("mul", body.apply("mul", x, x), x)
    return _times(body, body.apply("add", x, _times(body, cube, 0.044715)), math.sqrt(2 / math.pi))


def _gelu(body: Body, x: Ref, approximate: str = "none") -> Ref:
    one = body.const(1, body.dtype(x))
    if approximate == "tanh":
        weight = body.apply("add", one, body.apply("tanh", _tanh_inner(body, x)))
    else:
        weight = body.apply("add", one, body.apply("erf", _times(body, x, math.sqrt(0.5))))
    return body.apply("mul", _times(body, x, 0.5), weight)


def _gelu_backward(body: Body, grad: Ref, x: Ref, approximate: str = "none") -> Ref:
    one = body.const(1, body.dtype(x))
    square = body.apply("mul", x, x)
    if approximate == "tanh":
        tanh = body.apply("tanh", _tanh_inner(body, x))
        left = _times(body, body.apply("add", one, tanh), 0.5)
        inner = body.apply("add", one, _times(body, square, 3 * 0.044715))
        slope = body.apply("mul", _one_minus(body, body.apply("mul", tanh, tanh)), inner)
        right = body.apply("mul", _times(body, x, 0.5 * math.sqrt(2 / math.pi)), slope)
    else:
        left = _times(body, body.apply("add", one, body.apply("erf", _times(body, x, math.sqrt(0.5)))), 0.5)
        density = _times(body, body.apply("exp", _times(body, square, -0.5)), 1 / math.sqrt(2 * math.pi))
        right = body.apply("mul", x, density)
    return body.apply("mul", grad, body.apply("add", left, right))


def _leaky_relu(body: Body, x: Ref, slope: float = 0.01) -> Ref:
    positive = body.apply("gt", x, body.const(0, body.dtype(x)))
    return body.apply("where", positive, x, _times(body, x, slope))


def _addcmul(body: Body, x: Ref, a: Ref, b: Ref, value: float = 1) -> Ref:
    return body.apply("add", x, body.apply("mul", _scaled(body, a, value), b))


def _fma(body: Body, a: Ref, b: Ref, x: Ref) -> Ref:
    """What Dynamo makes of `x.addcmul_(a, b)`: rounded twice, as ATen's addcmul is on a CPU."""
    return body.apply("add", body.apply("mul", a, b), x)


def _addcdiv(body: Body, x: Ref, a: Ref, b: Ref, value: float = 1) -> Ref:
    return body.apply("add", x, body.apply("div", _scaled(body, a, value), b))


def _lerp(body: Body, start: Ref, end: Ref, weight: Ref) -> Ref:
    """From the nearer end, as torch, so that weight 1 gives `end` exactly."""
    difference = body.apply("sub", end, start)
    near = body.apply("lt", body.apply("abs", weight), body.const(0.5, body.dtype(weight)))
    from_start = body.apply("add", start, body.apply("mul", weight, difference))
    from_end = body.apply("sub", end, body.apply("mul", difference, _one_minus(body, weight)))
    return body.apply("where", near, from_start, from_end)


def _rounded(op: str) -> Callable[..., Ref]:
    """Rounding leaves integers as they are."""
    return lambda body, x: body.apply(op, x) if DTYPES[body.dtype(x)] == "float" else x


def _is(op: str) -> Callable[..., Ref]:
    """A question that is false for integers."""
    return lambda body, x: body.apply(op, x) if DTYPES[body.dtype(x)] == "float" else body.const(False, "bool")


def _atan(body: Body, x: Ref) -> Ref:
    return body.apply("atan2", x, body.const(1, body.dtype(x)))


def _ignoring_nan(op: str) -> Callable[..., Ref]:
    """The other operand where one is NaN."""

    def meaning(body: Body, a: Ref, b: Ref) -> Ref:
        extreme = body.apply("where", _is("isnan")(body, a), b, body.apply(op, a, b))
        return body.apply("where", _is("isnan")(body, b), a, extreme)

    return meaning


def _isfinite(body: Body, x: Ref) -> Ref:
    return body.apply("not", body.apply("or", _is("isnan")(body, x), _is("isinf")(body, x)))


def _signbit(body: Body, x: Ref) -> Ref:
    dtype = body.dtype(x)
    if DTYPES[dtype] == "float":
        return body.apply("signbit", x)
    return body.const(False, "bool") if dtype == "bool" else body.apply("lt", x, body.const(0, dtype))


def _angle(body: Body, x: Ref) -> Ref:
    """Of a real number: 0 or pi, and NaN stays."""
    dtype = body.dtype(x)
    half = body.apply(
        "where", body.apply("lt", x, body.const(0, dtype)), body.const(math.pi, dtype), body.const(0, dtype)
    )
    return body.apply("where", body.apply("isnan", x), x, half)


def _logical_not(body: Body, x: Ref) -> Ref:
    return body.apply("not", x)


def _remainder(body: Body, a: Ref, b: Ref) -> Ref:
    return body.apply("mod", a, b)


def _same(_: Body, x: Ref, *__: Any, **___: Any) -> Ref:
    return x


_UNARY = {
    "neg": False, "abs": False, "reciprocal": True, "sqrt": True, "rsqrt": True, "exp": True,
    "exp2": True, "expm1": True, "log": True, "log1p": True, "log2": True, "log10": True, "sin": True, "cos": True,
    "tan": True, "tanh": True, "sigmoid": True, "erf": True,
    "erfc": True, "lgamma": True, "asin": True, "acos": True, "sinh": True, "cosh": True, "asinh": True, "acosh": True,
    "atanh": True,
}  # fmt: skip
_PRIMS = (
    "neg", "abs", "sqrt", "exp", "log", "sin", "cos", "tanh", "floor", "ceil", "erfc", "lgamma", "asin", "acos", "sinh",
    "cosh", "asinh", "acosh", "atanh", "signbit",
)  # fmt: skip
"""Decompositions use these in place of their ATen namesakes."""
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_BOTH = ("Tensor", "Scalar")


def _table() -> dict[str, Pointwise]:
    table: dict[str, Pointwise] = {}
    for name, heavy in _UNARY.items():
        table[f"aten.{name}.default"] = Pointwise(_simple(name), 1, heavy=heavy)
    for name in ("floor", "ceil", "trunc", "round"):
        table[f"aten.{name}.default"] = Pointwise(_rounded(name), 1)
    for name in ("isnan", "isinf"):
        table[f"aten.{name}.default"] = Pointwise(_is(name), 1, "common")
    table["aten.signbit.default"] = Pointwise(_signbit, 1, "common")
    for name, shift in {"left": "shl", "right": "shr"}.items():
        overloads = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
        table |= {f"aten.bitwise_{name}_shift.{overload}": Pointwise(_simple(shift), 2) for overload in overloads}
    for name in _COMPARE:
        table |= {f"aten.{name}.{overload}": Pointwise(_simple(name), 2, "common") for overload in _BOTH}
    for name in ("and", "or", "xor"):
        table |= {f"aten.bitwise_{name}.{overload}": Pointwise(_simple(name), 2) for overload in _BOTH}
        table[f"aten.logical_{name}.default"] = Pointwise(_simple(name), 2, "bool")
    for name, op in {"add": _add, "sub": _sub, "mul": _mul, "rsub": _rsub}.items():
        exact = name == "mul"
        table |= {f"aten.{name}.{overload}": Pointwise(op, 2, exact_numbers=exact) for overload in _BOTH}
    for name, op in {"remainder": _remainder, "fmod": _simple("fmod")}.items():
        table |= {f"aten.{name}.{overload}": Pointwise(op, 2, heavy=True) for overload in _BOTH}
    for overload in ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode"):
        table[f"aten.div.{overload}"] = Pointwise(_div, 2, heavy=True, exact_numbers=overload in _BOTH)
    table |= {f"prims.{name}.default": table[f"aten.{name}.default"] for name in _PRIMS}
    return table | {
        # autograd's own name for a division, where AOTAutograd does not take it apart
        "aten.true_divide.Tensor": table["aten.div.Tensor"],
        "aten.angle.default": Pointwise(_angle, 1, ops=3),
        "aten.gcd.default": Pointwise(_simple("gcd"), 2, heavy=True),
        "aten.lcm.default": Pointwise(_lcm, 2, heavy=True, ops=4),
        "aten.round.decimals": Pointwise(_round_to, 1, heavy=True, ops=3),
        "aten.hypot.default": Pointwise(_simple("hypot"), 2, heavy=True),
        "aten.atan.default": Pointwise(_atan, 1, heavy=True),
        "aten.fmax.default": Pointwise(_ignoring_nan("max"), 2, ops=3),
        "aten.fmin.default": Pointwise(_ignoring_nan("min"), 2, ops=3),
        "aten.floor_divide.default": Pointwise(_floor_divide, 2, heavy=True),
        "aten.sign.default": Pointwise(_sign, 1),
        "aten.atan2.default": Pointwise(_simple("atan2"), 2, heavy=True),
        "aten.square.default": Pointwise(lambda body, x: body.apply("mul", x, x), 1),
        "aten.isfinite.default": Pointwise(_isfinite, 1, "common"),
        "aten.bitwise_not.default": Pointwise(_simple("not"), 1),
        "aten.logical_not.default": Pointwise(_logical_not, 1, "bool"),
        "aten.maximum.default": Pointwise(_simple("max"), 2),
        "aten.minimum.default": Pointwise(_simple("min"), 2),
        "aten.relu.default": Pointwise(_relu, 1),
        "aten.clamp.default": Pointwise(_clamp, 3),
        "aten.clamp.Tensor": Pointwise(_clamp, 3),
        "aten.clamp_min.default": Pointwise(_clamp, 2),
        "aten.clamp_min.Tensor": Pointwise(_clamp, 2),
        "aten.clamp_max.default": Pointwise(lambda body, x, high: _clamp(body, x, None, high), 2),
        "aten.clamp_max.Tensor": Pointwise(lambda body, x, high: _clamp(body, x, None, high), 2),
        "aten.leaky_relu.default": Pointwise(_leaky_relu, 1, ops=2),
        "aten.silu.default": Pointwise(_silu, 1, heavy=True, ops=4),
        "aten.silu_backward.default": Pointwise(_silu_backward, 2, heavy=True, ops=8),
        "aten.gelu.default": Pointwise(_gelu, 1, heavy=True, ops=5),
        "aten.gelu_backward.default": Pointwise(_gelu_backward, 2, heavy=True, ops=12),
        "aten.sigmoid_backward.default": Pointwise(_sigmoid_backward, 2, ops=3),
        "aten.tanh_backward.default": Pointwise(_tanh_backward, 2, ops=3),
        "aten.threshold_backward.default": Pointwise(_threshold_backward, 2, ops=2),
        "aten.addcmul.default": Pointwise(_addcmul, 3, ops=2),
        "prims.fma.default": Pointwise(_fma, 3, ops=2),
        "aten.addcdiv.default": Pointwise(_addcdiv, 3, heavy=True, ops=2),
        "aten.lerp.Scalar": Pointwise(_lerp, 3, ops=4, exact_numbers=True),
        "aten.lerp.Tensor": Pointwise(_lerp, 3, ops=4, exact_numbers=True),
        "aten.clone.default": Pointwise(_same, 1, ops=0),
        "aten._to_copy.default": Pointwise(_same, 1, "common", ops=0),
        "aten.lift_fresh_copy.default": Pointwise(_same, 1, ops=0),
        "prims.convert_element_type.default": Pointwise(_same, 1, "common", ops=0),
        "aten.copy.default": Pointwise(lambda _, __, source, *rest: source, 2, ops=0),
    }


def _nextafter(low: Lowering, value: torch.Tensor, /, x: T, y: T) -> Result:
    """The next number of the dtype itself: not to be found in float32 for a shorter one."""
    if dtype_name(value.dtype) not in ("float32", "float64"):
        return NotImplemented
    return Pointwise(_simple("nextafter"), 2)(low, value, x, y)


def _hardtanh(low: Lowering, value: torch.Tensor, /, x: T, a: float = -1.0, b: float = 1.0) -> T:
    return Pointwise(_clamp, 3)(low, value, x, a, b)


def _power(low: Lowering, value: torch.Tensor, /, base: Any, exponent: Any) -> Result:
    cheap = not isinstance(exponent, T) and exponent in (0, 1, 2, 3)
    return Pointwise(_pow, 2, heavy=not cheap, ops=2)(low, value, base, exponent)


def _round_to(body: Body, x: Ref, decimals: int) -> Ref:
    """To so many decimals, or to a power of ten, as torch computes it: scale, round, scale back."""
    if decimals == 0 or DTYPES[body.dtype(x)] != "float":
        return _rounded("round")(body, x)
    ten = body.const(10.0 ** abs(decimals), body.dtype(x))
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
    return body.apply(back, body.apply("round", body.apply(there, x, ten)), ten)


def _lcm(body: Body, a: Ref, b: Ref) -> Ref:
    zero, one = body.const(0, body.dtype(a)), body.const(1, body.dtype(a))
    common = body.apply("gcd", a, b)
    whole = body.apply("truncdiv", a, body.apply("where", body.apply("eq", common, zero), one, common))
    return body.apply("abs", body.apply("mul", whole, b))


def _where(_: Lowering, value: torch.Tensor, /, condition: T, a: Any, b: Any) -> T:
    """The condition is a truth value, the two choices become the result's dtype."""
    return select(condition, a, b, shape_of(value), dtype_name(value.dtype))


def select(condition: T, a: T | float, b: T | float, shape: Shape, dtype: str) -> T:
    """`a` where the condition holds, else `b`."""
    condition = broadcast(condition, shape)
    choices = [broadcast(arg, shape) if isinstance(arg, T) else arg for arg in (a, b)]
    compute = opmath(dtype)

    def at(body: Body, coords: Coords) -> Ref:
        refs = [
            body.cast(to_dtype(body, body.trace(arg, coords), dtype), compute)
            if isinstance(arg, T)
            else body.cast(body.const(arg, dtype), compute)
            for arg in choices
        ]
        return to_dtype(body, body.apply("where", _truth(body, body.trace(condition, coords)), *refs), dtype)

    return computed(shape, dtype, at, tuple(arg for arg in (condition, *choices) if isinstance(arg, T)))


def _truth(body: Body, ref: Ref) -> Ref:
    return body.cast(ref, "bool")


def _masked_fill(_: Lowering, value: torch.Tensor, /, x: T, mask: T, fill: Any) -> T:
    return select(mask, fill, x, shape_of(value), dtype_name(value.dtype))


RULES: dict[str, Rule] = {name: Rule(rule) for name, rule in _table().items()} | {
    "aten.nextafter.default": Rule(_nextafter),
    "aten.pow.Tensor_Scalar": Rule(_power),
    "aten.pow.Tensor_Tensor": Rule(_power),
    "aten.pow.Scalar": Rule(_power),
    "aten.where.self": Rule(_where),
    "prims.where.default": Rule(_where),
    "aten.where.ScalarSelf": Rule(_where),
    "aten.where.ScalarOther": Rule(_where),
    "aten.where.Scalar": Rule(_where),
    "aten.masked_fill.Scalar": Rule(_masked_fill),
    "aten.masked_fill.Tensor": Rule(_masked_fill),
    "aten.hardtanh.default": Rule(_hardtanh),
}
