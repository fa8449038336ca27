"""Rules that write at positions computed at run time: scatters, index_put, and the gradient of an embedding.

They are combining stores, since several values may share a position. index_put writes values or whole rows, or writes
where a mask is true.

Sums are collected from zero and then added to the tensor. Where values replace one another, the last in row-major order
wins, as in eager on one thread. A maximum first finds the number of the last value for each position; then every
position reads its value. So the result does not depend on the number of threads.

On CPUs the library takes few values: the tensor is copied, and ATen's in-place operation runs on the copy. A loop that
replaces values finds the number of the last one for each position in memory of its own, and then checks every position.
A loop that adds collects sums from zero. For single elements that memory is as large as the tensor's: it is filled,
read and written. The library took 0.17 to 0.6 of the time (16 MB, Zen 5). Its result where values share a position does
not depend on the number of threads. One thread has a whole line of a scatter, and all of few values.

The gradient of an embedding adds rows at their index. On the CPU they are combined in memory, in a fixed order. On a
GPU, each row of a small table compares itself with all indices. For larger tables, rows of one index are summed first,
as a group (`emit/triton/segment_sum.py`), and each table row reads its group's sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering, dtype_name, shape_of
from dcompile.codegen.lower.lazy_tensor import (
    LazyTensor,
    broadcast,
    broadcast_shape,
    constant,
    constant_of,
    copy_of,
    from_view,
    make_lazy,
)
from dcompile.codegen.lower.loop_builder import Body, Coords
from dcompile.codegen.lower.rule import Result, Rule, opmath
from dcompile.codegen.lower.rules.indexing import IndexedSpace, check_positions, every_place, indexed_space, places
from dcompile.codegen.lower.rules.pointwise import to_dtype
from dcompile.codegen.lower.rules.views import reshape
from dcompile.codegen.lower.symbolic.strides import Shape, contiguous, ranges_of, variables
from dcompile.device_traits import MAX_INT32_ELEMENTS
from dcompile.ir.index import Index, Size, as_index, as_size, flatten, size_product, typical, unflatten
from dcompile.ir.nodes import Ref, Store, View
from dcompile.ir.ops import DTYPES

Value = Callable[[Body, Coords], Ref]

MAX_COMPARISONS = 1 << 25
"""Comparisons of a row's number with an index up to which a sort is avoided: about 10 us on a GPU."""

MIN_EMPTY_SHARE = 8
"""Positions for each value up to which GPU loops add floats: they fill, read and write each position. The library sorts
the positions and touches only those with values."""
MAX_SMALL_ELEMENTS = 1 << 22
"""Elements up to which a tensor is small enough for that: about 10 us on an H200, where a sort takes more."""

REDUCTIONS = {"sum": "sum", "add": "sum", "mean": "sum", "prod": "prod", "multiply": "prod", "amax": "max",
              "amin": "min"}  # fmt: skip
"""torch's names -> modes of a store."""


def needs_order(low: Lowering) -> bool:
    """Are values at one position combined in a fixed order?"""
    return low.traits.ordered_stores


def meets(low: Lowering, dtype: str, how: str, shape: Shape, values: Shape) -> bool:
    """Can numbers of `dtype` and shape `values` be combined in memory, in a tensor of `shape`?

    On the CPU always, in a fixed order. A GPU has none. Integers and maxima do not need it, and sums of floats differ
    by roundings, as eager's do. The library takes float sums under `torch.use_deterministic_algorithms`, which its
    kernels observe. It also takes dtypes without an atomic operation, and few values in a large tensor.
    """
    if needs_order(low):
        return True
    mode, compute = REDUCTIONS[how], opmath(dtype)
    if mode == "sum" and compute in ("float32", "float64"):
        places = typical(size_product(shape))
        return not low.deterministic and places <= max(
            MIN_EMPTY_SHARE * typical(size_product(values)), MAX_SMALL_ELEMENTS
        )
    return low.traits.has_atomic(mode, compute)


