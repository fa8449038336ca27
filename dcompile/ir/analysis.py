"""What can be read off a loop: variables, which values belong to the row, and the pass of the row that each needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from dcompile.ir.index import Index, Size, var
from dcompile.ir.nodes import (
    ITEMSIZE,
    Apply,
    Buffer,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Matmul,
    Reduce,
    Ref,
    Scan,
    Step,
    Store,
    Value,
    View,
    views_of,
)


def outer_names(loop: Loop) -> tuple[str, ...]:
    """Variables of the row space, `i0, i1, ...`."""
    return tuple(f"i{axis}" for axis in range(len(loop.outer)))


def inner_names(loop: Loop) -> tuple[str, ...]:
    """Variables of the space inside a row, `j0, j1, ...`."""
    return tuple(f"j{axis}" for axis in range(len(loop.inner)))


def sizes(loop: Loop) -> dict[str, Size]:
    """The length of each loop variable."""
    names = (*outer_names(loop), *inner_names(loop))
    return dict(zip(names, (*loop.outer, *loop.inner), strict=True))


def ranges(loop: Loop) -> dict[str, Size]:
    """The length of each loop variable: what the index algebra simplifies under."""
    return sizes(loop)


def runtime_refs(index: Index) -> tuple[Ref, ...]:
    """The values of the body that an index uses, in order."""
    return tuple(sorted(int(name[1:]) for name in index.variables if name[0] == "v"))


def operands(value: Value) -> tuple[Ref, ...]:
    """The earlier values that a value uses, also through an index or a mask."""
    match value:
        case Load(_, index, _, mask):
            return (*runtime_refs(index), *(() if mask is None else (mask,)))
        case IndexOf(index, _):
            return runtime_refs(index)
        case Apply(_, args, _):
            return args
        case Reduce(_, arg, _) | Scan(_, arg, _):
            return (arg,)
        case _:
            return ()


def turning_point(place: Value, number: Value) -> tuple[str, int] | None:
    """(variable, what it is there) where a position, which is a variable and a number, reaches `number`; else None."""
    if not (isinstance(place, IndexOf) and isinstance(number, Const) and len(place.index.variables) == 1):
        return None
    (name,) = place.index.variables
    offset = (place.index - var(name)).constant
    return None if offset is None else (name, int(number.value) - offset)


def store_operands(store: Store) -> tuple[Ref, ...]:
    """The values that a store uses."""
    return (store.value, *runtime_refs(store.index))


def ancestors(body: Sequence[Value], roots: Iterable[Ref], *, through_reduces: bool = True) -> set[Ref]:
    """All values that `roots` are computed from, themselves included.

    Without `through_reduces`, reductions are among them but not what is behind those.
    """
    seen: set[Ref] = set()
    stack = list(roots)
    while stack:
        ref = stack.pop()
        if ref not in seen:
            seen.add(ref)
            stack += operands(body[ref]) if through_reduces or not isinstance(body[ref], Reduce) else ()
    return seen


@lru_cache(maxsize=512)
def row_values(loop: Loop) -> tuple[bool, ...]:
    """For each value: does it belong to the row, having no inner variable and no `Scan` except through a `Reduce`?"""
    inner = frozenset(inner_names(loop))
    rows: list[bool] = []
    for value in loop.body:
        direct = isinstance(value, Scan) or (isinstance(value, (Load, IndexOf)) and bool(value.index.variables & inner))
        rows.append(isinstance(value, Reduce) or (not direct and all(rows[ref] for ref in operands(value))))
    return tuple(rows)


def is_row_store(loop: Loop, store: Store) -> bool:
    """Does the store happen once per row, its index and its value belonging to the row, or once per element?"""
    rows = row_values(loop)
    direct = any(name[0] == "j" for name in store.index.variables)
    return not direct and all(rows[ref] for ref in store_operands(store))


@lru_cache(maxsize=512)
def passes(loop: Loop) -> tuple[int, ...]:
    """For each value, the earliest pass over the row in which it can be known: a `Reduce` is known one pass later."""
    known: list[int] = []
    for value in loop.body:
        before = max((known[ref] for ref in operands(value)), default=0)
        known.append(before + 1 if isinstance(value, Reduce) else before)
    return tuple(known)


def can_overwrite(loop: Loop, source: str, target: str, *, combining: bool = False) -> bool:
    """May `target`, which the loop stores, take the very memory of `source`, which the loop reads for the last time?

    Every element of `source` is read by the iteration that overwrites it and by no other, in no later pass over the row
    than the one that stores: an emitter that loads again instead of keeping a value must not find the new one. The
    caller compares sizes and lifetimes. With `combining`, other stores of the loop may be column reductions: for
    emitters that take those in as they go through the rows, and do not load for them once more.
    """
    if loop.product is not None and source in loop.product.call.reads:
        return False  # which other programs may have to read still
    stores = [store for store in loop.stores if store.buffer == target]
    loads = [ref for ref, value in enumerate(loop.body) if isinstance(value, Load) and value.buffer == source]
    if len(stores) != 1 or any(store.mode != "set" for store in (stores if combining else loop.stores)):
        return False
    (store,) = stores
    if any(_load(loop, ref).index != store.index or runtime_refs(_load(loop, ref).index) for ref in loads):
        return False
    last = passes(loop)[store.value]
    return all(at <= last for at in _passes_that_need(loop, frozenset(loads)))


def takes_over(step: Step, old: Buffer, new: Buffer) -> bool:
    """May `new`, which the step writes, take the very memory of `old`, which it reads for the last time?

    For loops, see `can_overwrite`. A product that adds to a matrix (`aten.addmm`) may write its result over that.
    Empty buffers, and such of another extent, cannot.
    """
    if old.name not in step.reads or new.name not in step.writes or new.extent == 0:
        return False
    if ITEMSIZE[old.dtype] != ITEMSIZE[new.dtype] or old.extent != new.extent or old.name in step.writes:
        return False
    match step:
        case Loop():
            return can_overwrite(step, old.name, new.name, combining=new.device == "cpu")  # the C++ target's way
        case Extern(op, (View() as added, *factors), _, (_,), "out") if op in ADDING_PRODUCTS:
            lies_so = (added.buffer, added.shape, added.strides, added.offset) == (old.name, new.shape, new.strides, 0)
            return lies_so and all(view.buffer != old.name for factor in factors for view in views_of(factor))
        case _:
            return False


ADDING_PRODUCTS = ("aten.addmm.default", "aten.baddbmm.default")


def _load(loop: Loop, ref: Ref) -> Load:
    value = loop.body[ref]
    assert isinstance(value, Load)
    return value


def _passes_that_need(loop: Loop, loads: frozenset[Ref]) -> list[int]:
    """The pass of each reduction and store that is computed from one of `loads`, not counting through reductions."""
    known = passes(loop)
    tainted: set[Ref] = set(loads)
    needed: list[int] = []
    for ref, value in enumerate(loop.body):
        if not tainted.intersection(operands(value)):
            continue
        if isinstance(value, Reduce):
            needed.append(known[ref] - 1)
        else:
            tainted.add(ref)
    needed += [max(known[ref] for ref in refs) for s in loop.stores if tainted & set(refs := store_operands(s))]
    return needed


def product_buffer(product: Matmul) -> Buffer:
    """What the result of a product would be in memory."""
    *_, left, right = (view for view in product.call.args if isinstance(view, View))
    shape = left.shape[0], right.shape[1]
    return Buffer(product.out, product.dtype, shape, (shape[1], 1))


def of_one_element(value: Value) -> Value:
    """What a value is where every row has one element: a reduction is that element, and its position is 0."""
    if not isinstance(value, (Reduce, Scan)):
        return value
    return Const(0, value.dtype) if value.op.startswith("arg") else Apply("cast", (value.arg,), value.dtype)
