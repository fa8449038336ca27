"""Rules for average pooling: each result reads its window, each gradient the windows that contain its element."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of, strides_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, constant, from_view, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.concat import below, both, not_below
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.symbolic.strides import Shape, is_dense, ranges_of, variables
from dcompile.ir.index import Index, Size, as_index, as_size, flatten, floordiv, modulo
from dcompile.ir.nodes import Apply, Load, Ref, Store
from dcompile.ir.ops import DTYPES

MAX_WINDOW = 27
"""Elements of a window that are unrolled (3 x 3 x 3); larger windows are reductions in a loop."""


def each(value: Any, rank: int, default: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return one number for each dimension; a single one applies to all."""
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    if not given and default is not None:
        return tuple(default)
    return tuple(given) * rank if len(given) == 1 else tuple(given)


def _clamped(body: Body, index: Index, low: int, high: Size) -> Ref:
    """Limit an index to [low, high], by as few operations as its range needs."""
    ref = body.index(index)
    if not_below(body, index, low) is not True:
        ref = body.apply("max", ref, body.const(low, "int64"))
    if below(body, index, as_size(high + 1)) is not True:
        ref = body.apply("min", ref, body.const(high, "int64"))
    return ref


class _Window:
    """Kernel, stride and padding along each of the last dimensions, and the divisor of an average."""

    def __init__(self, size: Shape, kernel: Any, stride: Any, padding: Any, include: bool, by: Any) -> None:
        rank = len(size)
        self.size = size
        self.kernel = each(kernel, rank)
        self.stride = each(stride, rank, self.kernel)
        self.padding = each(padding, rank)
        self.include, self.by = include, by

    def divisor(self, body: Body, at: Coords, compute: str) -> Ref:
        """Return the number of elements that the window at `at` counts."""
        if self.by is not None:
            return body.const(self.by, compute)
        total = body.const(1, "int64")
        for count in self._counts(body, at):
            total = body.apply("mul", total, count)
        return body.cast(total, compute)

    def share(self, body: Body, at: Coords, compute: str) -> Ref:
        """Return the reciprocal of the divisor, as a product of one for each dimension: up to two roundings off."""
        if self.by is not None:
            return body.const(1 / self.by, compute)
        parts = [body.apply("div", body.const(1, compute), body.cast(n, compute)) for n in self._counts(body, at)]
        return functools.reduce(lambda left, right: body.apply("mul", left, right), parts)

    def _counts(self, body: Body, at: Coords) -> list[Ref]:
        """Return the elements that a window counts along each dimension; at least 1, also outside of the plane."""
        counts = []
        for c, size, kernel, stride, pad in zip(at, self.size, self.kernel, self.stride, self.padding, strict=True):
            start = c * stride - pad
            if self.include:
                end = _clamped(body, start + kernel, 0, as_size(size + pad))
                count = body.apply("sub", end, body.index(start))
            else:
                count = body.apply("sub", _clamped(body, start + kernel, 0, size), _clamped(body, start, 0, size))
            # positions outside are masked, but must not divide by 0
            counts.append(body.apply("max", count, body.const(1, "int64")))
        return counts