def collect(low: Lowering, shape: Shape, dtype: str, mode: str, space: IndexedSpace, value: Value) -> LazyTensor:
    """Return a tensor of `shape` that combines the values of `space` at their positions."""
    view = low.buffer(shape, dtype, name=f"{low.node}_{mode}")
    body = low.body(ranges_of("i", space.shape))
    coords = variables("i", space.shape)
    place, ref = space.place(body, coords), value(body, coords)
    low.loop(space.shape, (), body, [Store(view.buffer, flatten(place, view.strides), ref, mode)])
    return from_view(view, dtype)


def few_rows(shape: Shape, index: LazyTensor) -> bool:
    """May each row of a table read all values? On GPUs this avoids combining values in memory."""
    numbers = (*shape, *index.shape)
    return all(isinstance(n, int) for n in numbers) and typical(size_product(numbers)) <= MAX_COMPARISONS


def collected_by_rows(
    low: Lowering, shape: Shape, index: LazyTensor, values: LazyTensor, padding: int = -1
) -> LazyTensor:
    """Return the sum of the values for each row of a table of `shape`, in a fixed order; row `padding` gets none.

    `values` has the shape of `index` followed by that of a row. A negative index counts from the end.
    """
    index, values, rank = low.memory(index), low.memory(values), len(index.shape)
    rows, compute = shape[0], opmath(values.dtype)

    def at(body: Body, coords: Coords) -> Ref:
        found, row = body.cast(body.trace(index, coords[1 : rank + 1]), "int64"), body.index(coords[0])
        wrapped = body.apply("add", found, body.const(rows, "int64"))
        own = body.apply("or", body.apply("eq", found, row), body.apply("eq", wrapped, row))
        if padding >= 0:
            own = body.apply("and", own, body.apply("ne", row, body.const(padding, "int64")))
        given = body.cast(body.trace(values, coords[1:]), compute)
        return body.apply("where", own, given, body.const(0, compute))

    spread = make_lazy((rows, *values.shape), compute, at, (index, values), ops=6)
    inner = tuple(range(1, rank + 1))
    body, element, _ = low.trace_over(spread, (0, *range(rank + 1, len(spread.shape))), inner)
    view = low.buffer(shape, compute, name=f"{low.node}_rows")
    place = flatten(variables("i", shape), view.strides)
    low.loop(shape, index.shape, body, [Store(view.buffer, place, body.reduce("sum", element))])
    return from_view(view, compute)


def scatter_set(low: Lowering, x: LazyTensor, space: IndexedSpace, source: LazyTensor) -> LazyTensor:
    """Return `x` with the values of `source` at their positions; the last one wins, the same for whole rows."""
    start, end = space.start, space.start + space.rank
    common, zero = space.shape[start:end], Index()
    before, behind = (zero,) * start, (zero,) * (len(space.shape) - end)

    def place(body: Body, coords: Coords) -> Coords:
        there = space.place(body, (*before, *coords, *behind))
        return tuple(there[dim] for dim in space.found)

    shape = tuple(x.shape[dim] for dim in space.found)
    strides, count = contiguous(common), size_product(common)
    kind = "int32" if isinstance(count, int) and count < 2**31 else "int64"  # half the memory traffic
    last = collect(
        low,
        shape,
        kind,
        "max",
        every_place(common, place),
        lambda body, coords: body.cast(body.index(flatten(coords, strides)), kind),
    )
    compute = opmath(x.dtype)

    def at(body: Body, coords: Coords) -> Ref:
        number = body.trace(last, tuple(coords[dim] for dim in space.found))
        hit = body.apply("ge", number, body.const(0, kind))
        found = body.cast(body.apply("max", number, body.const(0, kind)), "int64")
        where = body.as_index(found, count)
        others = tuple(coord for dim, coord in enumerate(coords) if dim not in space.found)
        # unwritten positions read the first value: a mispredicted branch costs a CPU more. With data-dependent sizes
        # there may be no first value.
        with nullcontext() if needs_order(low) and isinstance(count, int) else body.masked(hit):
            middle = unflatten(where, common, body.ranges)
            new = body.trace(source, (*others[:start], *middle, *others[start:]))
        chosen = body.cast(to_dtype(body, new, x.dtype), compute)
        old = body.cast(body.trace(x, coords), compute)
        return to_dtype(body, body.apply("where", hit, chosen, old), x.dtype)

    return make_lazy(x.shape, x.dtype, at, (x, last, source), ops=4)


