"""Turn a loop into a nest: choose the variable of rows, of elements, and of the simd loop.

A loop without inner space becomes rows of elements: one outer variable moves inside. So pointwise loops and row
programs share all later steps. Adjacent variables are merged where every index allows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dcompile.ir.analysis import inner_names, is_row_store, operands, outer_names, runtime_refs, without_reduction
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.index import (
    ZERO,
    Index,
    Size,
    as_index,
    as_size,
    exact_quotient,
    floordiv,
    is_symbol,
    size_product,
    substitute,
    typical,
    var,
)
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Reduce, Ref, Scan, Store, Value
from dcompile.ir.ops import OPS

OUTER_VECTOR_ROWS = 256
"""Rows computed together where adjacent rows, not elements, are contiguous: 1 KB of float32, read in order. Half of
that took 1.4 times as long in a sum over a middle dimension with a distance of 1 KB (16 MB, Zen 3)."""
MAX_VECTOR_ELEMENTS = 16
"""Elements of the widest vector."""
TILE_SIDE = 16
"""Side of a transpose tile."""
WIDE_TILE_SIDE = 64
"""Side of a transpose tile for elements of 2, 4 and 8 bytes, transposed in registers. Rows are long enough for hardware
prefetch, fewer pages are in use at a time, and whole cache lines are written. Float32 took 0.42 to 0.7 of the time
(docs/lab/constants.md, K4)."""
CHUNK_ELEMENTS = 4096
"""Elements of a pointwise row for one thread at a time."""
SCAN_COST = 10
"""Additions that one step of a scan costs: steps cannot overlap."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop variable from 0 to `size`; a tiled one advances by `tile`, and an inner axis covers the tile."""

    name: str
    size: Size
    tile: int = 1

    @property
    def count(self) -> Size:
        """Number of steps of the variable."""
        return self.size if self.tile == 1 else as_size(floordiv(as_index(self.size) + self.tile - 1, self.tile, {}))

    @property
    def divides(self) -> bool:
        """Are all tiles complete?"""
        return self.tile == 1 or exact_quotient(self.size, self.tile) is not None