def _average(rank: int) -> Callable[..., Any]:
    def rule(
        low: Lowering, value: torch.Tensor, /, x: LazyTensor, kernel: Any, stride: Any = (), padding: Any = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Result:  # fmt: skip
        if divisor_override == 0:
            return NotImplemented  # the library raises the error
        window = _Window(x.shape[-rank:], kernel, stride, padding, count_include_pad, divisor_override)
        compute = opmath(dtype_name(value.dtype))
        division = "div" if DTYPES[compute] == "float" else "truncdiv"

        def element(body: Body, coords: Coords, offsets: Coords) -> Ref:
            steps = zip(coords[-rank:], window.stride, window.padding, offsets, strict=True)
            place = tuple(c * stride - pad + offset for c, stride, pad, offset in steps)
            inside = [f(body, p, n) for p, size in zip(place, window.size, strict=True)
                      for f, n in ((not_below, 0), (below, size))]  # fmt: skip
            return element_where(body, both(body, *inside), x, (*coords[:-rank], *place), compute)

        def finish(body: Body, total: Ref, coords: Coords) -> Ref:
            return body.apply(division, total, window.divisor(body, coords[-rank:], compute))

        return sum_windows(low, value, window.kernel, (x,), element, finish)

    return rule


def sum_windows(
    low: Lowering,
    value: torch.Tensor,
    counts: tuple[int, ...],
    args: tuple[LazyTensor, ...],
    element: Callable[[Body, Coords, Coords], Ref],
    finish: Callable[[Body, Ref, Coords], Ref],
) -> LazyTensor:
    """Sum `element(body, coordinates, offsets)` over all offsets below `counts`, in the compute dtype.

    A few terms are unrolled at the uses of the sum; many become a reduction in a loop of its own.
    """
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    if prod(counts) <= MAX_WINDOW or 0 in shape:

        def at(body: Body, coords: Coords) -> Ref:
            total: Ref | None = None
            for offsets in product(*map(range, counts)):
                given = element(body, coords, tuple(map(as_index, offsets)))
                total = given if total is None else body.apply("add", total, given)
            total = body.const(0, opmath(dtype)) if total is None else total
            return to_dtype(body, finish(body, total, coords), dtype)

        return make_lazy(shape, dtype, at, args, ops=3 * prod(counts), heavy=True)
    body, coords = low.body({**ranges_of("i", shape), **ranges_of("j", counts)}), variables("i", shape)
    total = body.reduce("sum", element(body, coords, variables("j", counts)))
    strides = strides_of(value)
    view = low.buffer(shape, dtype, strides if is_dense(shape, strides) else None)
    result = to_dtype(body, finish(body, total, coords), dtype)
    low.loop(shape, counts, body, [Store(view.buffer, flatten(coords, view.strides), result)])
    return from_view(view, dtype)


def element_where(body: Body, inside: Ref | bool, x: LazyTensor, place: Coords, compute: str, other: float = 0) -> Ref:
    """Return the element in the compute dtype, and `other` outside."""
    if isinstance(inside, bool):
        return to_dtype(body, body.trace(x, place), compute) if inside else body.const(other, compute)
    with body.masked(inside):
        element = to_dtype(body, body.trace(x, place), compute)
    if other == 0 and _is_masked_load(body, element):
        return element
    return body.apply("where", inside, element, body.const(other, compute))


def _is_masked_load(body: Body, ref: Ref) -> bool:
    """Is a value loaded under a mask, and so 0 where it does not hold, and converted at most?"""
    value = body.values[ref]
    if isinstance(value, Apply) and value.op == "cast":
        value = body.values[value.args[0]]
    return isinstance(value, Load) and value.mask is not None


def _average_backward(rank: int) -> Callable[..., Any]:
    def rule(
        low: Lowering, value: torch.Tensor, /, grad: LazyTensor, x: LazyTensor, kernel: Any, stride: Any, padding: Any,
        ceil_mode: bool, count_include_pad: bool, divisor_override: int | None,
    ) -> Result:  # fmt: skip
        dtype = dtype_name(value.dtype)
        window = _Window(x.shape[-rank:], kernel, stride, padding, count_include_pad, divisor_override)
        reach = tuple(-(-k // s) for k, s in zip(window.kernel, window.stride, strict=True))
        compute = opmath(dtype)
        if 0 in grad.shape or DTYPES[dtype] != "float":
            return constant(0, shape_of(value), dtype) if 0 in grad.shape else NotImplemented

        def element(body: Body, coords: Coords, back: Coords) -> Ref:
            """Read a window that contains an element; these start at (c + pad) // stride and go backward."""
            place, inside = [], []
            for c, size, k, s, pad, b in zip(
                coords[-rank:], grad.shape[-rank:], window.kernel, window.stride, window.padding, back, strict=True
            ):
                start = floordiv(c + pad, s, body.ranges) - b
                within = modulo(c + pad, s, body.ranges) + b * s
                place.append(start)
                inside += [not_below(body, start, 0), below(body, start, size), below(body, within, k)]
            given = element_where(body, both(body, *inside), grad, (*coords[:-rank], *place), compute)
            if dtype != compute:  # rounding to 16 bits hides that of a reciprocal
                return body.apply("mul", given, window.share(body, tuple(place), compute))
            return body.apply("div", given, window.divisor(body, tuple(place), compute))

        return sum_windows(low, value, reach, (grad,), element, lambda body, total, _: total)

    return rule


RULES: dict[str, Rule] = {
    "aten.avg_pool2d.default": Rule(_average(2), recompute=False),
    "aten.avg_pool3d.default": Rule(_average(3), recompute=False),
    "aten.avg_pool2d_backward.default": Rule(_average_backward(2), recompute=False),
    "aten.avg_pool3d_backward.default": Rule(_average_backward(3), recompute=False),
}
