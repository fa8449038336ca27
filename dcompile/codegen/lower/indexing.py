"""Rules that read or write at positions computed at run time. Positions are checked before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.codegen.lower.body import Body, Coords
from dcompile.codegen.lower.graph import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.pointwise import to_dtype
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.tensor import T, broadcast, computed, from_view, iota_range
from dcompile.ir.index import Index
from dcompile.ir.nodes import Ref
from dcompile.ir.ops import DTYPES

CHECK = "dcompile.check_bounds"
"""check_bounds(positions, low, high) -> positions: raises IndexError unless low <= position < high for all of them.

It hands its argument on, so that whatever reads by these positions depends on the check.
"""


def checked(low: Lowering, positions: T, size: int, *, wrap: bool) -> T:
    """`positions`, known to lie in [0, size) (with `wrap` from -size): by their form, or by a check at run time."""
    lowest = -size if wrap else 0
    known = iota_range(positions)
    if 0 in positions.shape or (known is not None and lowest <= known[0] and known[1] < size):
        return positions
    stored = low.memory(positions)
    assert stored.view is not None
    key = (stored.view, lowest, size)
    if key not in low.checked:
        strides = tuple(s for s in stored.view.strides if isinstance(s, int))
        out = low.buffer(stored.shape, stored.dtype, strides, f"{stored.view.buffer}_checked")
        low.extern(CHECK, [stored.view, lowest, size], [out.buffer], effect=True)
        low.checked[key] = from_view(out, stored.dtype)
    return low.checked[key]


def position(body: Body, positions: T, coords: Coords, size: int, *, wrap: bool) -> Index:
    """The run-time index at `coords`; negative ones count from the end if they may."""
    ref = body.cast(body.trace(positions, coords), "int64")
    known = iota_range(positions)
    if wrap and (known is None or known[0] < 0):
        negative = body.apply("lt", ref, body.const(0, "int64"))
        ref = body.apply("where", negative, body.apply("add", ref, body.const(size, "int64")), ref)
    return body.as_index(ref, size)


def _embedding(low: Lowering, value: torch.Tensor, /, weight: T, indices: T, *_: Any) -> T:
    size = weight.shape[0]
    seen = checked(low, indices, size, wrap=False)

    def at(body: Body, coords: Coords) -> Ref:
        row = position(body, seen, coords[:-1], size, wrap=False)
        return body.trace(weight, (row, coords[-1]))

    return computed(shape_of(value), weight.dtype, at, (weight, seen), ops=0)


def _gather(low: Lowering, value: torch.Tensor, /, x: T, dim: int, index: T, **_: Any) -> Result:
    if not x.shape or not index.shape:
        return NotImplemented
    dim %= len(x.shape)
    size = x.shape[dim]
    seen = checked(low, index, size, wrap=False)

    def at(body: Body, coords: Coords) -> Ref:
        where = position(body, seen, coords, size, wrap=False)
        return body.trace(x, (*coords[:dim], where, *coords[dim + 1 :]))

    return computed(index.shape, x.dtype, at, (x, seen), ops=0)


def _index_select(low: Lowering, value: torch.Tensor, /, x: T, dim: int, index: T) -> Result:
    if not x.shape or len(index.shape) != 1:
        return NotImplemented
    dim %= len(x.shape)
    size = x.shape[dim]
    seen = checked(low, index, size, wrap=False)

    def at(body: Body, coords: Coords) -> Ref:
        where = position(body, seen, (coords[dim],), size, wrap=False)
        return body.trace(x, (*coords[:dim], where, *coords[dim + 1 :]))

    return computed(shape_of(value), x.dtype, at, (x, seen), ops=0)


def _index(low: Lowering, value: torch.Tensor, /, x: T, indices: Sequence[T | None]) -> Result:
    """x[a, :, b]: index tensors broadcast together; their dimensions go to the front unless they are neighbours."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(DTYPES[index.dtype] != "int" or index.dtype == "uint8" for _, index in given):
        return NotImplemented
    rank = max(len(index.shape) for _, index in given)
    dims = [dim for dim, _ in given]
    neighbours = dims == list(range(dims[0], dims[0] + len(dims)))
    start = dims[0] if neighbours else 0
    shape = shape_of(value)
    common = shape[start : start + rank]
    seen = {dim: broadcast(checked(low, index, x.shape[dim], wrap=True), common) for dim, index in given}

    def at(body: Body, coords: Coords) -> Ref:
        middle, rest = coords[start : start + rank], iter((*coords[:start], *coords[start + rank :]))
        where = [
            position(body, seen[dim], middle, size, wrap=True) if dim in seen else next(rest)
            for dim, size in enumerate(x.shape)
        ]
        return body.trace(x, tuple(where))

    return computed(shape, x.dtype, at, (x, *seen.values()), ops=1)


def _scatter(combine: Callable[[Body, Ref, Ref], Ref]) -> Callable[..., Any]:
    """Scatter of one element for each line along `dim`: the others keep what they hold. More go to the library."""

    def rule(low: Lowering, value: torch.Tensor, /, x: T, dim: int, index: T, source: Any) -> Result:
        if not x.shape or len(index.shape) != len(x.shape):
            return NotImplemented
        dim %= len(x.shape)
        if index.shape != (*x.shape[:dim], 1, *x.shape[dim + 1 :]):
            return NotImplemented
        seen, dtype, zero = checked(low, index, x.shape[dim], wrap=False), dtype_name(value.dtype), Index()
        compute = opmath(dtype)

        def at(body: Body, coords: Coords) -> Ref:
            line = (*coords[:dim], zero, *coords[dim + 1 :])
            hit = body.apply("eq", body.cast(body.trace(seen, line), "int64"), body.index(coords[dim]))
            old = body.cast(body.trace(x, coords), compute)
            if isinstance(source, T):
                new = body.cast(to_dtype(body, body.trace(source, line), dtype), compute)
            else:
                new = body.cast(body.const(source, dtype), compute)
            combined = body.cast(body.cast(combine(body, old, new), dtype), compute)
            return to_dtype(body, body.apply("where", hit, combined, old), dtype)

        args = (x, seen, source) if isinstance(source, T) else (x, seen)
        return computed(x.shape, dtype, at, args, ops=2)

    return rule


def _replace(_: Body, old: Ref, new: Ref) -> Ref:
    return new


def _accumulate(body: Body, old: Ref, new: Ref) -> Ref:
    return body.apply("or" if body.dtype(old) == "bool" else "add", old, new)


RULES: dict[str, Rule] = {
    "aten.embedding.default": Rule(_embedding),
    "aten.gather.default": Rule(_gather),
    "aten.index_select.default": Rule(_index_select),
    "aten.index.Tensor": Rule(_index),
    "aten._unsafe_index.Tensor": Rule(_index),
    "aten.scatter.value": Rule(_scatter(_replace)),
    "aten.scatter.src": Rule(_scatter(_replace)),
    "aten.scatter_add.default": Rule(_scatter(_accumulate)),
}
