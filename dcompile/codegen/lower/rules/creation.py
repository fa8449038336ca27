"""Rules for tensors without tensor inputs: constants, ranges, and random numbers (`random_ops.py`).

Constants and ranges stay expressions until they must be stored. A random number is a function of the call's key and of
the element's position. So it is computed at its use and never saved for a backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of, strides_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, constant, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.symbolic.strides import contiguous, is_dense
from dcompile.ir.index import ZERO, Index, Size, flatten
from dcompile.ir.nodes import Ref
from dcompile.ir.ops import DTYPES
from dcompile.operators import random_ops


def _filled(value: torch.Tensor, number: Any) -> Result:
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    if isinstance(number, LazyTensor):
        source = broadcast(number, shape)
        return make_lazy(
            shape, dtype, lambda body, coords: to_dtype(body, body.trace(source, coords), dtype), (source,)
        )
    if isinstance(number, complex):
        return NotImplemented
    if isinstance(number, Index):
        return make_lazy(shape, dtype, lambda body, _: to_dtype(body, body.index(number), dtype), ())
    return constant(number, shape, dtype)


def _fill(number: int) -> Callable[..., Result]:
    """Make the rule of tensors filled with one number."""
    return lambda _, value, *__, **___: _filled(value, number)


def _given(place: int) -> Callable[..., Result]:
    """Make the rule of tensors filled with the argument at `place`."""
    return lambda _, value, *args, **__: _filled(value, args[place])


_zeros = _fill(0)


def _strided(low: Lowering, value: torch.Tensor, /, *_: Any, **__: Any) -> Result:
    """Leave tensors with gaps or overlapping elements to the library, since no loop can write them."""
    return _zeros(low, value) if is_dense(shape_of(value), strides_of(value)) else NotImplemented


def arithmetic(value: torch.Tensor, start: Size | float, step: Size | float) -> LazyTensor:
    """Return start + n * step, in 64 bits as eager computes it."""
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    whole = DTYPES[dtype] != "float"

    def at(body: Body, coords: Coords) -> Ref:
        if whole:
            return to_dtype(body, body.index(coords[0] * _whole(step) + _whole(start)), dtype)
        count = body.cast(body.index(coords[0]), "float64")
        scaled = body.apply("mul", count, body.const(step, "float64"))
        return to_dtype(body, body.apply("add", scaled, body.const(start, "float64")), dtype)

    return make_lazy(shape, dtype, at, ())


def _whole(number: Size | float) -> Size:
    return number if isinstance(number, Index) else int(number)


def _arange(_: Lowering, value: torch.Tensor, /, end: Size | float, **__: Any) -> LazyTensor:
    return arithmetic(value, 0, 1)


def _arange_start(
    _: Lowering, value: torch.Tensor, /, start: Size | float, end: Size | float, step: Size | float = 1, **__: Any
) -> LazyTensor:
    return arithmetic(value, start, step)


def _iota(_: Lowering, value: torch.Tensor, /, length: Size, *, start: Size, step: Size, **__: Any) -> LazyTensor:
    return replace(arithmetic(value, start, step), ops=0)  # a number of its coordinate: part of the reader's address


_EMPTY = ("empty.memory_format", "new_empty.default", "empty_permuted.default")


Build = Callable[[Body, Callable[[int], Ref]], Ref]
"""From the words of an element's Philox block (by number) to its value."""


def _drawn(ops: int, build_of: Callable[[str, Any], Build | None]) -> Callable[..., Result]:
    """Make the rule of random numbers: `build_of(dtype, how)`, or None where all are True. It needs a key.

    `how` is the operator's argument after the size.
    """

    def rule(
        low: Lowering, value: torch.Tensor, /, size: Any, how: Any, device: Any, key: LazyTensor | None = None,
        draw: int = 0,
    ) -> Result:  # fmt: skip
        shape, dtype = shape_of(value), dtype_name(value.dtype)
        build = build_of(dtype, how)
        if build is None:
            return constant(True, shape, dtype)
        if key is None:
            return NotImplemented
        words = key

        def at(body: Body, coords: Coords) -> Ref:
            position = body.index(flatten(coords, contiguous(shape)))
            source = body.trace(words, (ZERO,))

            def word(number: int) -> Ref:
                return body.apply("philox", source, position, body.const(4 * draw + number, "int64"))

            return build(body, word)

        return make_lazy(shape, dtype, at, (words,), ops=ops, heavy=True)

    return rule


