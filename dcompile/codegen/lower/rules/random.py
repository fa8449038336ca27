"""Rules for random numbers: the operators of `random_ops.py` as loops.

A number is a function of the call's key and of the element's position. So it is computed at its use and never saved for
a backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.symbolic.strides import contiguous
from dcompile.ir.index import ZERO, flatten
from dcompile.ir.nodes import Ref
from dcompile.operators import random_ops

Build = Callable[[Body, Callable[[int], Ref]], Ref]
"""From the words of an element's Philox block (by number) to its value."""


def _drawn(value: torch.Tensor, key: LazyTensor | None, draw: int, build: Build, ops: int) -> Result:
    if key is None:
        return NotImplemented
    shape = shape_of(value)

    def at(body: Body, coords: Coords) -> Ref:
        position = body.index(flatten(coords, contiguous(shape)))
        source = body.trace(key, (ZERO,))

        def word(number: int) -> Ref:
            return body.apply("philox", source, position, body.const(4 * draw + number, "int64"))

        return build(body, word)

    return make_lazy(shape, dtype_name(value.dtype), at, (key,), ops=ops, heavy=True)


def _lower_uniform(
    low: Lowering,
    value: torch.Tensor,
    /,
    size: Any,
    dtype: Any,
    device: Any,
    key: LazyTensor | None = None,
    draw: int = 0,
) -> Result:
    name = dtype_name(value.dtype)
    digits = random_ops.DIGITS[name]

    def build(body: Body, word: Callable[[int], Ref]) -> Ref:
        compute = opmath(name)
        if digits > 32:
            high = body.apply("and", _unsigned(body, word(1)), body.const((1 << digits - 32) - 1, "int64"))
            whole = body.apply("or", body.apply("shl", high, body.const(32, "int64")), _unsigned(body, word(0)))
        else:
            shifted = body.apply("shr", word(0), body.const(32 - digits, "int32"))
            whole = body.apply("and", shifted, body.const((1 << digits) - 1, "int32"))
        return body.cast(body.apply("mul", body.cast(whole, compute), body.const(2.0**-digits, compute)), name)

    return _drawn(value, key, draw, build, 6)


def _unsigned(body: Body, word: Ref) -> Ref:
    return body.apply("and", body.cast(word, "int64"), body.const(random_ops.LOW, "int64"))


def _lower_normal(
    low: Lowering,
    value: torch.Tensor,
    /,
    size: Any,
    dtype: Any,
    device: Any,
    key: LazyTensor | None = None,
    draw: int = 0,
) -> Result:
    name = dtype_name(value.dtype)
    compute = opmath(name)

    def build(body: Body, word: Callable[[int], Ref]) -> Ref:
        def const(number: float) -> Ref:
            return body.const(number, compute)

        whole = body.cast(body.apply("and", word(0), body.const(2**31 - 1, "int32")), compute)
        share = body.apply("mul", body.apply("add", whole, const(0.5)), const(2.0**-31))
        radius = body.apply("sqrt", body.apply("mul", body.apply("log", share), const(-2.0)))
        turn = body.cast(word(1), compute)
        if compute == "float64":
            cosine = body.apply("cos", body.apply("mul", turn, const(math.pi * 2.0**-31)))
        else:
            # cos(pi t) = sin(pi (1/2 - |t|)), by its series: an error of at most 6e-8, and unlike the library's it
            # vectorizes
            share_of_pi = body.apply("sub", const(0.5), body.apply("mul", body.apply("abs", turn), const(2.0**-31)))
            cosine = _sine(body, body.apply("mul", share_of_pi, const(math.pi)))
        return body.cast(body.apply("mul", radius, cosine), name)

    return _drawn(value, key, draw, build, 12)


def _sine(body: Body, x: Ref) -> Ref:
    """Return the sine of |x| <= pi/2, in float32."""
    square = body.apply("mul", x, x)
    total = body.const(-1 / math.factorial(11), "float32")
    for power in (9, 7, 5, 3, 1):
        sign = -1 if power in (3, 7) else 1
        total = body.apply("add", body.apply("mul", total, square), body.const(sign / math.factorial(power), "float32"))
    return body.apply("mul", total, x)


def _lower_less(
    low: Lowering,
    value: torch.Tensor,
    /,
    size: Any,
    p: float,
    device: Any,
    key: LazyTensor | None = None,
    draw: int = 0,
) -> Result:
    limit = random_ops.threshold(p)
    if limit is None:
        return constant(True, shape_of(value), "bool")
    return _drawn(value, key, draw, lambda body, word: body.apply("lt", word(0), body.const(limit, "int32")), 2)


def _lower_bits(
    low: Lowering,
    value: torch.Tensor,
    /,
    size: Any,
    count: int,
    device: Any,
    key: LazyTensor | None = None,
    draw: int = 0,
) -> Result:
    def build(body: Body, word: Callable[[int], Ref]) -> Ref:
        if count == 32:
            return _unsigned(body, word(0))
        high = body.apply("and", body.cast(word(1), "int64"), body.const(2**31 - 1, "int64"))
        return body.apply("or", body.apply("shl", high, body.const(32, "int64")), _unsigned(body, word(0)))

    return _drawn(value, key, draw, build, 5)


RULES: dict[str, Rule] = {
    "dcompile_random.uniform.default": Rule(_lower_uniform),
    "dcompile_random.normal.default": Rule(_lower_normal),
    "dcompile_random.less.default": Rule(_lower_less),
    "dcompile_random.bits.default": Rule(_lower_bits),
}
"""Without a key these rules do not apply: the operator itself is called, and draws a key."""