def scatter_combine(
    low: Lowering, x: LazyTensor, space: IndexedSpace, source: LazyTensor, how: str, include_self: bool = True
) -> LazyTensor:
    """Return `x` combined with the values at each position, or without `include_self` only those values.

    A position without values keeps its element.
    """
    dtype, compute = x.dtype, opmath(x.dtype)
    mode = REDUCTIONS[how]
    mode = "any" if dtype == "bool" and mode == "sum" else mode

    def value(body: Body, coords: Coords) -> Ref:
        return body.cast(to_dtype(body, body.trace(source, coords), dtype), compute)

    total = collect(low, x.shape, compute, mode, space, value)
    if mode == "sum" and how != "mean" and compute == dtype and include_self and constant_of(x) == 0:
        return total  # collected from zero, so no sum becomes -0.0
    count = None
    if how == "mean" or not include_self:
        count = collect(low, x.shape, "int64", "sum", space, lambda body, _: body.const(1, "int64"))
    combine = {"sum": "add", "any": "or", "prod": "mul", "max": "max", "min": "min"}[mode]

    def at(body: Body, coords: Coords) -> Ref:
        old, new = body.cast(body.trace(x, coords), compute), body.trace(total, coords)
        if include_self:
            new = body.apply(combine, old, new)
        if count is None:
            return to_dtype(body, new, dtype)
        number = body.trace(count, coords)
        hit = body.apply("ne", number, body.const(0, "int64"))
        if how == "mean":
            number = body.apply("add", number, body.const(1, "int64")) if include_self else number
            number = body.apply("max", number, body.const(1, "int64"))
            new = body.cast(to_dtype(body, new, dtype), compute)
            division = "div" if DTYPES[dtype] == "float" else "floordiv"
            new = body.apply(division, new, body.cast(number, compute))
        return to_dtype(body, new if include_self else body.apply("where", hit, new, old), dtype)

    return make_lazy(x.shape, dtype, at, (x, total) if count is None else (x, total, count), ops=4)


# --- scatter: one index for each value --------------------------------------------------------------------------------


def _lines(
    low: Lowering, x: LazyTensor, dim: int, index: LazyTensor
) -> tuple[LazyTensor, int, LazyTensor, IndexedSpace | None]:
    """Return `x`, `dim` and `index`, with at least one dimension, and the space of positions; None without values."""
    x, index = (t if t.shape else reshape(t, (1,)) for t in (x, index))
    dim %= len(x.shape)
    if 0 in index.shape or 0 in x.shape:
        return x, dim, index, None
    seen = places(low, index, x.shape[dim], wrap=False)

    def place(body: Body, coords: Coords) -> Coords:
        return (*coords[:dim], seen.at(body, coords), *coords[dim + 1 :])

    return x, dim, index, every_place(index.shape, place)


def scatter(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, index: LazyTensor, source: Any, *, reduce: str = ""
) -> Result:
    """Lower a general scatter: replace, or combine with `reduce`."""
    shape = x.shape
    if reduce and not meets(low, x.dtype, reduce, shape, index.shape):
        return NotImplemented
    if reduce in ("", "sum") and scatters_by_library(low, x, index, adds=bool(reduce)):
        put = f"scatter_.{'src' if isinstance(source, LazyTensor) else 'value'}"
        return by_library(low, x, f"aten.{'scatter_add_.default' if reduce else put}", dim, index, source)
    lined, _, index, space = _lines(low, x, dim, index)
    if space is None:
        return copy_of(x)
    if not isinstance(source, LazyTensor):
        source = constant(source, index.shape, x.dtype)
    source = source if source.shape else reshape(source, (1,))
    result = scatter_combine(low, lined, space, source, reduce) if reduce else scatter_set(low, lined, space, source)
    return reshape(result, shape)


def scatter_add(
    low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, index: LazyTensor, source: LazyTensor
) -> Result:
    return scatter(low, value, x, dim, index, source, reduce="sum")