def _uniform(name: str, _: Any) -> Build:
    digits, compute = random_ops.DIGITS[name], opmath(name)

    def build(body: Body, word: Callable[[int], Ref]) -> Ref:
        if digits > 32:
            high = body.apply("and", _unsigned(body, word(1)), body.const((1 << digits - 32) - 1, "int64"))
            whole = body.apply("or", body.apply("shl", high, body.const(32, "int64")), _unsigned(body, word(0)))
        else:
            shifted = body.apply("shr", word(0), body.const(32 - digits, "int32"))
            whole = body.apply("and", shifted, body.const((1 << digits) - 1, "int32"))
        return body.cast(body.apply("mul", body.cast(whole, compute), body.const(2.0**-digits, compute)), name)

    return build


def _unsigned(body: Body, word: Ref) -> Ref:
    return body.apply("and", body.cast(word, "int64"), body.const(random_ops.LOW, "int64"))


def _normal(name: str, _: Any) -> Build:
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

    return build


def _sine(body: Body, x: Ref) -> Ref:
    """Return the sine of |x| <= pi/2, in float32."""
    square = body.apply("mul", x, x)
    total = body.const(-1 / math.factorial(11), "float32")
    for power in (9, 7, 5, 3, 1):
        sign = -1 if power in (3, 7) else 1
        total = body.apply("add", body.apply("mul", total, square), body.const(sign / math.factorial(power), "float32"))
    return body.apply("mul", total, x)


def _less(_: str, p: float) -> Build | None:
    limit = random_ops.threshold(p)
    return None if limit is None else lambda body, word: body.apply("lt", word(0), body.const(limit, "int32"))


def _bits(_: str, count: int) -> Build:
    def build(body: Body, word: Callable[[int], Ref]) -> Ref:
        if count == 32:
            return _unsigned(body, word(0))
        high = body.apply("and", body.cast(word(1), "int64"), body.const(2**31 - 1, "int64"))
        return body.apply("or", body.apply("shl", high, body.const(32, "int64")), _unsigned(body, word(0)))

    return build


RULES: dict[str, Rule] = {
    # uninitialized memory may hold anything: zero is free while it is an expression
    **{f"aten.{name}": Rule(_zeros) for name in _EMPTY},
    "aten.empty_like.default": Rule(_zeros, decomposed=True),
    **{f"aten.{name}.default": Rule(_strided) for name in ("empty_strided", "new_empty_strided")},
    **{f"aten.{name}.default": Rule(_zeros) for name in ("zeros_like", "new_zeros", "_efficientzerotensor")},
    **{f"aten.{name}.default": Rule(_fill(1)) for name in ("ones_like", "new_ones")},
    "aten.zeros.default": Rule(_zeros, decomposed=True),
    "aten.ones.default": Rule(_fill(1), decomposed=True),
    "aten.full.default": Rule(_given(1)),
    "aten.full_like.default": Rule(_given(1)),
    "aten.fill.Scalar": Rule(_given(1)),
    "aten.fill.Tensor": Rule(_given(1)),
    "aten.new_full.default": Rule(_given(2)),
    "aten.scalar_tensor.default": Rule(_given(0)),
    "prims.scalar_tensor.default": Rule(_given(0)),
    "aten.arange.default": Rule(_arange),
    "aten.arange.start": Rule(_arange_start),
    "aten.arange.start_step": Rule(_arange_start),
    "prims.iota.default": Rule(_iota),
    "dcompile_random.uniform.default": Rule(_drawn(6, _uniform)),
    "dcompile_random.normal.default": Rule(_drawn(12, _normal)),
    "dcompile_random.less.default": Rule(_drawn(2, _less)),
    "dcompile_random.bits.default": Rule(_drawn(5, _bits)),
}
"""Without a key these rules do not apply: the operator itself is called, and draws a key."""
