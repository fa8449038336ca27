"""Rules that join or pad tensors: an element's coordinates determine the argument that it comes from.

Padding shows elements by reflection, or replicates edges. Replication of channels-last images is torch's decomposition,
which alone reproduces eager's layout (`decompositions.aten.replication_pad`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, constant, copy_of, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.views import COPIES, along, first_of, place_of, reshape
from dcompile.codegen.lower.rules.views import RULES as VIEWS
from dcompile.codegen.lower.symbolic.strides import Shape
from dcompile.ir.index import ZERO, Index, Size, as_index, as_size, floordiv, is_below, is_nonnegative, modulo
from dcompile.ir.nodes import Ref

MAX_PIECES = 12
"""Tensors that one loop joins; with more, a library copy is faster than the chain of selects for each element."""

"""Whether an element comes from a piece: known at compile time, or a truth value of the body."""


def below(body: Body, index: Index, limit: Size) -> Ref | bool:
    """Return `index < limit`, decided at compile time where the ranges suffice."""
    if is_below(index, limit, body.ranges):
        return True
    if is_nonnegative(index - limit, body.ranges):
        return False
    return body.apply("lt", body.index(index), body.const(limit, "int64"))


def not_below(body: Body, index: Index, limit: Size) -> Ref | bool:
    found = below(body, index, limit)
    return (not found) if isinstance(found, bool) else body.apply("not", found)


def both(body: Body, *conditions: Ref | bool) -> Ref | bool:
    result: Ref | bool = True
    for condition in conditions:
        if condition is False or result is False:
            return False
        if condition is not True:
            result = condition if result is True else body.apply("and", result, condition)
    return result


def either(body: Body, inside: Ref | bool, element: Callable[[], Ref], other: Callable[[], Ref]) -> Ref:
    """Return `element` where `inside`, with its loads masked elsewhere, and `other` outside."""
    if isinstance(inside, bool):
        return element() if inside else other()
    with body.masked(inside):
        chosen = element()
    return body.apply("where", inside, chosen, other())


def value_of(body: Body, tensor: LazyTensor, coords: Coords, dtype: str) -> Ref:
    return body.cast(to_dtype(body, body.trace(tensor, coords), dtype), opmath(dtype))


def _cat(_: Lowering, value: torch.Tensor, /, tensors: Sequence[LazyTensor], dim: int = 0) -> Result:
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    pieces = [t for t in tensors if t.shape != (0,) or len(shape) == 1]
    return cat([t for t in pieces if 0 not in t.shape] or pieces[:1], dim % len(shape), shape, dtype)


def cat(pieces: Sequence[LazyTensor], dim: int, shape: Shape, dtype: str) -> Result:
    """Concatenate pieces along `dim`."""
    if len(pieces) > MAX_PIECES:
        return NotImplemented
    starts: list[Size] = [0]
    for piece in pieces[:-1]:
        starts.append(as_size(starts[-1] + piece.shape[dim]))

    def choose(body: Body, coords: Coords, number: int) -> Ref:
        """Return the element, given that it does not come from a piece before `number`."""
        piece, start, at = pieces[number], starts[number], coords[dim]

        def element() -> Ref:
            return value_of(body, piece, (*coords[:dim], at - start, *coords[dim + 1 :]), dtype)

        def later() -> Ref:
            if number + 1 == len(pieces):
                return body.const(0, opmath(dtype))
            with_mask = not_below(body, at, starts[number + 1])
            if isinstance(with_mask, bool):
                return choose(body, coords, number + 1)
            with body.masked(with_mask):
                return choose(body, coords, number + 1)

        if number + 1 == len(pieces):
            return element()
        return either(body, below(body, at, as_size(start + piece.shape[dim])), element, later)

    return make_lazy(
        shape,
        dtype,
        lambda body, coords: to_dtype(body, choose(body, coords, 0), dtype),
        tuple(pieces),
        ops=2 * len(pieces),
    )


def _stack(_: Lowering, value: torch.Tensor, /, tensors: Sequence[LazyTensor], dim: int = 0) -> Result:
    shape = shape_of(value)
    dim %= len(shape)
    pieces = [reshape(t, (*t.shape[:dim], 1, *t.shape[dim:])) for t in tensors]
    return cat(pieces, dim, shape, dtype_name(value.dtype))


def _pad(low: Lowering, value: torch.Tensor, /, x: LazyTensor, pad: Sequence[Size], fill: float = 0) -> LazyTensor:
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    rank = len(shape)
    before = {rank - 1 - n: pad[2 * n] for n in range(len(pad) // 2)}
    if not low.traits.fuses_padding and x.view is None and not x.reads <= low.inputs.keys():
        x = low.memory(x)  # a loop over more elements than x would not fuse with the loop that computes x

    def at(body: Body, coords: Coords) -> Ref:
        moved = tuple(c - before.get(d, 0) for d, c in enumerate(coords))
        limits = [(moved[d], x.shape[d]) for d in before]
        inside = both(body, *(c for m, size in limits for c in (not_below(body, m, 0), below(body, m, size))))
        chosen = either(body, inside, lambda: value_of(body, x, moved, dtype), lambda: body.const(fill, opmath(dtype)))
        return to_dtype(body, chosen, dtype)

    return make_lazy(shape, dtype, at, (x,), ops=2)


def _slice_scatter(
    _: Lowering,
    value: torch.Tensor,
    /,
    x: LazyTensor,
    source: LazyTensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> LazyTensor:
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    dim %= len(shape)
    first, count = _slice_of(shape[dim], start, end, step, source, dim - len(shape))
    return _put(x, source, shape, dtype, dim, first, count, step)


def _put(
    x: LazyTensor, source: LazyTensor, shape: Shape, dtype: str, dim: int, first: Size, count: Size, step: Size = 1
) -> LazyTensor:
    """Return `x` with `source` at `count` positions along `dim`."""
    expected = (*shape[:dim], count, *shape[dim + 1 :])
    if count == 0:
        return copy_of(x)
    source = broadcast(source, expected)

    def at(body: Body, coords: Coords) -> Ref:
        moved = coords[dim] - first
        inside = both(body, not_below(body, moved, 0), below(body, moved, as_size((count - 1) * step + 1)))
        if step != 1 and inside is not False:  # a symbolic step is checked even if it is 1
            on = body.apply("eq", body.index(modulo(moved, step, body.ranges)), body.const(0, "int64"))
            inside = both(body, inside, on)
        place = (*coords[:dim], floordiv(moved, step, body.ranges), *coords[dim + 1 :])
        chosen = either(
            body, inside, lambda: value_of(body, source, place, dtype), lambda: value_of(body, x, coords, dtype)
        )
        return to_dtype(body, chosen, dtype)

    return make_lazy(shape, dtype, at, (x, source), ops=3)


def _slice_of(
    size: Size, start: Size | None, end: Size | None, step: Size, source: LazyTensor, dim: int
) -> tuple[Size, Size]:
    """Return the start and the length of the slice that `source` is written to."""
    if (
        isinstance(size, int)
        and isinstance(step, int)
        and isinstance(start, int | None)
        and isinstance(end, int | None)
    ):
        first, last, _ = slice(start, end, step).indices(size)
        return first, max(0, -(-(last - first) // step))
    return first_of(start, size), source.shape[dim]  # eager requires this length; tracing would expand


def _select_scatter(
    _: Lowering, value: torch.Tensor, /, x: LazyTensor, source: LazyTensor, dim: int, position: Size
) -> Result:
    dim %= len(x.shape)
    position = place_of(position, x.shape[dim])
    source = reshape(broadcast(source, (*x.shape[:dim], *x.shape[dim + 1 :])), (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return _put(x, source, shape_of(value), dtype_name(value.dtype), dim, position, 1)


def _diagonal_scatter(
    _: Lowering,
    value: torch.Tensor,
    /,
    x: LazyTensor,
    source: LazyTensor,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> LazyTensor:
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    row, column = dim1 % len(shape), dim2 % len(shape)
    others = [d for d in range(len(shape)) if d not in (row, column)]

    def at(body: Body, coords: Coords) -> Ref:
        along = coords[row] - max(-offset, 0)
        inside = body.apply("eq", body.index(along), body.index(coords[column] - max(offset, 0)))
        inside_ = both(body, inside, not_below(body, along, 0), below(body, along, source.shape[-1]))
        place = (*(coords[d] for d in others), along)
        chosen = either(
            body, inside_, lambda: value_of(body, source, place, dtype), lambda: value_of(body, x, coords, dtype)
        )
        return to_dtype(body, chosen, dtype)

    return copy_of(x) if 0 in source.shape else make_lazy(shape, dtype, at, (x, source), ops=3)


def _triangle(keep_below: bool) -> Callable[..., LazyTensor]:
    """Make the rule of tril or triu: zero on the other side of a diagonal."""

    def rule(_: Lowering, value: torch.Tensor, /, x: LazyTensor, diagonal: int = 0) -> LazyTensor:
        dtype = dtype_name(value.dtype)

        def at(body: Body, coords: Coords) -> Ref:
            row, column = body.index(coords[-2] + as_index(diagonal)), body.index(coords[-1])
            inside = body.apply("le", column, row) if keep_below else body.apply("ge", column, row)
            other = body.const(0, opmath(dtype))
            return to_dtype(body, body.apply("where", inside, value_of(body, x, coords, dtype), other), dtype)

        return make_lazy(x.shape, dtype, at, (x,), ops=2)

    return rule


def _narrow(_: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, start: Size, __: Size) -> LazyTensor:
    start = place_of(start, x.shape[dim])
    return copy_of(along(x, dim, shape_of(value), lambda c: c + start))


def _copying(rule: Callable[..., LazyTensor]) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            return [copy_of(item) for item in result]
        return result if result is NotImplemented else copy_of(result)

    return lower


def _copy_of(view: str) -> str | None:
    """Return the copying variant of a view op: aten.slice.Tensor -> aten.slice_copy.Tensor, if torch has it."""
    namespace, name, overload = view.split(".")
    if name == "as_strided":
        return None  # reads memory beyond the tensor: a separate rule decides where that is known
    packet = getattr(torch.ops.aten, f"{name}_copy", None)
    return f"{namespace}.{name}_copy.{overload}" if packet is not None and overload in packet.overloads() else None


def _mirrored(body: Body, at: Index, size: Size) -> Ref:
    """Return the element, among `size`, that reflection shows at a position before, inside or after them."""
    last = body.index(as_index(size) - 1)
    near = body.apply("sub", last, body.apply("abs", body.index(at)))
    return body.apply("sub", last, body.apply("abs", near))


def _nearest(body: Body, at: Index, size: Size) -> Ref:
    """Return the element, among `size`, that replication shows at a position."""
    return body.apply("min", body.apply("max", body.index(at), body.index(ZERO)), body.index(as_index(size) - 1))


@dataclass(frozen=True, slots=True)
class _PaddingRule:
    """The element shown at any position, at a position before the elements, and at one after them."""

    anywhere: Callable[[Body, Index, Size], Ref]
    before: Callable[[Index, Size], Index]
    after: Callable[[Index, Size], Index]


_MIRRORED = _PaddingRule(_mirrored, lambda at, _: at * -1, lambda at, size: as_index(size) * 2 - 2 - at)
_REPEATED = _PaddingRule(_nearest, lambda *_: ZERO, lambda _, size: as_index(size) - 1)


def _where(body: Body, condition: Ref | bool) -> AbstractContextManager[None]:
    """Restrict loads inside to where the condition holds."""
    return nullcontext() if isinstance(condition, bool) else body.masked(condition)


def _pad_by(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, padding: Sequence[Size], *, way: _PaddingRule
) -> LazyTensor:
    """Pad by `way`. On CPUs the last dimension has a case for each side of its edges, so that loops read in order.

    `emit/cpp/loop_conditions.py` splits the loop at these edges; a lookup of each element took 1.7 to 3 times as long.
    Along other dimensions the position is constant for a whole row.
    """
    shape, dtype, last = shape_of(value), dtype_name(value.dtype), len(x.shape) - 1
    if 0 in shape:
        return constant(0, shape, dtype)
    first = {last - n: padding[2 * n] for n in range(len(padding) // 2)}
    looked_up = [dim for dim in first if dim != last or not low.traits.splits_loops]
    x = x if x.is_cheap else low.memory(x)

    def at(body: Body, coords: Coords) -> Ref:
        found = list(coords)
        for dim in looked_up:
            size = x.shape[dim]
            found[dim] = body.as_index(way.anywhere(body, coords[dim] - first[dim], size), size)
        if last in looked_up:
            return body.trace(x, tuple(found))
        moved, size, lead = coords[last] - first[last], x.shape[last], tuple(found[:-1])

        def element(index: Index) -> Ref:
            return value_of(body, x, (*lead, index), dtype)

        def later() -> Ref:
            with _where(body, not_below(body, moved, 0)):
                return either(body, below(body, moved, size), lambda: element(moved), beyond)

        def beyond() -> Ref:
            with _where(body, not_below(body, moved, size)):
                return element(way.after(moved, size))

        return to_dtype(
            body, either(body, below(body, moved, 0), lambda: element(way.before(moved, size)), later), dtype
        )

    return make_lazy(shape, dtype, at, (x,), ops=8)


_reflection_pad, _replication_pad = partial(_pad_by, way=_MIRRORED), partial(_pad_by, way=_REPEATED)

RANKS = (1, 2, 3)


RULES: dict[str, Rule] = {
    "aten.cat.default": Rule(_cat, recompute=False),
    "aten.stack.default": Rule(_stack, recompute=False),
    "aten.constant_pad_nd.default": Rule(_pad),
    "aten.slice_scatter.default": Rule(_slice_scatter),
    "aten.select_scatter.default": Rule(_select_scatter),
    "aten.diagonal_scatter.default": Rule(_diagonal_scatter),
    "aten.narrow_copy.default": Rule(_narrow),
    "aten.tril.default": Rule(_triangle(True)),
    "aten.triu.default": Rule(_triangle(False)),
    **{name: Rule(_copying(rule.lower)) for name, rule in COPIES.items()},
    **{copy: Rule(_copying(rule.lower), decomposed=True) for name, rule in VIEWS.items() if (copy := _copy_of(name))},
    **{f"aten.reflection_pad{n}d.default": Rule(_reflection_pad, recompute=False) for n in RANKS},
    **{f"aten.replication_pad{n}d.default": Rule(_replication_pad, recompute=False, decomposed=True) for n in RANKS},
}
