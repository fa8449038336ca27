"""Rules that read or write at positions computed at run time.

CPU loops check the positions that they read by, or collect at in buffers of their own, one by one at their use. An
invalid one is replaced by the first position. On GPUs, and where the size is symbolic, a separate pass checks all
positions before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, shape_of
from dcompile.codegen.lower.lazy_tensor import (
    LazyTensor,
    broadcast,
    broadcast_shape,
    constant,
    from_view,
    is_within,
    make_lazy,
)
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule
from dcompile.codegen.lower.rules.views import reshape
from dcompile.codegen.lower.symbolic.strides import Shape
from dcompile.ir.index import Index, Size, as_size, size_product, typical
from dcompile.ir.nodes import Ref
from dcompile.ir.ops import DTYPES

CHECK = "dcompile.check_bounds"
"""check_bounds(positions, low, high) -> positions: raises IndexError unless low <= position < high for all of them.

It returns its argument, so that readers of these positions depend on the check.
"""


MAX_PICKED_FRACTION = 8
"""Divisor: picking less than 1/8 of a tensor's elements is no reason to store it."""


def check_positions(low: Lowering, positions: LazyTensor, size: Size, *, wrap: bool) -> LazyTensor:
    """Return `positions` within [0, size) (with `wrap` from -size), known by their form or checked at run time."""
    lowest = as_size(size * -1) if wrap else 0
    if 0 in positions.shape or is_within(positions, lowest, size):
        return positions
    if not positions.reads:  # also a single CPU number: the checked copy is read by loops of this device
        positions = replace(positions, device=low.device)
    stored = low.memory(positions)
    assert stored.view is not None
    key = (stored.view, lowest, size)
    if key not in low.checked:
        out = low.buffer(stored.shape, stored.dtype, stored.view.strides, f"{stored.view.buffer}_checked")
        low.extern(CHECK, [stored.view, lowest, size], [out.buffer], effect=True)
        low.checked[key] = from_view(out, stored.dtype)
    return low.checked[key]


@dataclass(frozen=True, slots=True)
class IndexPositions:
    """Positions along a dimension of `size` elements; with `wrap`, negative ones count from the end.

    With `check`, they may be out of range, and the loop that uses them checks.
    """

    positions: LazyTensor
    size: Size
    wrap: bool
    check: bool

    def at(self, body: Body, coords: Coords) -> Index:
        """Return the run-time index at `coords`."""
        return position(body, self.positions, coords, self.size, wrap=self.wrap, check=self.check)


def places(low: Lowering, positions: LazyTensor, size: Size, *, wrap: bool) -> IndexPositions:
    """Return positions to read by, or to collect at, checked inside the loop where possible.

    A separate pass over 2 million of them, which copies them, took as long as reading. A scatter of as many took half
    the time without it.
    """
    lowest = as_size(size * -1) if wrap else 0
    known = isinstance(size, int) and size > 0
    in_loop = (low.traits.checks_positions and known) or (low.positions_in_loops and size != 0)
    in_loop = in_loop and 0 not in positions.shape
    if in_loop and not is_within(positions, lowest, size):
        return IndexPositions(positions, size, wrap, check=True)
    return IndexPositions(check_positions(low, positions, size, wrap=wrap), size, wrap, check=False)


def position(
    body: Body, positions: LazyTensor, coords: Coords, size: Size, *, wrap: bool, check: bool = False
) -> Index:
    """Return the run-time index at `coords`; with `wrap`, negative ones count from the end."""
    ref = body.cast(body.trace(positions, coords), "int64")
    if check:
        if body.mask is not None:  # positions of masked loads need no check
            ref = body.apply("where", body.mask, ref, body.const(0, "int64"))
        lowest = as_size(size * -1) if wrap else 0
        ref = body.apply("within", ref, body.const(lowest, "int64"), body.const(size, "int64"))
    if wrap and not is_within(positions, 0, size):
        negative = body.apply("lt", ref, body.const(0, "int64"))
        ref = body.apply("where", negative, body.apply("add", ref, body.const(size, "int64")), ref)
    return body.as_index(ref, size)


def picks_few(low: Lowering, x: LazyTensor, count: Size) -> bool:
    """Are `count` elements of `x` so few that recomputing them is better than storing all of `x`?

    A cross-entropy picks one logit of a row that other users compute without storing it.
    """
    return typical(count) * MAX_PICKED_FRACTION <= typical(x.numel) and not x.sources & low.overwritten


def _embedding(low: Lowering, value: torch.Tensor, /, weight: LazyTensor, indices: LazyTensor, *_: Any) -> LazyTensor:
    seen = places(low, indices, weight.shape[0], wrap=False)

    def at(body: Body, coords: Coords) -> Ref:
        return body.trace(weight, (seen.at(body, coords[:-1]), coords[-1]))

    return make_lazy(shape_of(value), weight.dtype, at, (weight, seen.positions), ops=0)


