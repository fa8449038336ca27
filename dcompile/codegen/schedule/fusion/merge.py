"""Two loops as one: find a common iteration space, check that every shared element lines up, join the bodies.

The common space is always that of one of the two loops. A loop without an inner space can be told over any space it has
a one-to-one map to: the whole space (it becomes element work) or the rows alone (it becomes row work).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dcompile.codegen.schedule.fusion.iteration_space import (
    Shape,
    coordinates,
    divisions,
    elementwise,
    position,
    refine,
    respace,
    size_of,
    solve,
    space_ranges,
)
from dcompile.ir.analysis import can_overwrite, is_row_store, operands, ranges, runtime_refs, store_operands
from dcompile.ir.canonical_names import Nameless, nameless, rename_buffers
from dcompile.ir.index import Index, Size, as_size, substitute, var
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Reduce, Ref, Scan, Value
from dcompile.ir.ops import COMPUTE_DTYPES

MAX_VALUES = 320  # a body beyond this spills registers and takes g++ over 0.2 s
MAX_BUFFERS = 28  # more streams than this defeat the hardware prefetchers


def merge(first: Loop, second: Loop) -> Loop | None:
    """`first` then `second` as one loop, or None if their elements do not line up. `second` may depend on `first`."""
    if len(first.body) + len(second.body) > MAX_VALUES:
        return None
    if len(first.reads | first.writes | second.reads | second.writes) > MAX_BUFFERS:
        return None
    allowed = divisions(first) + divisions(second)
    for a, b in _common_spaces(first, second):
        if divisions(a) + divisions(b) > allowed:
            a, b = refine(a, b)
        if divisions(a) + divisions(b) <= allowed and lines_up(a, b):
            joined = join(a, b)
            updates = joined.reads & joined.writes  # inputs changed in place
            counts_kept = combinings(joined) == combinings(first) | combinings(second)
            if counts_kept and all(can_overwrite(joined, name, name) for name in updates):
                return joined
    return None


class LoopMerger:
    """`merge` for many pairs. Pairs that differ in names alone, as those of equal layers, are merged once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Nameless, Nameless], Loop | None] = {}

    def __call__(self, first: Loop, second: Loop) -> Loop | None:
        names: dict[str, str] = {}
        pair = nameless(first, names), nameless(second, names)
        try:
            merged = self._known[pair]
        except KeyError:
            merged = self._known[pair] = merge(pair[0][0], pair[1][0])
        if merged is None:
            return None
        origin = tuple(dict.fromkeys((*first.origin, *second.origin)))
        own = {number: name for name, number in names.items()}
        return replace(rename_buffers(merged, own), name=first.name, origin=origin)


def combinings(loop: Loop) -> dict[str, Size]:
    """How many values each combining store takes in: one per row if nothing in it varies within a row.

    A value that is taken over from the loop before may vary less than the load it replaces, and would then be counted
    too few times.
    """
    counts: dict[str, Size] = {}
    for store in loop.stores:
        if store.mode != "set":
            space = loop.outer if is_row_store(loop, store) else (*loop.outer, *loop.inner)
            counts[store.buffer] = size_of(space)
    return counts


def _common_spaces(first: Loop, second: Loop) -> Iterator[tuple[Loop, Loop]]:
    """Both loops over one space, in order of preference."""
    rows, columns = size_of(first.outer), size_of(first.inner)
    rows2, columns2 = size_of(second.outer), size_of(second.inner)
    if first.inner and second.inner:
        if (rows, columns) == (rows2, columns2):
            yield first, _onto(second, first)
    elif first.inner:
        if rows2 in (as_size(rows * columns), rows):
            yield from ((first, moved) for moved in _retold(second, first))
    elif second.inner:
        if rows in (as_size(rows2 * columns2), rows2):
            yield from ((moved, second) for moved in _retold(first, second))
    elif rows == rows2:
        yield from ((moved, second) for moved in _retold(first, second))
        yield from ((first, moved) for moved in _retold(second, first))


def _onto(loop: Loop, host: Loop) -> Loop:
    """A row loop told over the space of another with as many rows and columns."""
    outer, inner, bounds = host.outer, host.inner, ranges(host)
    values = coordinates("i", loop.outer, position("i", outer), bounds)
    values |= coordinates("j", loop.inner, position("j", inner), bounds)
    return respace(loop, outer, inner, values)


def _retold(loop: Loop, host: Loop) -> Iterator[Loop]:
    """A loop without inner space, told over the space of `host`: first so that shared elements meet, then in order."""
    loop = elementwise(loop)
    outer, inner, bounds, own = host.outer, host.inner, ranges(host), ranges(loop)
    for mine, theirs in _shared_elements(loop, host):
        if len(theirs.variables & bounds.keys()) == 0:
            continue
        values = solve(mine, own, theirs, bounds)
        if values is not None and _one_to_one(theirs, size_of(loop.outer), outer, inner):
            yield respace(loop, outer, inner, values)
    rows = position("i", outer)
    flat = rows if size_of(loop.outer) == size_of(outer) else rows * size_of(inner) + position("j", inner)
    yield respace(loop, outer, inner, coordinates("i", loop.outer, flat, bounds))


def _one_to_one(index: Index, points: Size, outer: Shape, inner: Shape) -> bool:
    """Does `index` meet each of `points` elements once, over all rows or over all elements?"""
    spaces = (space_ranges(outer, ()), space_ranges(outer, inner))
    return any(solve(index, space, index, space) is not None for space in spaces if size_of(space.values()) == points)