@dataclass(frozen=True, slots=True)
class Nest:
    """The nest of a kernel. `rows` are collapsed and shared among threads; the last of `elements` is the simd loop.

    If there is a `lane`, it is the simd loop instead, innermost of all. It is a row variable, and each row value is
    then an array over it.
    """

    rows: tuple[Axis, ...]
    elements: tuple[Axis, ...]
    lane: Axis | None
    body: tuple[Value, ...]
    stores: tuple[Store, ...]
    row_stores: tuple[bool, ...]
    late: bool = False
    """Whether element stores happen in the last pass: an expanded argmax reads its operand once more than the loop
    says."""

    @property
    def element_names(self) -> frozenset[str]:
        return frozenset(axis.name for axis in self.elements)

    @property
    def points(self) -> Size:
        return size_product(axis.size for axis in self.axes)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Each variable once, at its full size."""
        tiled = {axis.name for axis in self.rows if axis.tile > 1}
        inner = tuple(axis for axis in self.elements if axis.name not in tiled)
        return (*self.rows, *((self.lane,) if self.lane else ()), *inner)


def flatten_loop(loop: Loop, *, in_one_pass: bool = False) -> Nest:
    """Return the nest that every target starts from: without axes of size 1, and with mergeable axes merged.

    `in_one_pass`: whether the target supports sums of exponentials in one pass.
    """
    row_stores = tuple(is_row_store(loop, store) for store in loop.stores)
    outer = [Axis(n, s) for n, s in zip(outer_names(loop), loop.outer, strict=True)]
    inner = [Axis(n, s) for n, s in zip(inner_names(loop), loop.inner, strict=True)]
    body, stores = (loop.body, loop.stores) if in_one_pass else _in_two_passes(loop.body, loop.stores)
    plain = len(body)
    body, stores = expand(body, stores, inner)
    late = len(body) != plain
    gone = {axis.name: ZERO for axis in (*outer, *inner) if axis.size == 1}
    outer, inner = [a for a in outer if a.size != 1], [a for a in inner if a.size != 1]
    body, stores = reindex(body, stores, gone)
    outer, body, stores = merge(outer, body, stores)
    inner, body, stores = merge(inner, body, stores)
    if not inner:
        body = tuple(without_reduction(value) for value in body)
    return Nest(tuple(outer), tuple(inner), None, body, stores, row_stores, late)


def make_nest(loop: Loop) -> Nest:
    """Return the nest of `loop` for CPUs."""
    nest = flatten_loop(loop)
    if not nest.elements:
        return _pointwise(list(nest.rows), nest.body, nest.stores)
    if nest.rows:
        slow, fast = nest.rows[-1], nest.elements[-1]
        names = nest.element_names
        often = [(index, weight) for index, weight in accesses(nest.body, nest.stores) if index.variables & names]
        score = {axis.name: _near(axis.name, often) for axis in (slow, fast)}
        nearer = score[slow.name] > score[fast.name] or (
            score[slow.name] == score[fast.name] and _reduces_few(nest) and may_exceed(slow.size, OUTER_VECTOR_ROWS - 1)
        )
        if nearer and typical(slow.size) >= 8:
            return replace(nest, rows=nest.rows[:-1], lane=slow)
    return nest


def _reduces_few(nest: Nest) -> bool:
    """Does each row reduce fewer elements than a vector holds, without gathers, and store only row values?

    `mvlgamma`, sums of three logarithms of gammas, took 0.17 of the time with vectors along rows.
    """
    (*others, fast) = nest.elements
    few = not others and not may_exceed(fast.size, MAX_VECTOR_ELEMENTS - 1)
    return few and all(nest.row_stores) and not any(runtime_refs(i) for i, _ in accesses(nest.body, nest.stores))


# --- pointwise loops --------------------------------------------------------------------------------------------------


def _pointwise(axes: list[Axis], body: tuple[Value, ...], stores: tuple[Store, ...]) -> Nest:
    """Choose the simd variable; tile a second one if some accesses are contiguous only along it."""
    every = (False,) * len(stores)
    if not axes:
        return Nest((), (Axis("i0", 1),), None, body, stores, every)
    scores = {axis.name: _near(axis.name, accesses(body, stores)) - 100 * (typical(axis.size) < 8) for axis in axes}
    best = max(reversed(axes), key=lambda axis: scores[axis.name])
    rest = [axis for axis in axes if axis is not best]
    other = max(rest, key=lambda axis: scores[axis.name], default=None)
    if (
        other
        and min(typical(other.size), typical(best.size)) >= 2 * TILE_SIDE
        and (itemsizes := _contiguous_only_along(other.name, best.name, body, stores))
    ):
        large = 1 not in itemsizes
        rows = [replace(axis, tile=_side(axis, large)) if axis is other else axis for axis in rest]
        return Nest((*rows, replace(best, tile=_side(best, large))), (other, best), None, body, stores, every)
    if may_exceed(best.size, 2 * CHUNK_ELEMENTS):
        return Nest((*rest, replace(best, tile=CHUNK_ELEMENTS)), (best,), None, body, stores, every)
    return Nest(tuple(rest), (best,), None, body, stores, every)


def accesses(body: tuple[Value, ...], stores: tuple[Store, ...]) -> list[tuple[Index, int]]:
    """Return indices and weights: a scattered store costs more than a gathered load."""
    loads = [(value.index, 2) for value in body if isinstance(value, Load)]
    return loads + [(store.index, 3) for store in stores]


def may_exceed(size: Size, limit: int) -> bool:
    """Is a size above the limit, or not known to be below it?"""
    return not isinstance(size, int) or size > limit


def stride(index: Index, name: str) -> Size | None:
    """Return the elements between neighbours along a variable; None if not constant. Indirect parts do not vary."""
    coefficient = index.coefficient(name)
    constant = coefficient is not None and all(map(is_symbol, coefficient.variables))
    return as_size(coefficient) if coefficient is not None and constant else None


def unit_strides(name: str, accesses: list[tuple[Index, int]]) -> int:
    return sum(weight for index, weight in accesses if stride(index, name) == 1)


def _near(name: str, accesses: list[tuple[Index, int]]) -> int:
    """Weigh accesses of stride 1, 0 and -1. Shared values count, too: per-channel values must not outvote an image."""
    return sum(weight for index, weight in accesses if stride(index, name) in (-1, 0, 1))


def _contiguous_only_along(other: str, best: str, body: tuple[Value, ...], stores: tuple[Store, ...]) -> set[int]:
    """Return the element sizes of accesses that are contiguous along `other` only."""
    found = [(value.index, value.dtype) for value in body if isinstance(value, Load)]
    found += [(store.index, body[store.value].dtype) for store in stores]
    return {
        ITEMSIZE[dtype] for index, dtype in found if stride(index, other) == 1 and typical(stride(index, best) or 0) > 1
    }


def _side(axis: Axis, large: bool) -> int:
    """Return the side of a tile along an axis."""
    return WIDE_TILE_SIDE if large and typical(axis.size) >= WIDE_TILE_SIDE else TILE_SIDE


# --- rewriting --------------------------------------------------------------------------------------------------------


def reindex(
    body: Iterable[Value], stores: Iterable[Store], values: dict[str, Index]
) -> tuple[tuple[Value, ...], tuple[Store, ...]]:
    """Substitute loop variables in every index."""
    if not values:
        return tuple(body), tuple(stores)

    def moved(index: Index) -> Index:
        return substitute(index, values, {})

    return (
        tuple(replace(v, index=moved(v.index)) if isinstance(v, (Load, IndexOf)) else v for v in body),
        tuple(replace(store, index=moved(store.index)) for store in stores),
    )


def merge(
    axes: list[Axis], body: tuple[Value, ...], stores: tuple[Store, ...]
) -> tuple[list[Axis], tuple[Value, ...], tuple[Store, ...]]:
    """Merge two adjacent variables wherever every index treats them as one."""
    at = len(axes) - 2
    while at >= 0:
        first, second = axes[at : at + 2]
        indices = [v.index for v in body if isinstance(v, (Load, IndexOf))] + [store.index for store in stores]
        if all(_steps_through(index, first.name, second) for index in indices):
            axes = [*axes[:at], Axis(second.name, size_product((first.size, second.size))), *axes[at + 2 :]]
            body, stores = reindex(body, stores, {first.name: ZERO})
        at -= 1
    return axes, body, stores


def _steps_through(index: Index, first: str, second: Axis) -> bool:
    a, b = index.coefficient(first), index.coefficient(second.name)
    return a is not None and b is not None and a == b * second.size


def expand(
    body: tuple[Value, ...], stores: tuple[Store, ...], inner: list[Axis]
) -> tuple[tuple[Value, ...], tuple[Store, ...]]:
    """Replace argmax by two plain reductions, which vectorize: the maximum, then the first position that holds it."""
    if not any(isinstance(value, Reduce) and value.op.startswith("arg") for value in body):
        return body, stores
    number: dict[Ref, Ref] = {}
    new: list[Value] = []
    position = ZERO
    for axis in inner:
        position = position * axis.size + var(axis.name)
    count = size_product(axis.size for axis in inner)
    kind = "int64" if may_exceed(count, 2**31 - 1) else "int32"

    def put(value: Value) -> Ref:
        new.append(value)
        return len(new) - 1

    for ref, value in enumerate(body):
        value = renumber(value, number)
        if isinstance(value, Reduce) and value.op.startswith("arg"):
            dtype = new[value.arg].dtype
            best = put(Reduce(value.op[3:], value.arg, dtype))
            hit = put(Apply("eq", (value.arg, best), "bool"))
            if dtype.startswith("float"):  # if any element is NaN, the maximum is
                hit = put(Apply("or", (hit, put(Apply("isnan", (value.arg,), "bool"))), "bool"))
            place = put(IndexOf(as_index(position), kind))
            end = put(Const(count, kind) if isinstance(count, int) else IndexOf(count, kind))
            value = Reduce("min", put(Apply("where", (hit, place, end), kind)), kind)
            if kind == "int32":
                value = Apply("cast", (put(value),), "int64")
        number[ref] = put(value)
    moved = {f"v{old}": var(f"v{ref}") for old, ref in number.items()}
    return tuple(new), tuple(replace(s, value=number[s.value], index=substitute(s.index, moved, {})) for s in stores)


def _in_two_passes(body: tuple[Value, ...], stores: tuple[Store, ...]) -> tuple[tuple[Value, ...], tuple[Store, ...]]:
    """Replace `sum_exp` by its definition: the maximum, then the sum of exponentials below it."""
    if not any(isinstance(value, Reduce) and value.op == "sum_exp" for value in body):
        return body, stores
    number: dict[Ref, Ref] = {}
    new: list[Value] = []
    for ref, value in enumerate(body):
        value = renumber(value, number)
        if isinstance(value, Reduce) and value.op == "sum_exp":
            at = len(new)
            new += [
                Reduce("max", value.arg, value.dtype),
                Apply("sub", (value.arg, at), value.dtype),
                Apply("exp", (at + 1,), value.dtype),
            ]
            value = Reduce("sum", at + 2, value.dtype)
        new.append(value)
        number[ref] = len(new) - 1
    return tuple(new), tuple(
        replace(store, value=number[store.value], index=renumber_values(store.index, number)) for store in stores
    )


def renumber(value: Value, number: dict[Ref, Ref]) -> Value:
    """Renumber a value's operands."""
    match value:
        case Load(_, index, _, mask):
            return replace(value, index=renumber_values(index, number), mask=None if mask is None else number[mask])
        case IndexOf(index, _):
            return replace(value, index=renumber_values(index, number))
        case Apply(_, args, _):
            return replace(value, args=tuple(number[arg] for arg in args))
        case Reduce(_, arg, _) | Scan(_, arg, _):
            return replace(value, arg=number[arg])
        case _:
            return value