def _one_a_line(combine: Callable[[Body, Ref, Ref], Ref], several: Callable[..., Any]) -> Callable[..., Any]:
    """Make the rule of a scatter of one element for each line along `dim`: every element compares. Else `several`."""

    def rule(low: Lowering, value: torch.Tensor, /, x: LazyTensor, dim: int, index: LazyTensor, source: Any) -> Result:
        at_dim = dim % len(x.shape) if x.shape else 0
        if not x.shape or index.shape != (*x.shape[:at_dim], 1, *x.shape[at_dim + 1 :]):
            return several(low, value, x, dim, index, source)
        dim = at_dim
        seen, dtype, zero = check_positions(low, index, x.shape[dim], wrap=False), dtype_name(value.dtype), Index()
        compute = opmath(dtype)

        def at(body: Body, coords: Coords) -> Ref:
            line = (*coords[:dim], zero, *coords[dim + 1 :])
            hit = body.apply("eq", body.cast(body.trace(seen, line), "int64"), body.index(coords[dim]))
            old = body.cast(body.trace(x, coords), compute)
            if isinstance(source, LazyTensor):
                new = body.cast(to_dtype(body, body.trace(source, line), dtype), compute)
            else:
                new = body.cast(body.const(source, dtype), compute)
            combined = body.cast(body.cast(combine(body, old, new), dtype), compute)
            return to_dtype(body, body.apply("where", hit, combined, old), dtype)

        args = (x, seen, source) if isinstance(source, LazyTensor) else (x, seen)
        return make_lazy(x.shape, dtype, at, args, ops=2)

    return rule


def _replace(_: Body, old: Ref, new: Ref) -> Ref:
    return new


def add_value(body: Body, old: Ref, new: Ref) -> Ref:
    return body.apply("or" if body.dtype(old) == "bool" else "add", old, new)


def _scatter_reduce(
    low: Lowering,
    value: torch.Tensor,
    /,
    x: LazyTensor,
    dim: int,
    index: LazyTensor,
    source: LazyTensor,
    how: str,
    *,
    include_self: bool = True,
) -> Result:
    if not meets(low, x.dtype, how, x.shape, index.shape):
        return NotImplemented
    lined, _, _, space = _lines(low, x, dim, index)
    if space is None:
        return copy_of(x)
    source = source if source.shape else reshape(source, (1,))
    return reshape(scatter_combine(low, lined, space, source, how, include_self), x.shape)


def _index_reduce(
    low: Lowering,
    value: torch.Tensor,
    /,
    x: LazyTensor,
    dim: int,
    index: LazyTensor,
    source: LazyTensor,
    how: str,
    *,
    include_self: bool = True,
) -> Result:
    given = x.shape
    if not meets(low, x.dtype, how, x.shape, source.shape):
        return NotImplemented
    x, index, source = (t if t.shape else reshape(t, (1,)) for t in (x, index, source))
    dim %= len(x.shape)
    shape = (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])
    if 0 in shape or 0 in x.shape:
        return copy_of(x)
    seen = places(low, index, x.shape[dim], wrap=False)

    def place(body: Body, coords: Coords) -> Coords:
        return (*coords[:dim], seen.at(body, (coords[dim],)), *coords[dim + 1 :])

    result = scatter_combine(low, x, every_place(shape, place), broadcast(source, shape), how, include_self)
    return reshape(result, given)


MIN_LIBRARY_ELEMENTS = 4096
"""Elements of a tensor below which a library call takes longer than loops over all of it."""
ONE_THREAD = 32768
"""Elements from which ATen's index_put_ may use several threads (at::internal::GRAIN_SIZE)."""
MIN_ELEMENTS_PER_PUT = 8
"""Elements of a tensor for each written value, from which the values count as few. Also the elements for each position,
from which looking up its value is cheap."""


def by_library(low: Lowering, x: LazyTensor, op: str, *given: Any) -> LazyTensor:
    """Return `x` after an in-place operation `op` of ATen with these further arguments; `x` itself is unchanged."""
    own = low.store(copy_of(x))
    assert own.view is not None
    low.extern(op, [own.view, *given], [own.view.buffer], mode="mutate", effect=True)
    return from_view(own.view, x.dtype)


