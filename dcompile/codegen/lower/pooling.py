"""Rules for averages over windows: every element of the result reads its window, every gradient the windows over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import torch

from dcompile.codegen.lower.body import Body, Coords
from dcompile.codegen.lower.graph import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.pointwise import to_dtype
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.shapes import below, both, not_below
from dcompile.codegen.lower.tensor import T, computed
from dcompile.ir.index import Index, floordiv, modulo
from dcompile.ir.nodes import Ref
from dcompile.ir.ops import DTYPES

MAX_WINDOW = 27
"""Elements of a window that are written out one by one (3 x 3 x 3); larger windows are left to the library."""


def each(value: Any, rank: int, default: Sequence[int] | None = None) -> tuple[int, ...]:
    """One number for each dimension; one given stands for all."""
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    if not given and default is not None:
        return tuple(default)
    return tuple(given) * rank if len(given) == 1 else tuple(given)


def _clamped(body: Body, index: Index, low: int, high: int) -> Ref:
    ref = body.apply("max", body.index(index), body.const(low, "int64"))
    return body.apply("min", ref, body.const(high, "int64"))


class _Window:
    """kernel, stride and padding along each of the last dimensions, and how many elements an average counts."""

    def __init__(self, size: tuple[int, ...], kernel: Any, stride: Any, padding: Any, include: bool, by: Any) -> None:
        rank = len(size)
        self.size = size
        self.kernel = each(kernel, rank)
        self.stride = each(stride, rank, self.kernel)
        self.padding = each(padding, rank)
        self.include, self.by = include, by

    def divisor(self, body: Body, at: Coords, compute: str) -> Ref:
        """How many elements the window at `at` counts."""
        if self.by is not None:
            return body.const(self.by, compute)
        total = body.const(1, "int64")
        for c, size, kernel, stride, pad in zip(at, self.size, self.kernel, self.stride, self.padding, strict=True):
            start = c * stride - pad
            if self.include:
                end = body.apply("min", body.index(start + kernel), body.const(size + pad, "int64"))
                count = body.apply("sub", end, body.index(start))
            else:
                count = body.apply("sub", _clamped(body, start + kernel, 0, size), _clamped(body, start, 0, size))
            # at places outside, which are masked, nothing is to be divided by 0
            total = body.apply("mul", total, body.apply("max", count, body.const(1, "int64")))
        return body.cast(total, compute)


def _average(rank: int) -> Callable[..., Any]:
    def rule(
        low: Lowering, value: torch.Tensor, /, x: T, kernel: Any, stride: Any = (), padding: Any = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Result:  # fmt: skip
        shape, dtype = shape_of(value), dtype_name(value.dtype)
        window = _Window(x.shape[-rank:], kernel, stride, padding, count_include_pad, divisor_override)
        if prod(window.kernel) > MAX_WINDOW or DTYPES[dtype] != "float":
            return NotImplemented
        compute = opmath(dtype)

        def at(body: Body, coords: Coords) -> Ref:
            total = body.const(0, compute)
            for offsets in product(*map(range, window.kernel)):
                place = tuple(
                    c * stride - pad + offset
                    for c, stride, pad, offset in zip(
                        coords[-rank:], window.stride, window.padding, offsets, strict=True
                    )
                )
                inside = [f(body, p, n) for p, size in zip(place, window.size, strict=True)
                          for f, n in ((not_below, 0), (below, size))]  # fmt: skip
                given = element_where(body, both(body, *inside), x, (*coords[:-rank], *place), compute)
                total = given if offsets == (0,) * rank else body.apply("add", total, given)
            return to_dtype(body, body.apply("div", total, window.divisor(body, coords[-rank:], compute)), dtype)

        return computed(shape, dtype, at, (x,), ops=prod(window.kernel) * 3, heavy=True)

    return rule


def element_where(body: Body, inside: Ref | bool, x: T, place: Coords, compute: str, other: float = 0) -> Ref:
    """The element in the compute dtype, `other` outside."""
    if isinstance(inside, bool):
        return to_dtype(body, body.trace(x, place), compute) if inside else body.const(other, compute)
    with body.masked(inside):
        element = to_dtype(body, body.trace(x, place), compute)
    return body.apply("where", inside, element, body.const(other, compute))


def _average_backward(rank: int) -> Callable[..., Any]:
    def rule(
        low: Lowering, value: torch.Tensor, /, grad: T, x: T, kernel: Any, stride: Any, padding: Any,
        ceil_mode: bool, count_include_pad: bool, divisor_override: int | None,
    ) -> Result:  # fmt: skip
        shape, dtype = shape_of(value), dtype_name(value.dtype)
        window = _Window(x.shape[-rank:], kernel, stride, padding, count_include_pad, divisor_override)
        reach = tuple(-(-k // s) for k, s in zip(window.kernel, window.stride, strict=True))
        if prod(reach) > MAX_WINDOW or DTYPES[dtype] != "float" or 0 in grad.shape:
            return NotImplemented
        compute = opmath(dtype)

        def at(body: Body, coords: Coords) -> Ref:
            """The windows over an element start at (c + pad) // stride and go back."""
            total = body.const(0, compute)
            for back in product(*map(range, reach)):
                place, inside = [], []
                for c, size, k, s, pad, b in zip(
                    coords[-rank:], grad.shape[-rank:], window.kernel, window.stride, window.padding, back, strict=True
                ):
                    start = floordiv(c + pad, s, body.ranges) - b
                    within = modulo(c + pad, s, body.ranges) + b * s
                    place.append(start)
                    inside += [not_below(body, start, 0), below(body, start, size), below(body, within, k)]
                covered = both(body, *inside)
                given = element_where(body, covered, grad, (*coords[:-rank], *place), compute)
                share = body.apply("div", given, window.divisor(body, tuple(place), compute))
                total = body.apply("add", total, share)
            return to_dtype(body, total, dtype)

        return computed(shape, dtype, at, (grad,), ops=prod(reach) * 6, heavy=True)

    return rule


RULES: dict[str, Rule] = {
    "aten.avg_pool2d.default": Rule(_average(2)),
    "aten.avg_pool3d.default": Rule(_average(3)),
    "aten.avg_pool2d_backward.default": Rule(_average_backward(2)),
    "aten.avg_pool3d_backward.default": Rule(_average_backward(3)),
}
