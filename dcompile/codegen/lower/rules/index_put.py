"""Rules of index_put: values, or whole rows, that go to positions computed at run time, or where a mask is true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering
from dcompile.codegen.lower.lazy_tensor import LazyTensor, broadcast, broadcast_shape, copy_of, make_lazy
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.indexing import check_positions, indexed_space
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.scatter import (
    add_value,
    by_library,
    collected_by_rows,
    few_rows,
    meets,
    needs_order,
    puts_by_library,
    scatter_combine,
    scatter_set,
)
from dcompile.codegen.lower.symbolic.strides import Shape
from dcompile.ir.index import Index
from dcompile.ir.nodes import Ref
from dcompile.ir.ops import DTYPES


def _index_put(
    low: Lowering,
    value: torch.Tensor,
    /,
    x: LazyTensor,
    indices: Sequence[LazyTensor | None],
    values: LazyTensor,
    accumulate: bool = False,
    *_: Any,
) -> Result:
    if any(i is not None and i.dtype in ("bool", "uint8") for i in indices):
        return _put_where(x, indices, values, accumulate)
    if 0 in x.shape or 0 in values.shape:
        return copy_of(x) if 0 in x.shape or values.numel == 0 else NotImplemented
    rows = _added_by_rows(low, x, indices, values) if accumulate and not needs_order(low) else NotImplemented
    if rows is not NotImplemented:
        return rows
    if accumulate and not meets(low, x.dtype, "sum", x.shape, _put_sizes(x, indices)):
        return NotImplemented
    space = indexed_space(low, x, indices, on_the_way=True)
    if 0 in space.shape:
        return copy_of(x)
    if puts_by_library(low, x, tuple(x.shape[dim] for dim in space.found), space.shape, adds=accumulate):
        return by_library(low, x, "aten.index_put_.default", list(indices), values, accumulate)
    source = broadcast(values, space.shape)
    return scatter_combine(low, x, space, source, "sum") if accumulate else scatter_set(low, x, space, source)


def _put_sizes(x: LazyTensor, indices: Sequence[LazyTensor | None]) -> Shape:
    """Return sizes whose product is the number of values."""
    given = {dim for dim, index in enumerate(indices) if index is not None}
    together = broadcast_shape([index.shape for index in indices if index is not None])
    return (*together, *(size for dim, size in enumerate(x.shape) if dim not in given))


def _added_by_rows(low: Lowering, x: LazyTensor, indices: Sequence[LazyTensor | None], values: LazyTensor) -> Result:
    """Lower an index_put that adds whole rows to a small table."""
    given = [index for index in indices if index is not None]
    if indices[0] is None or len(given) > 1 or DTYPES[x.dtype] != "float" or not few_rows(x.shape, given[0]):
        return NotImplemented
    index = check_positions(low, given[0], x.shape[0], wrap=True)
    total = collected_by_rows(low, x.shape, index, broadcast(values, (*index.shape, *x.shape[1:])))
    compute = opmath(x.dtype)

    def at(body: Body, coords: Coords) -> Ref:
        old = body.cast(body.trace(x, coords), compute)
        return to_dtype(body, body.apply("add", old, body.trace(total, coords)), x.dtype)

    return make_lazy(x.shape, x.dtype, at, (x, total), ops=1)


def _put_where(x: LazyTensor, indices: Sequence[LazyTensor | None], values: LazyTensor, accumulate: bool) -> Result:
    """Lower an index_put with one mask and a value that is the same at all its positions."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    (dim, mask), rank, dtype = given[0], len(x.shape), x.dtype
    after = rank - dim - len(mask.shape)
    lead = len(values.shape) - after - 1  # the dimension of `values` that counts positions
    if len(given) > 1 or x.shape[dim : rank - after] != mask.shape or (lead >= 0 and values.shape[lead] != 1):
        return NotImplemented
    if 0 in x.shape or values.numel == 0:
        return copy_of(x) if 0 in x.shape else NotImplemented
    before = x.shape[:dim]
    flat = broadcast(values, (*before, 1, *x.shape[rank - after :]))
    compute = opmath(dtype)

    def at(body: Body, coords: Coords) -> Ref:
        hit = body.cast(body.trace(mask, coords[dim : rank - after]), "bool")
        old = body.cast(body.trace(x, coords), compute)
        new = body.trace(flat, (*coords[:dim], Index(), *coords[rank - after :]))
        new = body.cast(to_dtype(body, new, dtype), compute)
        new = add_value(body, old, new) if accumulate else new
        return to_dtype(body, body.apply("where", hit, new, old), dtype)

    return make_lazy(x.shape, dtype, at, (x, mask, flat), ops=2)


RULES: dict[str, Rule] = {
    "aten.index_put.default": Rule(_index_put, recompute=False),
    "aten._unsafe_index_put.default": Rule(_index_put, recompute=False, decomposed=True),
}
