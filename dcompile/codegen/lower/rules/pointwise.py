"""Rules for elementwise operations: a table from ATen op to a small function over values of a body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.dtypes import saturate
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, common_dtype, opmath
from dcompile.codegen.lower.rules import scalar_ops
from dcompile.codegen.lower.symbolic.strides import Shape
from dcompile.ir.float8 import FLOAT8
from dcompile.ir.nodes import Ref
from dcompile.ir.ops import DTYPES, OPS

Promotion = Literal["result", "common", "bool"]
"""Dtype of operands before the operation: the result's, their common one, or bool."""
Exact = Literal["", "factor", "divisor", "weight", "addend"]
"""Operands of one number that keep the compute dtype's precision, as in ATen's kernels; others are rounded to the
tensor's dtype first. On CPUs these are factors, divisors and weights after the first operand, tensors without
dimensions included. On GPUs they are all factors and addends, divisors, and weights of lerp, if they are numbers of
Python or, but for weights, elements on the CPU. Measured on torch 2.13 and 2.11 (`AtenTraits.rounds_elements`)."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """`meaning(body, *operands, **settings)` in the compute dtype, on `operands` leading arguments."""

    meaning: Callable[..., Ref]
    operands: int
    promotion: Promotion = "result"
    heavy: bool = False
    ops: int = 1
    exact: Exact = ""

    def __call__(self, low: Lowering, value: torch.Tensor, /, *args: Any, **settings: Any) -> LazyTensor:
        shape, dtype = shape_of(value), dtype_name(value.dtype)
        operands, extra = args[: self.operands], args[self.operands :]
        common = "bool" if self.promotion == "bool" else dtype
        if self.promotion == "common":
            common = common_dtype(operands)
        compute, meaning = opmath(common), self.meaning
        seen = [broadcast(arg, shape) if isinstance(arg, LazyTensor) else arg for arg in operands]
        exact = [self._is_exact(low, position, arg, shape) for position, arg in enumerate(operands)]

        def at(body: Body, coords: Coords) -> Ref:
            refs: list[Ref | None] = []
            for arg, is_exact in zip(seen, exact, strict=True):
                if arg is None:
                    refs.append(None)
                    continue
                ref = body.trace(arg, coords) if isinstance(arg, LazyTensor) else body.const(arg, compute)
                refs.append(body.cast(ref if is_exact else to_dtype(body, ref, common), compute))
            return to_dtype(body, meaning(body, *refs, *extra, **settings), dtype)

        tensors = tuple(arg for arg in seen if isinstance(arg, LazyTensor))
        return make_lazy(shape, dtype, at, tensors, ops=self.ops, heavy=self.heavy)

    def _is_exact(self, low: Lowering, position: int, arg: Any, shape: Shape) -> bool:
        tensor = isinstance(arg, LazyTensor)
        if low.traits.aten.rounds_elements:
            anywhere = position > 0 or self.exact in ("factor", "addend")
            return bool(self.exact) and anywhere and low.is_number(arg) and not (self.exact == "weight" and tensor)
        return self.exact not in ("", "addend") and position > 0 and not (tensor and (arg.shape or not shape))


def to_dtype(body: Body, ref: Ref, dtype: str) -> Ref:
    """Cast via a compute dtype: integers become floats of 8 and 16 bits through float32, as in eager."""
    source = body.dtype(ref)
    if source == dtype:
        return ref
    if (DTYPES[source] != "float" and dtype in ("bfloat16", "float16")) or dtype in FLOAT8:
        ref = body.cast(ref, "float32")
    return body.cast(saturate(body, ref) if dtype == "float8_e4m3fn" else ref, dtype)


_UNARY = (
    "neg", "abs", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sin", "cos",
    "tan", "tanh", "sigmoid", "erf", "erfc", "lgamma", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh",
)  # fmt: skip
"""Ops that compute what the ATen operation of the same name does."""
MIN_HEAVY_COST = 4
"""Divisions and what costs more: whole rows of a reader that repeats them should not compute them again."""
_PRIMS = (
    "neg", "abs", "sqrt", "exp", "log", "sin", "cos", "tanh", "floor", "ceil", "erfc", "lgamma", "asin", "acos", "sinh",
    "cosh", "asinh", "acosh", "atanh", "signbit",
)  # fmt: skip
"""Operations that decompositions use in place of their ATen namesakes."""
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_BOTH = ("Tensor", "Scalar")


def _table() -> dict[str, Pointwise]:
    table: dict[str, Pointwise] = {}
    for name in _UNARY:
        heavy = OPS[name].cost >= MIN_HEAVY_COST
        table[f"aten.{name}.default"] = Pointwise(scalar_ops.simple(name), 1, heavy=heavy)
    for name in ("floor", "ceil", "trunc", "round"):
        table[f"aten.{name}.default"] = Pointwise(scalar_ops.round_to_integer(name), 1)
    for name in ("isnan", "isinf"):
        table[f"aten.{name}.default"] = Pointwise(scalar_ops.asks(name), 1, "common")
    table["aten.signbit.default"] = Pointwise(scalar_ops.signbit, 1, "common")
    for name, shift in {"left": "shl", "right": "shr"}.items():
        overloads = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
        table |= {
            f"aten.bitwise_{name}_shift.{overload}": Pointwise(scalar_ops.simple(shift), 2) for overload in overloads
        }
    for name in _COMPARE:
        table |= {f"aten.{name}.{overload}": Pointwise(scalar_ops.simple(name), 2, "common") for overload in _BOTH}
    for name in ("and", "or", "xor"):
        table |= {f"aten.bitwise_{name}.{overload}": Pointwise(scalar_ops.simple(name), 2) for overload in _BOTH}
        table[f"aten.logical_{name}.default"] = Pointwise(scalar_ops.simple(name), 2, "bool")
    for name, op in {
        "add": scalar_ops.add,
        "sub": scalar_ops.sub,
        "mul": scalar_ops.mul,
        "rsub": scalar_ops.rsub,
    }.items():
        exact: Exact = "factor" if name == "mul" else "addend"
        table |= {f"aten.{name}.{overload}": Pointwise(op, 2, exact=exact) for overload in _BOTH}
    for name, op in {"remainder": scalar_ops.remainder, "fmod": scalar_ops.simple("fmod")}.items():
        table |= {f"aten.{name}.{overload}": Pointwise(op, 2, heavy=True) for overload in _BOTH}
    table |= {
        f"aten.div.{overload}_mode": Pointwise(scalar_ops.div, 2, heavy=True, exact="divisor") for overload in _BOTH
    }
    table |= {f"prims.{name}.default": table[f"aten.{name}.default"] for name in _PRIMS}
    return table | {
        "aten.angle.default": Pointwise(scalar_ops.angle, 1, ops=3),
        "aten.gcd.default": Pointwise(scalar_ops.simple("gcd"), 2, heavy=True),
        "aten.lcm.default": Pointwise(scalar_ops.lcm, 2, heavy=True, ops=4),
        "aten.round.decimals": Pointwise(scalar_ops.round_to, 1, heavy=True, ops=3),
        "aten.hypot.default": Pointwise(scalar_ops.simple("hypot"), 2, heavy=True),
        "aten.atan.default": Pointwise(scalar_ops.atan, 1, heavy=True),
        "aten.fmax.default": Pointwise(scalar_ops.ignoring_nan("max"), 2, ops=3),
        "aten.fmin.default": Pointwise(scalar_ops.ignoring_nan("min"), 2, ops=3),
        "aten.sign.default": Pointwise(scalar_ops.sign, 1),
        "aten.atan2.default": Pointwise(scalar_ops.simple("atan2"), 2, heavy=True),
        "aten.square.default": Pointwise(lambda body, x: body.apply("mul", x, x), 1),
        "aten.isfinite.default": Pointwise(scalar_ops.isfinite, 1, "common"),
        "aten.bitwise_not.default": Pointwise(scalar_ops.simple("not"), 1),
        "aten.logical_not.default": Pointwise(scalar_ops.logical_not, 1, "bool"),
        "aten.maximum.default": Pointwise(scalar_ops.simple("max"), 2),
        "aten.minimum.default": Pointwise(scalar_ops.simple("min"), 2),
        "aten.relu.default": Pointwise(scalar_ops.relu, 1),
        "aten.clamp.default": Pointwise(scalar_ops.clamp, 3),
        "aten.clamp.Tensor": Pointwise(scalar_ops.clamp, 3),
        "aten.clamp_min.default": Pointwise(scalar_ops.clamp, 2),
        "aten.clamp_min.Tensor": Pointwise(scalar_ops.clamp, 2),
        "aten.clamp_max.default": Pointwise(lambda body, x, high: scalar_ops.clamp(body, x, None, high), 2),
        "aten.clamp_max.Tensor": Pointwise(lambda body, x, high: scalar_ops.clamp(body, x, None, high), 2),
        "aten.leaky_relu.default": Pointwise(scalar_ops.leaky_relu, 1, ops=2),
        "aten.silu.default": Pointwise(scalar_ops.silu, 1, heavy=True, ops=4),
        "aten.silu_backward.default": Pointwise(scalar_ops.silu_backward, 2, heavy=True, ops=8),
        "aten.gelu.default": Pointwise(scalar_ops.gelu, 1, heavy=True, ops=5),
        "aten.gelu_backward.default": Pointwise(scalar_ops.gelu_backward, 2, heavy=True, ops=12),
        "aten.sigmoid_backward.default": Pointwise(scalar_ops.sigmoid_backward, 2, ops=3),
        "aten.tanh_backward.default": Pointwise(scalar_ops.tanh_backward, 2, ops=3),
        "aten.threshold_backward.default": Pointwise(scalar_ops.threshold_backward, 2, ops=2),
        "aten.addcmul.default": Pointwise(scalar_ops.addcmul, 3, ops=2),
        "dcompile_step.fma.default": Pointwise(lambda body, a, b, x: body.apply("fma", a, b, x), 3, ops=2),
        "prims.fma.default": Pointwise(scalar_ops.fma, 3, ops=2),
        "aten.addcdiv.default": Pointwise(scalar_ops.addcdiv, 3, heavy=True, ops=2),
        "aten.lerp.Scalar": Pointwise(scalar_ops.lerp, 3, ops=4, exact="weight"),
        "aten.lerp.Tensor": Pointwise(scalar_ops.lerp, 3, ops=4, exact="weight"),
        "aten.clone.default": Pointwise(scalar_ops.same, 1, ops=0),
        "aten._to_copy.default": Pointwise(scalar_ops.same, 1, "common", ops=0),
        "prims.convert_element_type.default": Pointwise(scalar_ops.same, 1, "common", ops=0),
        "aten.copy.default": Pointwise(lambda _, __, source, *rest: source, 2, ops=0),
    }


def _nextafter(low: Lowering, value: torch.Tensor, /, x: LazyTensor, y: LazyTensor) -> Result:
    """Return the next number in the tensor's own dtype."""
    dtype = dtype_name(value.dtype)
    if dtype in ("float32", "float64"):
        return Pointwise(scalar_ops.simple("nextafter"), 2)(low, value, x, y)
    limits = torch.finfo(value.dtype)
    settings = {"eps": limits.eps, "least": limits.smallest_normal * limits.eps, "most": limits.max}
    return Pointwise(scalar_ops.nextafter_short, 2, ops=12)(low, value, x, y, **settings)