def scatters_by_library(low: Lowering, x: LazyTensor, index: LazyTensor, *, adds: bool) -> bool:
    """Is a scatter on a CPU the library's? One that adds is, if it adds few values to a tensor other than zero."""
    if (
        not low.traits.aten.puts_few_values_fast
        or 0 in (*index.shape, *x.shape)
        or typical(x.numel) < MIN_LIBRARY_ELEMENTS
    ):
        return False
    return not adds or (typical(index.numel) * MIN_ELEMENTS_PER_PUT <= typical(x.numel) and constant_of(x) != 0)


def puts_by_library(low: Lowering, x: LazyTensor, places: Shape, values: Shape, *, adds: bool) -> bool:
    """Is an index_put on a CPU the library's? `places` is the shape of the positions, `values` that of the values."""
    count, most, numel = (size_product(shape) for shape in (values, places, x.shape))
    if not low.traits.aten.puts_few_values_fast or not (
        isinstance(count, int) and isinstance(most, int) and isinstance(numel, int)
    ):
        return False
    if numel < MIN_LIBRARY_ELEMENTS or count >= ONE_THREAD or count * MIN_ELEMENTS_PER_PUT > numel:
        return False
    return constant_of(x) != 0 if adds else most * MIN_ELEMENTS_PER_PUT > numel


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


GROUPED = "dcompile.sum_groups"
"""sum_groups(values, index, chunk) -> sums, keys, order, parts: implemented in `emit/triton/segment_sum.py`."""
CHUNK_ROWS = 8
"""Rows that a program adds up; each chunk has room for two partial sums."""
MAX_COMPARED_ROWS = 1 << 15
"""Rows compared pairwise: about 0.15 ms of a GPU, as long as a sort takes."""


def _embedding_backward(
    low: Lowering,
    value: torch.Tensor,
    /,
    grad: LazyTensor,
    indices: LazyTensor,
    rows: Size,
    padding: int,
    by_frequency: bool,
) -> Result:
    """Sum the gradients of every row. The forward has checked the indices; one outside would add nothing."""
    shape, dtype = shape_of(value), dtype_name(value.dtype)
    if by_frequency:
        return NotImplemented
    if 0 in grad.shape or 0 in shape:
        return constant(0, shape, dtype)
    compute = opmath(dtype)
    rank = len(indices.shape)
    if not needs_order(low) and few_rows(shape, indices):
        return _rounded(collected_by_rows(low, shape, indices, grad, padding), dtype)
    if are_grouped(low, shape, indices):
        return summed_by_group(low, shape, indices, grad, padding)
    if not meets(low, dtype, "sum", shape, grad.shape):
        return NotImplemented

    def row(body: Body, coords: Coords) -> Ref:
        return body.cast(body.trace(indices, coords[:rank]), "int64")

    def place(body: Body, coords: Coords) -> Coords:
        return _clamped(body, row(body, coords), rows), coords[-1]

    def element(body: Body, coords: Coords) -> Ref:
        inside = _is_inside(body, row(body, coords), rows, padding)
        given = body.cast(body.trace(grad, coords), compute)
        return body.apply("where", inside, given, body.const(0, compute))

    return _rounded(collect(low, shape, compute, "sum", every_place(grad.shape, place), element), dtype)


def are_grouped(low: Lowering, shape: Shape, index: LazyTensor) -> bool:
    """Are the rows of each index summed before the table is written? On GPUs, where sizes are static.

    Atomic additions would need a float32 table beside the result, to fill, add to and read again, and would come in any
    order. A sort takes a dozen kernels.
    """
    count, (rows, width) = size_product(index.shape), shape
    if low.traits.ordered_stores or not (isinstance(count, int) and isinstance(rows, int) and isinstance(width, int)):
        return False
    return count <= MAX_COMPARED_ROWS and max(rows, count * width) <= MAX_INT32_ELEMENTS


