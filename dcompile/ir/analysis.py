"""Loop analyses: loop variables, row values, and the earliest pass over a row in which each value is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.gemm import matmul_of
from dcompile.ir.index import Index, Size, var
from dcompile.ir.nodes import (
    Apply,
    Const,
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
)


def outer_names(loop: Loop) -> tuple[str, ...]:
    """Variables of the row space, `i0, i1, ...`."""
    return tuple(f"i{axis}" for axis in range(len(loop.outer)))


def inner_names(loop: Loop) -> tuple[str, ...]:
    """Variables of the inner space, `j0, j1, ...`."""
    return tuple(f"j{axis}" for axis in range(len(loop.inner)))


def sizes(loop: Loop) -> dict[str, Size]:
    """Extent of each loop variable."""
    names = (*outer_names(loop), *inner_names(loop))
    return dict(zip(names, (*loop.outer, *loop.inner), strict=True))


def ranges(loop: Loop) -> dict[str, Size]:
    """Extent of each loop variable, under which the index algebra simplifies."""
    return sizes(loop)


def runtime_refs(index: Index) -> tuple[Ref, ...]:
    """Positions of the body values that an index uses, in order."""
    return tuple(sorted(int(name[1:]) for name in index.variables if name[0] == "v"))


def operands(value: Value) -> tuple[Ref, ...]:
    """Positions of the earlier values that a value uses, also through an index or a mask."""
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


def is_at_known_place(value: Value) -> bool:
    """Does no other value decide which element a load or a position is, or whether it is read?"""
    return not (isinstance(value, Load | IndexOf) and operands(value))


def turning_point(place: Value, number: Value) -> tuple[str, int] | None:
    """(variable, its value) where a position, a variable plus a constant, equals `number`; None for other positions."""
    if not (isinstance(place, IndexOf) and isinstance(number, Const) and len(place.index.variables) == 1):
        return None
    (name,) = place.index.variables
    offset = (place.index - var(name)).constant
    return None if offset is None else (name, int(number.value) - offset)


def is_clamped(body: Sequence[Value], ref: Ref, most: float) -> bool:
    """Return whether a value's last operations leave it NaN, or from -`most` to `most`."""
    match body[ref]:
        case Apply("cast", (arg,), _):
            return body[arg].dtype in ("float32", "bfloat16", "float16") and is_clamped(body, arg, most)
        case Apply("min" | "max" as op, (arg, limit), _):
            match body[arg]:
                case Apply("min" | "max" as other, (_, opposite), _):
                    return op != other and _is_within(body[limit], most) and _is_within(body[opposite], most)
    return False


def _is_within(value: Value, most: float) -> bool:
    return isinstance(value, Const) and abs(value.value) <= most


def is_softmax(body: Sequence[Value], ref: Ref) -> bool:
    """Return whether a value is a row's exponential, below the row's maximum, divided by the sum of all of them."""
    match body[ref]:
        case Apply("div", (exp, total), _):
            match body[exp], body[total]:
                case Apply("exp", (shifted,), _), Reduce("sum", summed, _) if summed == exp:
                    match body[shifted]:
                        case Apply("sub", (x, top), _):
                            return body[top] == Reduce("max", x, body[x].dtype)
    return False


def store_operands(store: Store) -> tuple[Ref, ...]:
    """Positions of the values that a store uses."""
    return (store.value, *runtime_refs(store.index))


def ancestors(body: Sequence[Value], roots: Iterable[Ref], *, through_reduces: bool = True) -> set[Ref]:
    """Positions of all values that `roots` are computed from, themselves included.

    Without `through_reduces`, reductions are included, but not their operands.
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
    """Whether each value is a row value: it depends on no inner variable and no `Scan`, except through a `Reduce`."""
    inner = frozenset(inner_names(loop))
    rows: list[bool] = []
    for value in loop.body:
        direct = isinstance(value, Scan) or (isinstance(value, (Load, IndexOf)) and bool(value.index.variables & inner))
        rows.append(isinstance(value, Reduce) or (not direct and all(rows[ref] for ref in operands(value))))
    return tuple(rows)


def is_row_store(loop: Loop, store: Store) -> bool:
    """Whether a store happens once per row (its index and value are row values) instead of once per element."""
    rows = row_values(loop)
    direct = any(name[0] == "j" for name in store.index.variables)
    return not direct and all(rows[ref] for ref in store_operands(store))


@lru_cache(maxsize=512)
def passes(loop: Loop) -> tuple[int, ...]:
    """Earliest pass over the row in which each value is known; a `Reduce` is known one pass after its operand."""
    known: list[int] = []
    for value in loop.body:
        before = max((known[ref] for ref in operands(value)), default=0)
        known.append(before + 1 if isinstance(value, Reduce) else before)
    return tuple(known)


def can_overwrite(loop: Loop, source: str, target: str, *, combining: bool = False) -> bool:
    """Whether `target`, which the loop stores, may reuse the memory of `source`, which it reads for the last time.

    Each element of `source` must be read only by the iteration that overwrites it. The read must come in no later pass
    over the row than the store, since emitters may load again instead of keeping a value. The caller compares sizes and
    live ranges.

    `combining`: other stores of the loop may be column reductions. This is for emitters that accumulate those during
    the same sweep over the rows, without loading again.
    """
    if loop.product is not None and source in loop.product.call.reads:
        return False  # other programs of the kernel may still have to read it
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
    """Whether `new`, which the step writes, may reuse the memory of `old`, which the step reads for the last time.

    For loops, see `can_overwrite`. A product that adds to a matrix (`aten.addmm`) may write its result over that
    matrix. Empty buffers, and buffers of different extents, cannot share memory.
    """
    if old.name not in step.reads or new.name not in step.writes or new.extent == 0:
        return False
    if ITEMSIZE[old.dtype] != ITEMSIZE[new.dtype] or old.extent != new.extent or old.name in step.writes:
        return False
    match step:
        case Loop():
            # C++ kernels accumulate column reductions in the same sweep over the rows
            return can_overwrite(step, old.name, new.name, combining=new.device == "cpu")
        case _:
            call = matmul_of(step)
            if call is None or old.name in (call.left.buffer, call.right.buffer):
                return False
            return call.added == View(old.name, new.shape, new.strides)


def _load(loop: Loop, ref: Ref) -> Load:
    value = loop.body[ref]
    assert isinstance(value, Load)
    return value


def _passes_that_need(loop: Loop, loads: frozenset[Ref]) -> list[int]:
    """Pass of each reduction and store that is computed from one of `loads`, not counting paths through reductions."""
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
    """Buffer for the result of a GEMM, as it would be in memory."""
    *_, left, right = product.call.views
    shape = left.shape[0], right.shape[1]
    return Buffer(product.out, product.dtype, shape, (shape[1], 1))


def without_reduction(value: Value) -> Value:
    """Replace a reduction by its value for rows of one element: that element, or position 0 for argmax and argmin."""
    if not isinstance(value, (Reduce, Scan)):
        return value
    return Const(0, value.dtype) if value.op.startswith("arg") else Apply("cast", (value.arg,), value.dtype)
