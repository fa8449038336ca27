"""Rules for views: maps from the view's coordinates to those of its base; nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, from_view, has_layout, remap_view
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule
from dcompile.codegen.lower.symbolic.strides import Shape, is_dense, reshape_coords, view_strides
from dcompile.compat.size_expressions import Inexpressible, opaque_shape
from dcompile.ir.index import Size, as_index, as_size, extreme, floordiv, is_below, is_nonnegative, modulo
from dcompile.ir.nodes import View


def _reshape(_: Lowering, value: torch.Tensor, /, x: LazyTensor, *__: Any) -> LazyTensor:
    return reshape(x, shape_of(value))


def _view(_: Lowering, value: torch.Tensor, /, x: LazyTensor, *__: Any) -> LazyTensor:
    """Reshape without a copy, as torch has checked, even where only a guard makes sizes equal."""
    seen = reshape(x, shape_of(value))
    if seen.view is None and x.view is not None and has_layout(x, x.strides):
        shape, strides = opaque_shape(value)
        return from_view(View(x.view.buffer, shape, strides, x.view.offset), x.dtype)
    return seen


def reshape(x: LazyTensor, shape: Shape) -> LazyTensor:
    """Return the same elements, in row-major order, as another shape."""
    if x.shape == shape:
        return x
    if x.view is not None:
        strides = view_strides(x.shape, x.view.strides, shape)
        if strides is not None:
            return from_view(View(x.view.buffer, shape, strides, x.view.offset), x.dtype)
    lazy = remap_view(
        replace(x, view=None), shape, lambda body, coords: reshape_coords(coords, shape, x.shape, body.ranges)
    )
    return replace(lazy, base=x, rebuilt_on=lambda stored: reshape(stored, shape)) if x.view is None else lazy


def _same(_: Lowering, value: torch.Tensor, /, x: LazyTensor, *__: Any) -> LazyTensor:
    return x


def _permute(_: Lowering, value: torch.Tensor, /, x: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    return permute(x, dims)


def permute(x: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    """Permute dimensions: dimension n of the result is dimension dims[n] of `x`."""
    rank = len(x.shape)
    order = [d % rank for d in dims]
    back = [order.index(d) for d in range(rank)]
    return remap_view(x, tuple(x.shape[d] for d in order), lambda _, coords: tuple(coords[n] for n in back))


def _transpose(_: Lowering, value: torch.Tensor, /, x: LazyTensor, a: int, b: int) -> LazyTensor:
    rank = len(x.shape)
    dims = list(range(rank))
    if rank:
        dims[a], dims[b] = dims[b], dims[a]
    return permute(x, dims)


def _t(_: Lowering, value: torch.Tensor, /, x: LazyTensor) -> LazyTensor:
    return permute(x, range(len(x.shape))[::-1])


def _expand(_: Lowering, value: torch.Tensor, /, x: LazyTensor, *__: Any, **___: Any) -> LazyTensor:
    return broadcast(x, shape_of(value))


def _slice(
    _: Lowering,
    value: torch.Tensor,
    /,
    x: LazyTensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> LazyTensor:
    first = first_of(start, x.shape[dim])
    return along(x, dim, shape_of(value), lambda c: c * step + first)


def first_of(start: Size | None, size: Size) -> Size:
    """Return the start of a slice; a start beyond the end leaves no elements, so any value will do."""
    if start is None:
        return 0
    if isinstance(start, int) and isinstance(size, int):
        return slice(start, None).indices(size)[0]
    if is_nonnegative(as_index(start), {}):
        return start
    if is_nonnegative(as_index(start) * -1 - 1, {}):
        return as_size(extreme("max", as_index(start) + size, 0))
    return _from_the_end_if_negative(start, size)


def along(x: LazyTensor, dim: int, shape: Shape, move: Callable[[Any], Any]) -> LazyTensor:
    """Return `x` with a map on one coordinate."""
    dim %= len(x.shape)

    def remap(_: Body, coords: Coords) -> Coords:
        return (*coords[:dim], as_index(move(coords[dim])), *coords[dim + 1 :])

    return remap_view(x, shape, remap)


def select(x: LazyTensor, dim: int, position: Size) -> LazyTensor:
    """Return `x` at one position of a dimension, which is removed."""
    dim %= len(x.shape)
    at = as_index(place_of(position, x.shape[dim]))
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    return remap_view(x, shape, lambda _, coords: (*coords[:dim], at, *coords[dim:]))


def place_of(position: Size, size: Size) -> Size:
    """Convert a position that may count from the end to one from the start."""
    if is_nonnegative(as_index(position), {}):
        return position
    if is_nonnegative(as_index(position) * -1 - 1, {}):
        return as_size(as_index(position) + size)
    return _from_the_end_if_negative(position, size)


def _from_the_end_if_negative(number: Size, size: Size) -> Size:
    """Convert a position of unknown sign; positions before the beginning become 0."""
    one_if_negative = extreme("min", extreme("max", as_index(number) * -1, 0), 1)
    return as_size(extreme("max", as_index(number) + one_if_negative * size, 0))


def _select(_: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, position: Size) -> LazyTensor:
    return select(x, dim, position)


def _split(_: Lowering, values: Sequence[torch.Tensor], /, x: LazyTensor, __: Any, dim: int = 0) -> list[LazyTensor]:
    """Return consecutive pieces along a dimension, with the lengths of the fake results."""
    result: list[LazyTensor] = []
    start: Size = 0
    for value in values:
        shape = shape_of(value)
        result.append(_shifted(x, dim, shape, start))
        start = as_size(start + shape[dim])
    return result


def _shifted(x: LazyTensor, dim: int, shape: Shape, start: Size) -> LazyTensor:
    return along(x, dim, shape, lambda c: c + start)


def _unbind(_: Lowering, values: Sequence[torch.Tensor], /, x: LazyTensor, dim: int = 0) -> list[LazyTensor]:
    return [select(x, dim, position) for position in range(len(values))]


def _diagonal(
    _: Lowering, value: torch.Tensor, /, x: LazyTensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> LazyTensor:
    rank = len(x.shape)
    row, column = dim1 % rank, dim2 % rank
    others = [d for d in range(rank) if d not in (row, column)]

    def remap(_: Body, coords: Coords) -> Coords:
        where = dict(zip(others, coords[:-1], strict=True))
        where[row], where[column] = coords[-1] + max(-offset, 0), coords[-1] + max(offset, 0)
        return tuple(where[d] for d in range(rank))

    return remap_view(x, shape_of(value), remap)


def _unfold(_: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, size: int, step: int) -> Result:
    if not x.shape:
        return NotImplemented
    dim %= len(x.shape)

    def remap(_: Body, coords: Coords) -> Coords:
        return (*coords[:dim], coords[dim] * step + coords[-1], *coords[dim + 1 : -1])

    return remap_view(x, shape_of(value), remap)


def _as_strided(
    low: Lowering,
    value: torch.Tensor,
    /,
    x: LazyTensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> Result:
    """View memory with given strides; `x` must be stored exactly in torch's layout."""
    stored = low.memory(x)
    if not has_layout(stored, x.strides):
        return NotImplemented
    assert stored.view is not None
    start = stored.view.offset if offset is None else offset
    last = as_index(start)
    for n, step in zip(size, stride, strict=True):
        last = last + (as_index(n) - 1) * step
    if not is_below(last, low.buffers[stored.view.buffer].extent, {}):
        return NotImplemented  # beyond this tensor's part of its storage
    if offset is not None and (stored.view.buffer in low.inputs or not _is_whole(low, stored.view)):
        return NotImplemented  # the offset counts from the start of a storage that belongs to others
    own = is_dense(stored.view.shape, stored.view.strides) and is_below(last - start, stored.numel, {})
    if offset is None and stored.view.buffer not in low.inputs and not (own or _is_whole(low, stored.view)):
        return NotImplemented  # memory after a part of a buffer may differ from eager mode's
    return from_view(View(stored.view.buffer, tuple(size), tuple(stride), start), x.dtype)