def _frexp(low: Lowering, values: Sequence[torch.Tensor], /, x: LazyTensor) -> tuple[LazyTensor, LazyTensor]:
    mantissa, exponent = (Pointwise(scalar_ops.simple(op), 1, "common", ops=4) for op in ("mantissa", "exponent"))
    return mantissa(low, values[0], x), exponent(low, values[1], x)


def _div(low: Lowering, value: torch.Tensor, /, a: Any, b: Any) -> LazyTensor:
    multiplies = low.traits.aten.divides_by_reciprocal and low.is_number(b) and not low.is_number(a)
    meaning = scalar_ops.div_by_number if multiplies else scalar_ops.div
    return Pointwise(meaning, 2, heavy=not multiplies, exact="divisor")(low, value, a, b)


def _hardtanh(low: Lowering, value: torch.Tensor, /, x: LazyTensor, a: float = -1.0, b: float = 1.0) -> LazyTensor:
    return Pointwise(scalar_ops.clamp, 3)(low, value, x, a, b)


def _power(low: Lowering, value: torch.Tensor, /, base: Any, exponent: Any) -> Result:
    cheap = not isinstance(exponent, LazyTensor) and exponent in (0, 1, 2, 3)
    has_roots = value.dtype is not torch.float16 or low.traits.aten.has_half_roots
    return Pointwise(scalar_ops.pow, 2, heavy=not cheap, ops=2)(low, value, base, exponent, has_roots=has_roots)