def _shared_elements(loop: Loop, host: Loop) -> Iterator[tuple[Index, Index]]:
    """(index in loop, index in host) of elements that both touch: writes against reads first, then common reads."""
    for store in loop.stores:
        yield from ((store.index, load.index) for load in _loads(host) if load.buffer == store.buffer)
    for store in host.stores:
        yield from ((load.index, store.index) for load in _loads(loop) if load.buffer == store.buffer)
    for load in _loads(loop):
        yield from ((load.index, other.index) for other in _loads(host) if load.buffer == other.buffer)


def _loads(loop: Loop) -> list[Load]:
    return [value for value in loop.body if isinstance(value, Load)]


def lines_up(first: Loop, second: Loop) -> bool:
    """Over one space: is every element that `second` reads of `first` the one just computed at the same point?"""
    stores = {store.buffer: store for store in first.stores}
    if any(store.buffer in stores for store in second.stores):
        return False
    for load in _loads(second):
        store = stores.get(load.buffer)
        if store is None:
            continue
        if store.mode != "set" or store.index != load.index:
            return False
        if runtime_refs(store.index):  # equal names, but each body numbers its own values
            return False
    return True


def join(first: Loop, second: Loop) -> Loop:
    """One loop over their common space; what `second` loads of `first` is taken from the value directly."""
    body: list[Value] = []
    known: dict[Value, Ref] = {}
    refs = append(body, known, first, {})
    stored = {store.buffer: refs[store.value] for store in first.stores if store.mode == "set"}
    refs2 = append(body, known, second, stored)
    stores = [replace(s, index=_renumber_indices(s.index, refs), value=refs[s.value]) for s in first.stores]
    stores += [replace(s, index=_renumber_indices(s.index, refs2), value=refs2[s.value]) for s in second.stores]
    origin = tuple(dict.fromkeys((*first.origin, *second.origin)))
    return replace(first, body=tuple(body), stores=tuple(stores), origin=origin)


def append(body: list[Value], known: dict[Value, Ref], loop: Loop, stored: dict[str, Ref]) -> dict[Ref, Ref]:
    """Append a loop's values to `body`, sharing equal ones; loads of `stored` buffers become those values."""
    refs: dict[Ref, Ref] = {}
    for old, value in enumerate(loop.body):
        refs[old] = append_value(body, known, move_value(value, refs, stored, body, known))
    return refs


def move_value(
    value: Value, refs: dict[Ref, Ref], stored: dict[str, Ref], body: list[Value], known: dict[Value, Ref]
) -> Value | Ref:
    """A value whose operands are where `refs` says; where it loads one of `stored`, the value that was stored."""
    match value:
        case Const():
            return value
        case IndexOf():
            return replace(value, index=_renumber_indices(value.index, refs))
        case Load():
            mask = None if value.mask is None else refs[value.mask]
            if value.buffer not in stored:
                return replace(value, index=_renumber_indices(value.index, refs), mask=mask)
            if mask is None:
                return stored[value.buffer]
            return mask_value(stored[value.buffer], mask, value.dtype, body, known)
        case Apply():
            return replace(value, args=tuple(refs[arg] for arg in value.args))
        case Reduce() | Scan():
            return replace(value, arg=refs[value.arg])


def mask_value(value: Ref, mask: Ref, dtype: str, body: list[Value], known: dict[Value, Ref]) -> Value:
    """The value, or 0 where the mask is false: of 16 bits, in which loops do not compute, by way of float32."""
    wide = dtype if dtype in COMPUTE_DTYPES else "float32"
    if wide != dtype:
        value = append_value(body, known, Apply("cast", (value,), wide))
    zero = append_value(body, known, Const(False if wide == "bool" else 0, wide))
    chosen = Apply("where", (mask, value, zero), wide)
    return chosen if wide == dtype else Apply("cast", (append_value(body, known, chosen),), dtype)


def append_value(body: list[Value], known: dict[Value, Ref], value: Value | Ref) -> Ref:
    """Append a value to a body unless it is `known` there; its number."""
    if isinstance(value, int):
        return value
    if isinstance(value, Const):
        # 0 and False, 0.0 and -0.0 compare equal: the text keeps them apart
        key: Value = replace(value, value=0, dtype=f"{value.dtype}:{value.value!r}")
    else:
        key = value
    if key not in known:
        known[key] = len(body)
        body.append(value)
    return known[key]


def _renumber_indices(index: Index, refs: dict[Ref, Ref]) -> Index:
    """Run-time variables `v7` follow the values they name."""
    used = runtime_refs(index)
    return substitute(index, {f"v{old}": var(f"v{refs[old]}") for old in used}, {}) if used else index


def without(loop: Loop, dead: frozenset[str]) -> Loop | None:
    """The loop without its stores to `dead` buffers and without values that nothing uses; None if nothing is left."""
    stores = tuple(store for store in loop.stores if store.buffer not in dead)
    if not stores:
        return None
    needed: set[Ref] = set()
    stack = [ref for store in stores for ref in store_operands(store)]
    while stack:
        ref = stack.pop()
        if ref not in needed:
            needed.add(ref)
            stack += operands(loop.body[ref])
    kept = sorted(needed)
    refs = {old: new for new, old in enumerate(kept)}
    body: list[Value] = []
    for old in kept:
        value = move_value(loop.body[old], refs, {}, [], {})
        assert not isinstance(value, int)
        body.append(value)
    stores = tuple(replace(s, index=_renumber_indices(s.index, refs), value=refs[s.value]) for s in stores)
    return replace(loop, body=tuple(body), stores=stores)