def _is_whole(low: Lowering, view: View) -> bool:
    return view.offset == 0 and low.buffers[view.buffer].shape == view.shape


def _flip(_: Lowering, value: torch.Tensor, /, x: LazyTensor, dims: Sequence[int]) -> LazyTensor:
    rank = len(x.shape)
    turned = {d % rank for d in dims} if rank else set()

    def remap(_: Body, coords: Coords) -> Coords:
        return tuple(
            as_index(x.shape[d]) - 1 - c if d in turned and x.shape[d] not in (0, 1) else c
            for d, c in enumerate(coords)
        )

    return remap_view(x, x.shape, remap)


def _repeat(_: Lowering, value: torch.Tensor, /, x: LazyTensor, repeats: Sequence[int]) -> LazyTensor:
    lead = len(repeats) - len(x.shape)

    def remap(body: Body, coords: Coords) -> Coords:
        return tuple(modulo(c, size or 1, body.ranges) for c, size in zip(coords[lead:], x.shape, strict=True))

    return remap_view(x, shape_of(value), remap)


def _roll(_: Lowering, value: torch.Tensor, /, x: LazyTensor, shifts: Any, dims: Any = ()) -> Result:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    if not dims:
        if not x.shape or len(shifts) != 1:
            return NotImplemented
        flat = reshape(x, (x.numel,))
        return reshape(_roll(_, value, flat, shifts, [0]), x.shape)
    by = {d % len(x.shape): shift for shift, d in zip(shifts, [dims] if isinstance(dims, int) else dims, strict=True)}

    def remap(body: Body, coords: Coords) -> Coords:
        return tuple(
            modulo(c + _turned_back(by[d], x.shape[d]), x.shape[d], body.ranges)
            if d in by and x.shape[d] not in (0, 1)
            else c
            for d, c in enumerate(coords)
        )

    return remap_view(x, x.shape, remap)


