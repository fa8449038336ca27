"""Rules for the largest element of each window, and for windows of uneven size, forward and backward.

Gradients are gathered: every element of the input looks at the windows that hold it, so no two threads meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch

from dcompile.codegen.lower.body import Body, Coords
from dcompile.codegen.lower.graph import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.indices import contiguous, is_dense, ranges_of, same_layout, variables
from dcompile.codegen.lower.pointwise import to_dtype
from dcompile.codegen.lower.pooling import MAX_WINDOW, each, element_where
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.shapes import below, both, not_below
from dcompile.codegen.lower.tensor import T, computed, from_view
from dcompile.ir.index import Index, as_index, flatten, floordiv, modulo
from dcompile.ir.nodes import Ref, Store
from dcompile.ir.ops import DTYPES, REDUCTIONS


@dataclass(frozen=True, slots=True)
class Fixed:
    """Windows of one dimension: `count` elements, `dilation` apart, that begin at `o * stride - padding`."""

    size: int
    count: int
    stride: int
    padding: int
    dilation: int

    def places(self, body: Body, o: Index) -> list[tuple[Index, Ref | bool]]:
        """Where the elements of window `o` lie, and whether they are there."""
        found = []
        for number in range(self.count):
            place = o * self.stride + (number * self.dilation - self.padding)
            found.append((place, both(body, not_below(body, place, 0), below(body, place, self.size))))
        return found

    def first(self, body: Body, o: Index) -> Ref:
        """The first element that is there."""
        start = o * self.stride - self.padding
        early = not_below(body, start, 0)
        if isinstance(early, bool):
            return body.index(start if early else modulo(start, self.dilation, body.ranges))
        later = modulo(start + self.padding * self.dilation, self.dilation, body.ranges)
        return body.apply("where", early, body.index(start), body.index(later))


@dataclass(frozen=True, slots=True)
class Adaptive:
    """`windows` windows that cover `size` elements as evenly as whole numbers allow; neighbours may overlap."""

    size: int
    windows: int

    @property
    def count(self) -> int:
        """Elements of the largest window."""
        return max(-(-(o + 1) * self.size // self.windows) - o * self.size // self.windows for o in range(self.windows))

    def _start(self, body: Body, o: Index) -> Index:
        return floordiv(o * self.size, self.windows, body.ranges)

    def _end(self, body: Body, o: Index) -> Index:
        return floordiv(o * self.size + (self.size + self.windows - 1), self.windows, body.ranges)

    def places(self, body: Body, o: Index) -> list[tuple[Index, Ref | bool]]:
        start, end = self._start(body, o), self._end(body, o)
        smallest = self.size // self.windows
        return [(start + n, True if n < smallest else _less(body, start + n, end)) for n in range(self.count)]

    def first(self, body: Body, o: Index) -> Ref:
        return body.index(self._start(body, o))

    def elements(self, body: Body, o: Index) -> Ref:
        """How many elements window `o` has."""
        return body.apply("sub", body.index(self._end(body, o)), body.index(self._start(body, o)))

    def over(self, body: Body, p: Index, windows: int) -> list[tuple[Index, Ref | bool]]:
        """The windows that hold element `p`, the first first, and whether they are there."""
        first = floordiv(p * windows, self.size, body.ranges)
        last = floordiv(p * windows + (windows + self.size - 1), self.size, body.ranges)
        ends = range(self.size)
        reach = max(-(-(n + 1) * windows // self.size) - n * windows // self.size for n in ends)
        return [(first + n, True if n == 0 else _less(body, first + n, last)) for n in range(reach)]


Windows = Fixed | Adaptive


def _less(body: Body, left: Index, right: Index) -> Ref:
    return body.apply("lt", body.index(left), body.index(right))


def _largest(low: Lowering, values: Sequence[torch.Tensor | None], x: T, windows: Sequence[Windows]) -> Result:
    """(largest element of each window, its position in the plane): the first of equals, and NaN wins."""
    shapes = [shape_of(value) for value in values if value is not None]
    if not shapes or 0 in shapes[0] or prod(w.count for w in windows) > MAX_WINDOW:
        return NotImplemented
    rank, shape, compute = len(windows), shapes[0], opmath(x.dtype)
    body, coords = low.body(ranges_of("i", shape)), variables("i", shape)
    lead, at = coords[:-rank], coords[-rank:]
    best = body.const(REDUCTIONS["max"].identity(compute), compute)
    where = _flat(body, [w.first(body, o) for w, o in zip(windows, at, strict=True)], [w.size for w in windows])
    for places in product(*(w.places(body, o) for w, o in zip(windows, at, strict=True))):
        place = tuple(p for p, _ in places)
        inside = both(body, *(there for _, there in places))
        if inside is False:
            continue
        element = element_where(body, inside, x, (*lead, *place), compute, REDUCTIONS["max"].identity(compute))
        more = body.apply("gt", element, best)
        if DTYPES[compute] == "float":
            more = body.apply("or", more, body.apply("isnan", element))
        best = body.apply("where", more, element, best)
        flat = flatten(place, _strides([w.size for w in windows]))
        where = body.apply("where", more, body.index(flat), where)
    stores: list[Store] = []
    results: list[T | None] = []
    for value, ref in zip(values, (best, where), strict=True):
        if value is None:
            results.append(None)
            continue
        dtype, strides = dtype_name(value.dtype), tuple(int(stride) for stride in value.stride())
        view = low.buffer(shape, dtype, strides if is_dense(shape, strides) else None)
        stores.append(Store(view.buffer, flatten(coords, view.strides), to_dtype(body, ref, dtype)))
        results.append(from_view(view, dtype))
    low.loop(shape, (), body, stores)
    return tuple(results)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [prod(sizes[n + 1 :]) for n in range(len(sizes))]


def _flat(body: Body, places: Sequence[Ref], sizes: Sequence[int]) -> Ref:
    total = body.const(0, "int64")
    for place, stride in zip(places, _strides(sizes), strict=True):
        total = body.apply("add", total, body.apply("mul", place, body.const(stride, "int64")))
    return total


def _gathered(value: torch.Tensor, grad: T, indices: T, windows: Sequence[Adaptive]) -> Result:
    """The gradients of the windows that chose each element."""
    shape, dtype, rank = shape_of(value), dtype_name(value.dtype), len(windows)
    if 0 in grad.shape or 0 in shape:
        return NotImplemented
    compute, strides = opmath(dtype), _strides(shape[-rank:])

    def at(body: Body, coords: Coords) -> Ref:
        total = body.const(0, compute)
        here = body.index(flatten(coords[-rank:], strides))
        spaces = zip(windows, coords[-rank:], grad.shape[-rank:], strict=True)
        for chosen in product(*(w.over(body, p, count) for w, p, count in spaces)):
            place = (*coords[:-rank], *(o for o, _ in chosen))
            inside = both(body, *(there for _, there in chosen))
            if inside is False:
                continue
            position = element_where(body, inside, indices, place, "int64", -1)
            hit = both(body, inside, body.apply("eq", position, here))
            total = body.apply("add", total, element_where(body, hit, grad, place, compute, 0))
        return to_dtype(body, total, dtype)

    return computed(shape, dtype, at, (grad, indices), ops=8, heavy=True)


def _max_pool(rank: int) -> Callable[..., Any]:
    def rule(
        low: Lowering, values: Any, /, x: T, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Result:  # fmt: skip
        """Where a channel's plane is one block; the library is 1.7 times faster where channels are neighbours, and ten
        times faster at the gradient, for which it needs no search (64 planes of 112 x 112, one thread)."""
        if 0 in x.shape or not same_layout(x.shape, x.strides, contiguous(x.shape)):
            return NotImplemented
        kernel = each(kernel, rank)
        settings = (x.shape[-rank:], kernel, each(stride, rank, kernel), each(padding, rank), each(dilation, rank))
        return _largest(low, values, x, [Fixed(*one) for one in zip(*settings, strict=True)])

    return rule


def _adaptive_max(rank: int) -> Callable[..., Any]:
    def rule(low: Lowering, values: Any, /, x: T, size: Sequence[int]) -> Result:
        if 0 in x.shape or 0 in size:
            return NotImplemented
        return _largest(low, values, x, [Adaptive(n, m) for n, m in zip(x.shape[-rank:], size, strict=True)])

    return rule


def _adaptive_max_backward(rank: int) -> Callable[..., Any]:
    def rule(low: Lowering, value: torch.Tensor, /, grad: T, x: T, indices: T) -> Result:
        pairs = zip(x.shape[-rank:], grad.shape[-rank:], strict=True)
        windows = [Adaptive(n, m) for n, m in pairs if n and m]
        return _gathered(value, grad, indices, windows) if len(windows) == rank else NotImplemented

    return rule


def _adaptive_average(rank: int) -> Callable[..., Any]:
    def rule(low: Lowering, value: torch.Tensor, /, x: T, size: Sequence[int]) -> Result:
        shape, dtype = shape_of(value), dtype_name(value.dtype)
        if 0 in x.shape or 0 in shape or DTYPES[dtype] != "float":
            return NotImplemented
        windows = [Adaptive(n, m) for n, m in zip(x.shape[-rank:], shape[-rank:], strict=True)]
        if prod(w.count for w in windows) > MAX_WINDOW:
            return NotImplemented
        compute = opmath(dtype)

        def at(body: Body, coords: Coords) -> Ref:
            total: Ref | None = None
            for places in product(*(w.places(body, o) for w, o in zip(windows, coords[-rank:], strict=True))):
                inside = both(body, *(there for _, there in places))
                place = (*coords[:-rank], *(p for p, _ in places))
                given = element_where(body, inside, x, place, compute, 0)
                total = given if total is None else body.apply("add", total, given)
            assert total is not None, "a window without elements"
            return to_dtype(body, _shared(body, total, windows, coords[-rank:], compute), dtype)

        return computed(shape, dtype, at, (x,), ops=3 * prod(w.count for w in windows), heavy=True)

    return rule


def _shared(body: Body, ref: Ref, windows: Sequence[Adaptive], at: Coords, compute: str) -> Ref:
    """Divided by the number of elements of the window at `at`."""
    for w, o in zip(windows, at, strict=True):
        ref = body.apply("div", ref, body.cast(w.elements(body, o), compute))
    return ref


def _adaptive_average_backward(rank: int) -> Callable[..., Any]:
    def rule(low: Lowering, value: torch.Tensor, /, grad: T, x: T) -> Result:
        shape, dtype = shape_of(value), dtype_name(value.dtype)
        if 0 in grad.shape or 0 in shape:
            return NotImplemented
        compute = opmath(dtype)
        windows = [Adaptive(n, m) for n, m in zip(shape[-rank:], grad.shape[-rank:], strict=True)]

        def at(body: Body, coords: Coords) -> Ref:
            total = body.const(0, compute)
            spaces = zip(windows, coords[-rank:], grad.shape[-rank:], strict=True)
            for chosen in product(*(w.over(body, p, count) for w, p, count in spaces)):
                o = tuple(as_index(o) for o, _ in chosen)
                inside = both(body, *(there for _, there in chosen))
                given = element_where(body, inside, grad, (*coords[:-rank], *o), compute, 0)
                total = body.apply("add", total, _shared(body, given, windows, o, compute))
            return to_dtype(body, total, dtype)

        return computed(shape, dtype, at, (grad,), ops=8, heavy=True)

    return rule


def _for_ranks(name: str, rule: Callable[[int], Callable[..., Any]]) -> dict[str, Rule]:
    return {f"aten.{name.format(rank)}.default": Rule(rule(rank)) for rank in (2, 3)}


RULES: dict[str, Rule] = {
    **_for_ranks("max_pool{}d_with_indices", _max_pool),
    **_for_ranks("adaptive_max_pool{}d", _adaptive_max),
    **_for_ranks("adaptive_max_pool{}d_backward", _adaptive_max_backward),
    **_for_ranks("_adaptive_avg_pool{}d", _adaptive_average),
    **_for_ranks("_adaptive_avg_pool{}d_backward", _adaptive_average_backward),
}
