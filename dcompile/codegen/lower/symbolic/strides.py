"""Strides and index maps of lowering: lower bounds, simplification after reshapes, layouts of views."""

from __future__ import annotations

from functools import lru_cache

from dcompile.ir.index import (
    Atom,
    Div,
    Index,
    Mod,
    Monomial,
    Ranges,
    Size,
    as_index,
    as_size,
    divides_only_symbols,
    exact_quotient,
    flatten,
    is_nonnegative,
    is_symbol,
    unflatten,
    upper_bound,
    var,
)

Shape = tuple[Size, ...]


def lower_bound(index: Index, ranges: Ranges) -> int | None:
    """Return the smallest value of `index`, or None if it has no known bound."""
    bound = upper_bound(index * -1, ranges)
    return None if bound is None else -bound


@lru_cache(maxsize=8192)
def simplify(index: Index) -> Index:
    """Join `d*(x//d) + x%d` to `x`, and `d*((x//d)%m) + x%d` to `x%(d*m)`: the remains of an undone reshape."""
    if index.is_affine:
        return index
    single = {monomial[0]: (monomial, c) for monomial, c in index.terms if len(monomial) == 1}
    for low, (low_term, step) in single.items():
        if not isinstance(low, Mod):
            continue
        for high, (high_term, coefficient) in single.items():
            joined = _join(low, high)
            if joined is not None and as_size(as_index(low.divisor) * step) == coefficient:
                return simplify(_without(index, low_term, high_term) + joined * step)
    return index


def _join(low: Mod, high: Atom) -> Index | None:
    match high:
        case Div(base=base, divisor=divisor) if base == low.base and divisor == low.divisor:
            return base
        case Mod(base=Index(terms=(((Div(base=base, divisor=divisor),), 1),)), divisor=outer) if (
            base == low.base and divisor == low.divisor
        ):
            return Index((((Mod(base, as_size(as_index(divisor) * outer)),), 1),))
    return None


def _without(index: Index, *monomials: Monomial) -> Index:
    return Index(tuple(term for term in index.terms if term[0] not in monomials))


def variables(prefix: str, shape: Shape) -> tuple[Index, ...]:
    """Return `i0, i1, ...`, with 0 where the size is 1."""
    return tuple(var(f"{prefix}{n}") if size != 1 else Index() for n, size in enumerate(shape))


def ranges_of(prefix: str, shape: Shape) -> dict[str, Size]:
    return {f"{prefix}{n}": size for n, size in enumerate(shape)}


def reshape_coords(coords: tuple[Index, ...], source: Shape, target: Shape, ranges: Ranges) -> tuple[Index, ...]:
    """Return coordinates in `target` (the base) of the element at `coords` in `source` (the view)."""
    if 0 in source:
        return (coords[source.index(0)],) * len(target)  # no such element, and no iteration in the loop either
    return unflatten(simplify(flatten(coords, _contiguous(source))), target, ranges)


@lru_cache(maxsize=1024)
def _contiguous(shape: Shape) -> Shape:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = as_size(step * size) if size != 0 else step
    return tuple(reversed(strides))


def contiguous(shape: Shape) -> Shape:
    """Return row-major strides."""
    return _contiguous(shape)


def affine_strides(index: Index, shape: Shape) -> tuple[Shape, Size] | None:
    """Return strides and offset of an index over `i0, i1, ...` if it is a strided view."""
    if not divides_only_symbols(index):
        return None
    strides: list[Size] = []
    rest = index
    for n, size in enumerate(shape):
        coefficient = index.coefficient(f"i{n}")
        if coefficient is None or not all(map(is_symbol, coefficient.variables)):
            return None
        if not is_nonnegative(coefficient, {}):
            return None  # torch has no negative strides
        strides.append(as_size(coefficient) if size != 1 else 0)
        rest = rest - var(f"i{n}") * coefficient
    fixed = all(map(is_symbol, rest.variables)) and is_nonnegative(rest, {})
    return (tuple(strides), as_size(rest)) if fixed else None


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Return whether the elements provably fill memory without gaps or overlap (any order of dimensions)."""
    if 0 in shape:
        return True
    left = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1]
    expected: Size = 1
    while left:
        found = next((pair for pair in left if pair[0] == expected), None)
        if found is None:
            return False
        left.remove(found)
        expected = as_size(expected * found[1])
    return True


def is_distinct(shape: Shape, strides: Shape) -> bool:
    """Return whether no two elements share an address; there may be gaps between them."""
    if 0 in shape or is_dense(shape, strides):
        return True
    pairs = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1]
    fixed = sorted((stride, size) for stride, size in pairs if isinstance(stride, int) and isinstance(size, int))
    left = [
        *fixed,
        *(pair for pair in reversed(pairs) if pair not in fixed),
    ]  # symbolic ones start with the last dimension
    reach = as_index(0)
    for stride, size in left:
        if not is_nonnegative(as_index(stride) - reach - 1, {}):
            return False  # not provable
        reach = reach + stride * (as_index(size) - 1)
    return True


def same_layout(shape: Shape, left: Shape, right: Shape) -> bool:
    """Return whether strides are equal in all dimensions of more than one element."""
    if 0 in shape:
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, left, right, strict=True))


def view_strides(shape: Shape, strides: Shape, target: Shape) -> Shape | None:
    """Return the strides of a view of a strided array as `target`, or None where torch's view would need a copy."""
    if 0 in shape:
        return contiguous(target)
    blocks: list[tuple[Size, Size]] = []  # (elements, innermost stride) of contiguous runs
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == as_size(size * stride):
            blocks[-1] = (as_size(blocks[-1][0] * size), stride)
        else:
            blocks.append((size, stride))
    result: list[Size] = []
    left, step = blocks.pop() if blocks else (1, 1)
    for size in reversed(target):
        if size == 1:
            result.append(step)
            continue
        if left == 1 and blocks:
            left, step = blocks.pop()
        quotient = exact_quotient(left, size)
        if quotient is None:
            return None
        result.append(step)
        left = quotient
        step = as_size(step * size)
    return tuple(reversed(result))