def _turned_back(shift: Size, size: Size) -> Size:
    """Return `-shift % size`."""
    if isinstance(shift, int) and isinstance(size, int):
        return -shift % size
    if is_nonnegative(as_index(shift) * -1, {}):
        return as_size(as_index(shift) * -1)
    if not is_nonnegative(as_index(shift), {}):
        raise Inexpressible(f"which way a roll by {shift} turns")
    whole = floordiv(as_index(shift) + size - 1, size, {})
    return as_size(whole * size - shift)


_VIEWS = ("view.default", "_unsafe_view.default", "unsqueeze.default", "squeeze.default",
          "squeeze.dim", "squeeze.dims")  # fmt: skip
_SAME = ("alias.default", "detach.default", "lift_fresh.default", "lift.default", "positive.default")

RULES: dict[str, Rule] = {
    **{f"aten.{name}": Rule(_view, "view") for name in _VIEWS},
    "aten._reshape_alias.default": Rule(_view, "view", decomposed=True),
    "aten.reshape.default": Rule(_reshape, "view"),
    **{f"aten.{name}": Rule(_same, "view") for name in _SAME},
    "aten.permute.default": Rule(_permute, "view"),
    "aten.transpose.int": Rule(_transpose, "view"),
    "aten.t.default": Rule(_t, "view"),
    "aten.expand.default": Rule(_expand, "view"),
    "aten.slice.Tensor": Rule(_slice, "view"),
    "aten.select.int": Rule(_select, "view"),
    "aten.split.Tensor": Rule(_split, "view"),
    "aten.split_with_sizes.default": Rule(_split, "view"),
    "aten.unbind.int": Rule(_unbind, "view"),
    "aten.diagonal.default": Rule(_diagonal, "view"),
    "aten.unfold.default": Rule(_unfold, "view"),
    "aten.as_strided.default": Rule(_as_strided, "memory"),
}
COPIES: dict[str, Rule] = {
    "aten.flip.default": Rule(_flip),
    "aten.repeat.default": Rule(_repeat),
    "aten.roll.default": Rule(_roll),
}
"""Index maps that torch copies: their results are separate tensors."""