def _gather(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, index: LazyTensor, **_: Any) -> Result:
    shape = index.shape
    x, index = (t if t.shape else reshape(t, (1,)) for t in (x, index))
    dim %= len(x.shape)
    seen = places(low, index, x.shape[dim], wrap=False)

    few = picks_few(low, x, index.numel)

    def at(body: Body, coords: Coords) -> Ref:
        where = seen.at(body, coords)
        with body.computing_anew(few):
            return body.trace(x, (*coords[:dim], where, *coords[dim + 1 :]))

    picked = make_lazy(index.shape, x.dtype, at, (x, seen.positions), ops=0)
    return reshape(replace(picked, reads=picked.sources) if few else picked, shape)


def _index_select(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, index: LazyTensor) -> Result:
    shape = shape_of(value)
    x, index = (t if t.shape else reshape(t, (1,)) for t in (x, index))
    dim %= len(x.shape)
    seen = places(low, index, x.shape[dim], wrap=False)

    def at(body: Body, coords: Coords) -> Ref:
        where = seen.at(body, (coords[dim],))
        return body.trace(x, (*coords[:dim], where, *coords[dim + 1 :]))

    chosen = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    return reshape(make_lazy(chosen, x.dtype, at, (x, seen.positions), ops=0), shape)


@dataclass(frozen=True, slots=True)
class IndexedSpace:
    """The space of x[indices]: its shape, and the position in x of each element.

    The dimensions `found` of x have positions known at run time only. They depend on the `rank` dimensions of this
    space from `start` on, and on no other; the remaining dimensions are equal in both, in order.
    """

    shape: Shape
    place: Callable[[Body, Coords], Coords]
    found: tuple[int, ...]
    start: int
    rank: int


def indexed_space(
    low: Lowering, x: LazyTensor, indices: Sequence[LazyTensor | None], *, check: bool = True, on_the_way: bool = False
) -> IndexedSpace:
    """Return the space of x[a, :, b]: index tensors broadcast together; their dimensions come first unless adjacent.

    Without `check`, the caller ensures that no position is out of range. With `on_the_way`, the loop may check while it
    runs: readers may, and writers of memory that nobody else has seen.
    """
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dims = [dim for dim, _ in given]
    shapes = [index.shape for _, index in given]
    common = broadcast_shape(shapes)
    start = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    others = tuple(size for dim, size in enumerate(x.shape) if dim not in dims)
    rank = len(common)
    seen: dict[int, IndexPositions] = {}
    for dim, index in given:
        found = IndexPositions(index, x.shape[dim], wrap=True, check=False)
        if check and on_the_way:
            found = places(low, index, x.shape[dim], wrap=True)
        elif check:
            found = replace(found, positions=check_positions(low, index, x.shape[dim], wrap=True))
        seen[dim] = replace(found, positions=broadcast(found.positions, common))

    def place(body: Body, coords: Coords) -> Coords:
        middle, rest = coords[start : start + rank], iter((*coords[:start], *coords[start + rank :]))
        return tuple(seen[dim].at(body, middle) if dim in seen else next(rest) for dim in range(len(x.shape)))

    return IndexedSpace((*others[:start], *common, *others[start:]), place, tuple(dims), start, rank)


def indexed_shape(x: LazyTensor, indices: Sequence[LazyTensor | None]) -> Shape:
    """Return the sizes of x[indices], in any order."""
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    common = broadcast_shape([index.shape for index in given.values()])
    return (*common, *(size for dim, size in enumerate(x.shape) if dim not in given))


def every_place(shape: Shape, place: Callable[[Body, Coords], Coords]) -> IndexedSpace:
    """Return a space with the dimensions of x, where each position may depend on all of them."""
    return IndexedSpace(shape, place, tuple(range(len(shape))), 0, len(shape))


def _index(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, indices: Sequence[LazyTensor | None], check: bool = True
) -> Result:
    if any(index is not None and (DTYPES[index.dtype] != "int" or index.dtype == "uint8") for index in indices):
        return NotImplemented
    shape = shape_of(value)
    if 0 in shape:
        return constant(0, shape, x.dtype)
    space = indexed_space(low, x, indices, check=check, on_the_way=True)
    read = tuple(index for index in indices if index is not None)
    few = picks_few(low, x, size_product(shape))

    def at(body: Body, coords: Coords) -> Ref:
        place = space.place(body, coords)
        with body.computing_anew(few):
            return body.trace(x, place)

    picked = make_lazy(shape, x.dtype, at, (x, *read), ops=1)
    return replace(picked, reads=picked.sources) if few else picked


def _unsafe_index(low: Lowering, value: torch.Tensor, /, x: LazyTensor, indices: Sequence[LazyTensor | None]) -> Result:
    """Index without checks: decompositions read by positions that they computed themselves."""
    return _index(low, value, x, indices, check=False)


RULES: dict[str, Rule] = {
    "aten.embedding.default": Rule(_embedding),
    "aten.gather.default": Rule(_gather),
    "aten.index_select.default": Rule(_index_select),
    "aten.index.Tensor": Rule(_index),
    "aten._unsafe_index.Tensor": Rule(_unsafe_index, recompute=False),
}