def _where(_: Lowering, value: torch.Tensor, /, condition: LazyTensor, a: Any, b: Any) -> LazyTensor:
    """Select by a truth value; both choices are converted to the result's dtype."""
    return select(condition, a, b, shape_of(value), dtype_name(value.dtype))


def select(condition: LazyTensor, a: LazyTensor | float, b: LazyTensor | float, shape: Shape, dtype: str) -> LazyTensor:
    """Return `a` where the condition holds, else `b`."""
    condition = broadcast(condition, shape)
    choices = [broadcast(arg, shape) if isinstance(arg, LazyTensor) else arg for arg in (a, b)]
    compute = opmath(dtype)

    def at(body: Body, coords: Coords) -> Ref:
        refs = [
            body.cast(to_dtype(body, body.trace(arg, coords), dtype), compute)
            if isinstance(arg, LazyTensor)
            else body.cast(body.const(arg, dtype), compute)
            for arg in choices
        ]
        return to_dtype(body, body.apply("where", _truth(body, body.trace(condition, coords)), *refs), dtype)

    return make_lazy(shape, dtype, at, tuple(arg for arg in (condition, *choices) if isinstance(arg, LazyTensor)))


def _truth(body: Body, ref: Ref) -> Ref:
    return body.cast(ref, "bool")


def _masked_fill(_: Lowering, value: torch.Tensor, /, x: LazyTensor, mask: LazyTensor, fill: Any) -> LazyTensor:
    return select(mask, fill, x, shape_of(value), dtype_name(value.dtype))


RULES: dict[str, Rule] = {name: Rule(rule) for name, rule in _table().items()} | {
    "aten.div.Tensor": Rule(_div),
    "aten.div.Scalar": Rule(_div),
    # autograd's name for a division that AOTAutograd does not decompose
    "aten.true_divide.Tensor": Rule(_div),
    "aten.nextafter.default": Rule(_nextafter),
    "aten.frexp.Tensor": Rule(_frexp),
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
    "aten.floor_divide.default": Rule(
        Pointwise(scalar_ops.floor_divide, 2, heavy=True, exact="divisor"), decomposed=True
    ),
}