def summed_by_group(low: Lowering, shape: Shape, index: LazyTensor, values: LazyTensor, padding: int) -> LazyTensor:
    """Return, for each row of a table of `shape`, the sum of the values with its index, or zero."""
    count, (rows, width), dtype = size_product(index.shape), shape, values.dtype
    given = _laid_out(low, reshape(values, (count, width)))
    found = _laid_out(low, reshape(index, (count,)))
    sums = low.buffer((count, width), dtype, name=f"{low.node}_groups")
    keys = low.buffer((count,), "int32", name=f"{low.node}_keys")
    order = low.buffer((count,), "int32", name=f"{low.node}_order")
    runs = -(-int(count) // CHUNK_ROWS)  # type: ignore[arg-type]
    parts = low.buffer((2, runs, width), opmath(dtype), name=f"{low.node}_parts")
    low.extern(GROUPED, [given, found, CHUNK_ROWS], [view.buffer for view in (sums, keys, order, parts)], mode="out")
    last = _last_of_each(low, rows, from_view(found, index.dtype), padding)
    summed = from_view(sums, dtype)

    def at(body: Body, coords: Coords) -> Ref:
        number, zero = body.cast(body.trace(last, coords[:1]), "int64"), body.const(0, "int64")
        hit = body.apply("ge", number, zero)
        where = body.as_index(body.apply("max", number, zero), count)
        with body.masked(hit):
            return body.trace(summed, (where, coords[1]))

    return make_lazy(shape, dtype, at, (last, summed), ops=2)


def _last_of_each(low: Lowering, rows: Size, index: LazyTensor, padding: int) -> LazyTensor:
    """Return, for each row of a table, the last position of its index; negative for none, and for the padding."""

    def row(body: Body, coords: Coords) -> Ref:
        return body.cast(body.trace(index, coords), "int64")

    def place(body: Body, coords: Coords) -> Coords:
        return (_clamped(body, row(body, coords), rows),)

    def number(body: Body, coords: Coords) -> Ref:
        counts = _is_inside(body, row(body, coords), rows, padding)
        return body.apply("where", counts, body.index(as_index(coords[0]), "int32"), body.const(-1, "int32"))

    return collect(low, (rows,), "int32", "max", every_place(index.shape, place), number)


def _laid_out(low: Lowering, tensor: LazyTensor) -> View:
    """Return `tensor` in row-major order at the start of a buffer."""
    view, wanted = low.memory(tensor).view, contiguous(tensor.shape)
    if view is None or view.strides != wanted or view.offset != 0:
        view = low.store(low.memory(tensor), wanted).view
    assert view is not None
    return view


def _clamped(body: Body, row: Ref, rows: Size) -> Index:
    lowest, highest = body.const(0, "int64"), body.const(as_size(as_index(rows) - 1), "int64")
    return body.as_index(body.apply("min", body.apply("max", row, lowest), highest), rows)


def _is_inside(body: Body, row: Ref, rows: Size, padding: int) -> Ref:
    """Is an index a row of the table other than the padding?"""
    above, below = (body.apply(op, row, body.const(end, "int64")) for op, end in (("ge", 0), ("lt", rows)))
    inside = body.apply("and", above, below)
    if padding >= 0:
        inside = body.apply("and", inside, body.apply("ne", row, body.const(padding, "int64")))
    return inside


def _rounded(total: LazyTensor, dtype: str) -> LazyTensor:
    """Round a sum to the dtype of its result."""
    if total.dtype == dtype:
        return total
    return make_lazy(
        total.shape, dtype, lambda body, coords: to_dtype(body, body.trace(total, coords), dtype), (total,)
    )


RULES: dict[str, Rule] = {
    "aten.scatter.value": Rule(_one_a_line(_replace, scatter), recompute=False),
    "aten.scatter.src": Rule(_one_a_line(_replace, scatter), recompute=False),
    "aten.scatter_add.default": Rule(_one_a_line(add_value, scatter_add), recompute=False),
    "aten.scatter.reduce": Rule(scatter, recompute=False),
    "aten.scatter.value_reduce": Rule(scatter, recompute=False),
    "aten.scatter_reduce.two": Rule(_scatter_reduce, recompute=False),
    "aten.index_reduce.default": Rule(_index_reduce, recompute=False),
    "aten.index_put.default": Rule(_index_put, recompute=False),
    "aten._unsafe_index_put.default": Rule(_index_put, recompute=False, decomposed=True),
    "aten.embedding_dense_backward.default": Rule(_embedding_backward, recompute=False),
}