def renumber_values(index: Index, number: dict[Ref, Ref]) -> Index:
    return substitute(index, {f"v{ref}": var(f"v{number[ref]}") for ref in runtime_refs(index)}, {})


# --- levels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Levels:
    """Whether each value varies within the row, and the pass from which it is known; the pass of each store."""

    element: tuple[bool, ...]
    known: tuple[int, ...]
    store_at: tuple[int, ...]
    live: frozenset[Ref]


def levels(nest: Nest) -> Levels:
    """Analyse the body of a nest."""
    element: list[bool] = []
    known: list[int] = []
    for value in nest.body:
        used = operands(value)
        direct = isinstance(value, (Load, IndexOf)) and bool(value.index.variables & nest.element_names)
        varies = direct or isinstance(value, Scan) or any(element[ref] for ref in used)
        element.append(varies and not isinstance(value, Reduce))
        known.append(max((known[ref] for ref in used), default=0) + isinstance(value, Reduce))
    uses = [(store.value, *runtime_refs(store.index)) for store in nest.stores]
    live: set[Ref] = {ref for refs in uses for ref in refs}
    for ref in reversed(range(len(nest.body))):
        if ref in live:
            live.update(operands(nest.body[ref]))
    last = max((known[ref] for ref in live), default=0)
    store_at = [
        last if nest.late and not row else max(known[ref] for ref in refs)
        for refs, row in zip(uses, nest.row_stores, strict=True)
    ]
    return Levels(tuple(element), tuple(known), tuple(store_at), frozenset(live))


def cone_cost(ref: Ref, body: tuple[Value, ...], stop: frozenset[Ref]) -> int:
    """Return the cost of recomputing an element value from its loads, in additions; `stop` are available values."""
    seen: set[Ref] = set()
    stack = [ref]
    total = 0
    while stack:
        at = stack.pop()
        if at in seen or at in stop:
            continue
        seen.add(at)
        value = body[at]
        if isinstance(value, Apply):
            total += OPS[value.op].cost
        elif isinstance(value, Scan):
            total += SCAN_COST
        stack += [] if isinstance(value, Reduce) else operands(value)
    return total
