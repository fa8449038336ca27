"""Merge two loops: find a common iteration space, check that shared elements line up, and join the bodies.

The common space is always that of one of the two loops. A loop without an inner space can change to any space that it
maps to one-to-one. This is the whole space (element work) or the rows alone (row work).
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

MAX_VALUES = 320  # a larger body spills registers and takes g++ over 0.2 s
MAX_BUFFERS = 28  # more streams than this defeat the hardware prefetchers


def merge(first: Loop, second: Loop) -> Loop | None:
    """Merge `first` and then `second`, which may depend on it; return None if their elements do not line up."""
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
            updates = joined.reads & joined.writes  # inputs updated in place
            counts_kept = combinings(joined) == combinings(first) | combinings(second)
            if counts_kept and all(can_overwrite(joined, name, name) for name in updates):
                return joined
    return None


class LoopMerger:
    """Memoized `merge`: pairs that differ only in names, such as those of equal layers, are merged once."""

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
    """Return the number of values that each combining store takes: one per row if it does not vary within a row.

    A value forwarded from the first loop may vary less than the load that it replaces, and would be counted too few
    times.
    """
    counts: dict[str, Size] = {}
    for store in loop.stores:
        if store.mode != "set":
            space = loop.outer if is_row_store(loop, store) else (*loop.outer, *loop.inner)
            counts[store.buffer] = size_of(space)
    return counts


def _common_spaces(first: Loop, second: Loop) -> Iterator[tuple[Loop, Loop]]:
    """Yield both loops over one space, in order of preference."""
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
    """Rewrite a row loop over the space of another loop with as many rows and columns."""
    outer, inner, bounds = host.outer, host.inner, ranges(host)
    values = coordinates("i", loop.outer, position("i", outer), bounds)
    values |= coordinates("j", loop.inner, position("j", inner), bounds)
    return respace(loop, outer, inner, values)


def _retold(loop: Loop, host: Loop) -> Iterator[Loop]:
    """Rewrite a loop without inner space over the space of `host`: with shared elements aligned, then in order."""
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
    """Does `index` reach each of `points` elements once, over all rows or over all elements?"""
    spaces = (space_ranges(outer, ()), space_ranges(outer, inner))
    return any(solve(index, space, index, space) is not None for space in spaces if size_of(space.values()) == points)


def _shared_elements(loop: Loop, host: Loop) -> Iterator[tuple[Index, Index]]:
    """Yield (index in loop, index in host) of elements that both touch: writes against reads, then common reads."""
    for store in loop.stores:
        yield from ((store.index, load.index) for load in _loads(host) if load.buffer == store.buffer)
    for store in host.stores:
        yield from ((load.index, store.index) for load in _loads(loop) if load.buffer == store.buffer)
    for load in _loads(loop):
        yield from ((load.index, other.index) for other in _loads(host) if load.buffer == other.buffer)


def _loads(loop: Loop) -> list[Load]:
    return [value for value in loop.body if isinstance(value, Load)]


def lines_up(first: Loop, second: Loop) -> bool:
    """Over one space: does `second` read of `first` only the element just computed at the same point?"""
    stores = {store.buffer: store for store in first.stores}
    if any(store.buffer in stores for store in second.stores):
        return False
    for load in _loads(second):
        store = stores.get(load.buffer)
        if store is None:
            continue
        if store.mode != "set" or store.index != load.index:
            return False
        if runtime_refs(store.index):  # equal variable names mean different values: each body has its own numbering
            return False
    return True


def join(first: Loop, second: Loop) -> Loop:
    """Join two loops over their common space; loads of what `first` stores become its values."""
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
    """Append a loop's values to `body`, sharing equal ones; loads of `stored` buffers become the stored values."""
    refs: dict[Ref, Ref] = {}
    for old, value in enumerate(loop.body):
        refs[old] = append_value(body, known, move_value(value, refs, stored, body, known))
    return refs


def move_value(
    value: Value, refs: dict[Ref, Ref], stored: dict[str, Ref], body: list[Value], known: dict[Value, Ref]
) -> Value | Ref:
    """Renumber a value's operands by `refs`; a load of a `stored` buffer becomes the stored value."""
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
    """Return the value, or 0 where the mask is false; 16-bit types go through float32, in which loops compute."""
    wide = dtype if dtype in COMPUTE_DTYPES else "float32"
    if wide != dtype:
        value = append_value(body, known, Apply("cast", (value,), wide))
    zero = append_value(body, known, Const(False if wide == "bool" else 0, wide))
    chosen = Apply("where", (mask, value, zero), wide)
    return chosen if wide == dtype else Apply("cast", (append_value(body, known, chosen),), dtype)


def append_value(body: list[Value], known: dict[Value, Ref], value: Value | Ref) -> Ref:
    """Append a value to a body unless it is `known` there; return its number."""
    if isinstance(value, int):
        return value
    if isinstance(value, Const):
        # 0 and False, 0.0 and -0.0 compare equal: the text distinguishes them
        key: Value = replace(value, value=0, dtype=f"{value.dtype}:{value.value!r}")
    else:
        key = value
    if key not in known:
        known[key] = len(body)
        body.append(value)
    return known[key]


def _renumber_indices(index: Index, refs: dict[Ref, Ref]) -> Index:
    """Renumber run-time variables such as `v7` along with their values."""
    used = runtime_refs(index)
    return substitute(index, {f"v{old}": var(f"v{refs[old]}") for old in used}, {}) if used else index


def without(loop: Loop, dead: frozenset[str]) -> Loop | None:
    """Remove stores to `dead` buffers and unused values; return None if no store remains."""
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
