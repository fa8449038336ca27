"""Rules for average, max and adaptive pooling, forward and backward: each result reads its window.

Adaptive pooling has windows of uneven size. Gradients are gathered: every element of the input reads the windows that
contain it, so no two threads write to one address.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from dcompile.codegen.lower.symbolic.strides import Shape, contiguous, is_dense, ranges_of, same_layout, variables
from dcompile.compat.size_expressions import numbers
from dcompile.device_traits import traits_of
from dcompile.ir.index import Index, Size, as_index, as_size, flatten, floordiv, modulo
from dcompile.ir.nodes import Apply, Load, Ref, Store
from dcompile.ir.ops import DTYPES, REDUCTIONS

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


@dataclass(frozen=True, slots=True)
class FixedWindows:
    """Windows of one dimension: `count` elements with distance `dilation`, starting at `o * stride - padding`."""

    size: int
    count: int
    stride: int
    padding: int
    dilation: int
    windows: int = 0
    """Number of windows, for gradients."""

    def start(self, body: Body, o: Index) -> Index:
        """Return the start of window `o`, possibly before the first element."""
        return o * self.stride - self.padding

    def place(self, body: Body, o: Index, offset: Index) -> tuple[Index, Ref | bool]:
        """Return an element of window `o`, and whether it exists."""
        place = self.start(body, o) + offset * self.dilation
        return place, both(body, not_below(body, place, 0), below(body, place, self.size))

    def first(self, body: Body, o: Index) -> Ref:
        """Return the first existing element of window `o`."""
        start = self.start(body, o)
        early = not_below(body, start, 0)
        if isinstance(early, bool):
            return body.index(start if early else modulo(start, self.dilation, body.ranges))
        later = modulo(start + self.padding * self.dilation, self.dilation, body.ranges)
        return body.apply("where", early, body.index(start), body.index(later))

    @property
    def reach(self) -> int:
        """Most windows between whose first and last element one element is."""
        return -(-((self.count - 1) * self.dilation + 1) // self.stride)

    def over(self, body: Body, p: Index, offset: Index) -> tuple[Index, Ref | bool]:
        """Return window number `offset` of those around element `p`, counted backward, and whether it exists.

        It may lack the element: then no maximum of it is there.
        """
        o = floordiv(p + self.padding, self.stride, body.ranges) - offset
        return o, both(body, not_below(body, o, 0), below(body, o, self.windows))


@dataclass(frozen=True, slots=True)
class AdaptiveWindows:
    """`windows` windows that cover `size` elements as evenly as whole numbers allow; neighbours may overlap."""

    size: int
    windows: int

    @property
    def count(self) -> int:
        """Elements of the largest window."""
        return max(-(-(o + 1) * self.size // self.windows) - o * self.size // self.windows for o in range(self.windows))

    def start(self, body: Body, o: Index) -> Index:
        """Return the start of window `o`."""
        return floordiv(o * self.size, self.windows, body.ranges)

    def _end(self, body: Body, o: Index) -> Index:
        return floordiv(o * self.size + (self.size + self.windows - 1), self.windows, body.ranges)

    def first(self, body: Body, o: Index) -> Ref:
        return body.index(self.start(body, o))

    def place(self, body: Body, o: Index, offset: Index) -> tuple[Index, Ref | bool]:
        """Return an element of window `o`, and whether it exists."""
        place, known = self.start(body, o) + offset, offset.constant
        if known is not None and known < max(self.size // self.windows, 1):
            return place, True  # within the smallest window
        return place, _less(body, place, self._end(body, o))

    def elements(self, body: Body, o: Index) -> Ref:
        """Return the number of elements of window `o`."""
        return body.apply("sub", body.index(self._end(body, o)), body.index(self.start(body, o)))

    @property
    def reach(self) -> int:
        """Most windows that contain one element."""
        return AdaptiveWindows(self.windows, self.size).count

    def over(self, body: Body, p: Index, offset: Index) -> tuple[Index, Ref | bool]:
        """Return the window of number `offset` among those that contain element `p`, and whether it exists."""
        return AdaptiveWindows(self.windows, self.size).place(body, p, offset)


Windows = FixedWindows | AdaptiveWindows
PLANE = "windows over a plane"


def _less(body: Body, left: Index, right: Index) -> Ref:
    return body.apply("lt", body.index(left), body.index(right))


def _largest(low: Lowering, values: Sequence[torch.Tensor | None], x: LazyTensor, windows: Sequence[Windows]) -> Result:
    """Return (maximum of each window, its position in the plane); the first of equal elements, and NaN wins."""
    shape = next(shape_of(value) for value in values if value is not None)
    counts = tuple(w.count for w in windows)
    inner = counts if prod(counts) > MAX_WINDOW else ()
    if 0 in shape:
        return NotImplemented
    body, coords = low.body({**ranges_of("i", shape), **ranges_of("j", inner)}), variables("i", shape)
    found = _reduced(body, x, windows, coords, variables("j", inner)) if inner else _chosen(body, x, windows, coords)
    stores: list[Store] = []
    results: list[LazyTensor | None] = []
    for value, ref in zip(values, found, strict=True):
        if value is None:
            results.append(None)
            continue
        dtype, strides = dtype_name(value.dtype), strides_of(value)
        view = low.buffer(shape, dtype, strides if is_dense(shape, strides) else None)
        stores.append(Store(view.buffer, flatten(coords, view.strides), to_dtype(body, ref, dtype)))
        results.append(from_view(view, dtype))
    low.loop(shape, inner, body, stores)
    return tuple(results)


def _chosen(body: Body, x: LazyTensor, windows: Sequence[Windows], coords: Coords) -> tuple[Ref, Ref]:
    """Unroll the search of the maximum over the window."""
    rank, compute, sizes = len(windows), opmath(x.dtype), [w.size for w in windows]
    lead, at = coords[:-rank], coords[-rank:]
    best = body.const(REDUCTIONS["max"].identity(compute), compute)
    where = _flat(body, [w.first(body, o) for w, o in zip(windows, at, strict=True)], sizes)
    for offsets in product(*(range(w.count) for w in windows)):
        places = [w.place(body, o, as_index(n)) for w, o, n in zip(windows, at, offsets, strict=True)]
        place = tuple(p for p, _ in places)
        inside = both(body, *(there for _, there in places))
        if inside is False:
            continue
        element = element_where(body, inside, x, (*lead, *place), compute, REDUCTIONS["max"].identity(compute))
        more = body.apply("gt", element, best)
        if DTYPES[compute] == "float":
            more = body.apply("or", more, body.apply("isnan", element))
        best = body.apply("where", more, element, best)
        where = body.apply("where", more, body.index(flatten(place, _strides(sizes))), where)
    return best, where


def _reduced(body: Body, x: LazyTensor, windows: Sequence[Windows], coords: Coords, offsets: Coords) -> tuple[Ref, Ref]:
    """Search the maximum by a reduction over the window."""
    rank, compute = len(windows), opmath(x.dtype)
    places = [w.place(body, o, n) for w, o, n in zip(windows, coords[-rank:], offsets, strict=True)]
    inside = both(body, *(there for _, there in places))
    place = (*coords[:-rank], *(p for p, _ in places))
    element = element_where(body, inside, x, place, compute, REDUCTIONS["max"].identity(compute))
    number, starts = body.reduce("argmax", element, "int64"), []
    for w, o, step in zip(windows, coords[-rank:], _strides([w.count for w in windows]), strict=True):
        offset = body.apply("floordiv", number, body.const(step, "int64"))
        offset = body.apply("mod", offset, body.const(w.count, "int64"))
        starts.append(body.apply("add", body.index(w.start(body, o)), offset))
    return body.reduce("max", element), _flat(body, starts, [w.size for w in windows])


def _strides(sizes: Sequence[int]) -> list[int]:
    return [prod(sizes[n + 1 :]) for n in range(len(sizes))]


def _flat(body: Body, places: Sequence[Ref], sizes: Sequence[int]) -> Ref:
    total = body.const(0, "int64")
    for place, stride in zip(places, _strides(sizes), strict=True):
        total = body.apply("add", total, body.apply("mul", place, body.const(stride, "int64")))
    return total


def _gathered(
    low: Lowering, value: torch.Tensor, grad: LazyTensor, indices: LazyTensor, windows: Sequence[Windows]
) -> Result:
    """Sum the gradients of the windows whose maximum is each element.

    On GPUs a gradient is read before its position is known: one latency instead of two.
    """
    rank, compute = len(windows), opmath(dtype_name(value.dtype))
    strides, early = _strides([w.size for w in windows]), _on_gpu(value)

    def element(body: Body, coords: Coords, offsets: Coords) -> Ref:
        chosen = [w.over(body, p, n) for w, p, n in zip(windows, coords[-rank:], offsets, strict=True)]
        place, inside = (*coords[:-rank], *(o for o, _ in chosen)), both(body, *(there for _, there in chosen))
        here = flatten(coords[-rank:], strides)
        if not early:
            position = element_where(body, inside, indices, place, "int64", -1)
            return element_where(body, body.apply("eq", position, body.index(here)), grad, place, compute)
        if inside is False:
            return body.const(0, compute)
        with contextlib.nullcontext() if inside is True else body.masked(inside):
            position = body.trace(indices, place)
            given = to_dtype(body, body.trace(grad, place), compute)
        chosen_here = both(body, inside, body.apply("eq", position, body.index(here)))
        return body.apply("where", chosen_here, given, body.const(0, compute))

    counts = tuple(w.reach for w in windows)
    return sum_windows(low, value, counts, (grad, indices), element, lambda body, total, _: total)


def _max_pool(rank: int) -> Callable[..., Any]:
    def rule(
        low: Lowering, values: Any, /, x: LazyTensor, kernel: Any, stride: Any = (), padding: Any = 0,
        dilation: Any = 1, ceil_mode: bool = False,
    ) -> Result:  # fmt: skip
        """Lower max pooling with the maximum's position.

        On CPUs channels-last images stay the library's: its forward is 1.7 times faster there. Its gradient needs no
        search and is ten times faster (64 planes of 112 x 112, one thread).
        """
        if 0 in x.shape or not (_on_gpu(*values) or same_layout(x.shape, x.strides, contiguous(x.shape))):
            return NotImplemented
        windows = _fixed(x.shape[-rank:], kernel, stride, padding, dilation)
        return _largest(low, values, x, windows) if windows else NotImplemented

    return rule


def _max_pool_backward(rank: int) -> Callable[..., Any]:
    def rule(
        low: Lowering, value: torch.Tensor, /, grad: LazyTensor, x: LazyTensor, kernel: Any, stride: Any, padding: Any,
        dilation: Any, ceil_mode: bool, indices: LazyTensor,
    ) -> Result:  # fmt: skip
        """Lower the gradient on GPUs. On CPUs, the library adds to each maximum and reads no window twice."""
        if 0 in grad.shape or not _on_gpu(value):
            return NotImplemented
        windows = _fixed(x.shape[-rank:], kernel, stride, padding, dilation)
        counts = numbers(grad.shape[-rank:], PLANE)
        windows = [replace(w, windows=count) for w, count in zip(windows, counts, strict=False)]
        return _gathered(low, value, grad, indices, windows) if windows else NotImplemented

    return rule


def _on_gpu(*values: torch.Tensor | None) -> bool:
    return any(value is not None and traits_of(value.device.type).many_threads for value in values)


def _fixed(shape: Shape, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[FixedWindows]:
    """Return the windows of each dimension; nothing if they are too large to be unrolled."""
    rank = len(shape)
    kernel = each(kernel, rank)
    settings = (
        numbers(shape, PLANE), kernel, each(stride, rank, kernel), each(padding, rank), each(dilation, rank)
    )  # fmt: skip
    return [FixedWindows(*one) for one in zip(*settings, strict=True)] if prod(kernel) <= MAX_WINDOW else []


def _adaptive_max(rank: int) -> Callable[..., Any]:
    def rule(low: Lowering, values: Any, /, x: LazyTensor, size: Sequence[int]) -> Result:
        if 0 in x.shape or 0 in size or DTYPES[x.dtype] != "float":  # of integers it is an error, which ATen raises
            return NotImplemented
        return _largest(
            low, values, x, [AdaptiveWindows(n, m) for n, m in zip(numbers(x.shape[-rank:], PLANE), size, strict=True)]
        )

    return rule


def _adaptive_max_backward(rank: int) -> Callable[..., Any]:
    def rule(low: Lowering, value: torch.Tensor, /, grad: LazyTensor, x: LazyTensor, indices: LazyTensor) -> Result:
        windows = _windows(x.shape[-rank:], grad.shape[-rank:])
        if windows is None or 0 in grad.shape:
            return constant(0, shape_of(value), dtype_name(value.dtype))
        return _gathered(low, value, grad, indices, windows)

    return rule


def _windows(size: Shape, result: Shape) -> list[AdaptiveWindows] | None:
    """Return the windows of each dimension; None without elements or windows."""
    pairs = zip(numbers(size, PLANE), numbers(result, PLANE), strict=True)
    return None if 0 in (*size, *result) else [AdaptiveWindows(n, m) for n, m in pairs]


def _adaptive_average(rank: int) -> Callable[..., Any]:
    def rule(low: Lowering, value: torch.Tensor, /, x: LazyTensor, size: Sequence[int]) -> Result:
        dtype, windows = dtype_name(value.dtype), _windows(x.shape[-rank:], shape_of(value)[-rank:])
        if windows is None or DTYPES[dtype] != "float":
            return NotImplemented
        compute = opmath(dtype)

        def element(body: Body, coords: Coords, offsets: Coords) -> Ref:
            places = [w.place(body, o, n) for w, o, n in zip(windows, coords[-rank:], offsets, strict=True)]
            inside = both(body, *(there for _, there in places))
            return element_where(body, inside, x, (*coords[:-rank], *(p for p, _ in places)), compute)

        def finish(body: Body, total: Ref, coords: Coords) -> Ref:
            return _shared(body, total, windows, coords[-rank:], compute)

        return sum_windows(low, value, tuple(w.count for w in windows), (x,), element, finish)

    return rule


def _shared(body: Body, ref: Ref, windows: Sequence[AdaptiveWindows], at: Coords, compute: str) -> Ref:
    """Divide by the number of elements of the window at `at`."""
    for w, o in zip(windows, at, strict=True):
        ref = body.apply("div", ref, body.cast(w.elements(body, o), compute))
    return ref


def _adaptive_average_backward(rank: int) -> Callable[..., Any]:
    def rule(low: Lowering, value: torch.Tensor, /, grad: LazyTensor, x: LazyTensor) -> Result:
        windows = _windows(x.shape[-rank:], grad.shape[-rank:])
        if windows is None or 0 in grad.shape:
            return constant(0, shape_of(value), dtype_name(value.dtype))
        compute = opmath(dtype_name(value.dtype))

        def element(body: Body, coords: Coords, offsets: Coords) -> Ref:
            chosen = [w.over(body, p, n) for w, p, n in zip(windows, coords[-rank:], offsets, strict=True)]
            o, inside = tuple(o for o, _ in chosen), both(body, *(there for _, there in chosen))
            given = element_where(body, inside, grad, (*coords[:-rank], *o), compute)
            return _shared(body, given, windows, o, compute)

        counts = tuple(w.reach for w in windows)
        return sum_windows(low, value, counts, (grad,), element, lambda body, total, _: total)

    return rule


def _for_ranks(name: str, rule: Callable[[int], Callable[..., Any]]) -> dict[str, Rule]:
    return {f"aten.{name.format(rank)}.default": Rule(rule(rank), recompute=False) for rank in (2, 3)}


RULES: dict[str, Rule] = {
    "aten.avg_pool2d.default": Rule(_average(2), recompute=False),
    "aten.avg_pool3d.default": Rule(_average(3), recompute=False),
    "aten.avg_pool2d_backward.default": Rule(_average_backward(2), recompute=False),
    "aten.avg_pool3d_backward.default": Rule(_average_backward(3), recompute=False),
    **_for_ranks("max_pool{}d_with_indices", _max_pool),
    **_for_ranks("max_pool{}d_with_indices_backward", _max_pool_backward),
    **_for_ranks("adaptive_max_pool{}d", _adaptive_max),
    **_for_ranks("adaptive_max_pool{}d_backward", _adaptive_max_backward),
    **_for_ranks("_adaptive_avg_pool{}d", _adaptive_average),
    **_for_ranks("_adaptive_avg_pool{}d_backward", _adaptive_average_backward),
}
