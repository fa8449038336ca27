"""Integer index algebra: divide polynomials over loop variables and sizes, substitute variables, flatten coordinates.

`Div` and `Mod` are floor division and its remainder, by numbers or by polynomials of size symbols. Every rewrite is
exact for floor division, whatever the sign.

Equal expressions are brought to one form. `(x//3)//4` is `x//12`, `(x%12)//4` is `(x//4)%3`, and `4*(x//4) + x%4` is
`x`. `(i0*s1 + i1)//s1` is `i0` where `i1` stays below `s1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import gcd

from dcompile.ir.bounds import (
    MIN_SYMBOL_VALUES,
    Interval,
    Ranges,
    bounds,
    is_below,
    is_nonnegative,
    is_symbol,
    upper_bound,
)
from dcompile.ir.polynomial import (
    TYPICAL,
    ZERO,
    Atom,
    Div,
    Extreme,
    Index,
    Mod,
    Monomial,
    Size,
    Var,
    as_index,
    as_size,
    collect,
    evaluate,
    evaluate_on,
    exact_quotient,
    single_atom,
    size_product,
    split_by,
    typical,
    var,
)

__all__ = [
    "MIN_SYMBOL_VALUES",
    "TYPICAL",
    "ZERO",
    "Atom",
    "Div",
    "Extreme",
    "Index",
    "Interval",
    "Mod",
    "Monomial",
    "Ranges",
    "Size",
    "Var",
    "as_index",
    "as_size",
    "bounds",
    "collect",
    "contiguous_strides",
    "divides_only_symbols",
    "element_span",
    "evaluate",
    "evaluate_on",
    "exact_quotient",
    "extreme",
    "flatten",
    "floordiv",
    "is_below",
    "is_nonnegative",
    "is_symbol",
    "modulo",
    "rename",
    "single_atom",
    "size_product",
    "split_by",
    "substitute",
    "substitute_size",
    "typical",
    "unflatten",
    "upper_bound",
    "var",
]


def floordiv(index: Size, divisor: Size, ranges: Ranges) -> Index:
    """`index // divisor`, simplified under `ranges`; the divisor is positive."""
    base, by = as_index(index), as_size(divisor)
    assert isinstance(by, Index) or by > 0, f"division by {divisor}"
    if by == 1:
        return base
    whole, rest = split_by(base, by)
    if not is_nonnegative(rest, ranges):
        whole, rest = ZERO, base  # the rest may be negative, though the whole is not
    if _is_remainder(rest, by, ranges):
        return whole
    parts = _common_factor(rest, by, ranges)
    if parts is not None:
        left, multiple, _, _ = parts
        return whole + floordiv(multiple, left, ranges)
    return whole + _div_atom(rest, by, ranges)


def modulo(index: Size, divisor: Size, ranges: Ranges) -> Index:
    """`index % divisor`, simplified under `ranges`; the divisor is positive."""
    base, by = as_index(index), as_size(divisor)
    assert isinstance(by, Index) or by > 0, f"remainder by {divisor}"
    if by == 1:
        return ZERO
    _, rest = split_by(base, by)
    if not is_nonnegative(rest, ranges):
        rest = base
    if _is_remainder(rest, by, ranges):
        return rest
    parts = _common_factor(rest, by, ranges)
    if parts is not None:
        left, multiple, below, factor = parts
        return modulo(multiple, left, ranges) * factor + below
    if rest.constant is not None and isinstance(by, int):
        return as_index(rest.constant % by)
    atom = single_atom(rest)
    if isinstance(atom, Mod) and exact_quotient(atom.divisor, by) is not None:
        return modulo(atom.base, by, ranges)  # (x % 12) % 4 == x % 4
    return Index((((Mod(rest, by),), 1),))


def _is_remainder(index: Index, divisor: Size, ranges: Ranges) -> bool:
    """Whether `index` is in [0, divisor). 0 is, though nothing may be known of the divisor but that it is positive."""
    return index == ZERO or (is_nonnegative(index, ranges) and is_below(index, divisor, ranges))


def _common_factor(index: Index, by: Size, ranges: Ranges) -> tuple[Size, Index, Index, Size] | None:
    """Find the largest factor of `by` with `index == factor * multiple + below` and `0 <= below < factor`.

    Returns (by / factor, multiple, below, factor). Then `index // by == multiple // (by / factor)`.
    """
    for factor in _factors(index, by):
        left = exact_quotient(by, factor)
        multiple, below = split_by(index, factor)
        if left is not None and multiple != ZERO and _is_remainder(below, factor, ranges):
            return left, multiple, below, factor
    return None


def _factors(index: Index, by: Size) -> Iterator[Size]:
    """Common factors of `by` and the first terms of `index`, for more and more terms, so the largest factor first."""
    product = as_index(by)
    if len(product.terms) != 1:
        return
    ((symbols, number),) = product.terms
    last: Size = 0
    for monomial, coefficient in sorted(index.terms, key=lambda term: (-len(term[0]), -abs(term[1]))):
        if monomial:
            symbols, number = _shared(symbols, monomial), gcd(number, coefficient)
            factor = as_size(Index(((symbols, number),)))
            if factor == 1:
                return
            if factor != last:
                yield factor
            last = factor


def _shared(left: Monomial, right: Monomial) -> Monomial:
    """Atoms that two monomials have in common."""
    rest = list(right)
    shared = []
    for atom in left:
        if atom in rest:
            rest.remove(atom)
            shared.append(atom)
    return tuple(shared)


def _div_atom(base: Index, by: Size, ranges: Ranges) -> Index:
    if base.constant is not None and isinstance(by, int):
        return as_index(base.constant // by)
    atom = single_atom(base)
    if isinstance(atom, Div):
        return floordiv(atom.base, as_index(atom.divisor) * by, ranges)  # (x // 3) // 4 == x // 12
    if isinstance(atom, Mod):
        left = exact_quotient(atom.divisor, by)
        if left is not None:
            return modulo(floordiv(atom.base, by, ranges), left, ranges)  # (x % 12) // 4 == (x // 4) % 3
    return Index((((Div(base, by),), 1),))


def extreme(kind: str, left: Size, right: Size) -> Index:
    """The larger ("max") or smaller ("min") of two sizes, simplified where the comparison can be proved."""
    a, b = as_index(left), as_index(right)
    if is_nonnegative(a - b, {}):
        return a if kind == "max" else b
    if is_nonnegative(b - a, {}):
        return b if kind == "max" else a
    a, b = sorted((a, b), key=str)
    return Index((((Extreme("max" if kind == "max" else "min", a, b),), 1),))


def divides_only_symbols(index: Index) -> bool:
    """Whether no loop variable is divided, only sizes."""
    if index.is_affine:
        return True
    atoms = (atom for monomial, _ in index.terms for atom in monomial if isinstance(atom, Div | Mod))
    return all(map(is_symbol, (name for atom in atoms for name in atom.base.variables)))


# --- substitution -----------------------------------------------------------------------------------------------------


def substitute(index: Index, values: Mapping[str, Index], ranges: Ranges) -> Index:
    """Replace variables by indices. Divisions are simplified under the ranges of the new variables."""
    if values.keys().isdisjoint(index.variables):
        return index
    return _substituted(index, tuple(values.items()), tuple(ranges.items()))


def substitute_size(size: Size, values: Mapping[str, Index]) -> Size:
    """`substitute` for a size: returns an int if the result is a constant."""
    return size if isinstance(size, int) else as_size(substitute(size, values, {}))


@lru_cache(maxsize=1 << 14)  # the layers of a model repeat the same substitutions
def _substituted(index: Index, replaced: tuple[tuple[str, Index], ...], known: tuple[tuple[str, Size], ...]) -> Index:
    values, ranges = dict(replaced), dict(known)
    terms: list[tuple[Monomial, int]] = []
    for monomial, coefficient in index.terms:
        product = as_index(coefficient)
        for atom in monomial:
            product = product * _substitute_atom(atom, values, ranges)
        terms += product.terms
    return collect(terms)


def _substitute_atom(atom: Atom, values: Mapping[str, Index], ranges: Ranges) -> Index:
    match atom:
        case Var(name):
            return values[name] if name in values else var(name)
        case Extreme(kind, left, right):
            return extreme(kind, substitute(left, values, ranges), substitute(right, values, ranges))
        case Div(base, divisor) | Mod(base, divisor):
            if values.keys().isdisjoint(base.variables | as_index(divisor).variables):
                return Index((((atom,), 1),))
            change = floordiv if isinstance(atom, Div) else modulo
            return change(substitute(base, values, ranges), substitute_size(divisor, values), ranges)


def rename(index: Index, names: Mapping[str, str]) -> Index:
    """Rename variables, all at once. Nothing is simplified, so each new variable must have the range of the old one."""
    if names.keys().isdisjoint(index.variables):
        return index
    return collect((_rename_atoms(monomial, names), coefficient) for monomial, coefficient in index.terms)


def _rename_atoms(monomial: Monomial, names: Mapping[str, str]) -> Monomial:
    return tuple(sorted((_rename_atom(atom, names) for atom in monomial), key=lambda atom: atom.key))


def _rename_atom(atom: Atom, names: Mapping[str, str]) -> Atom:
    match atom:
        case Var(name):
            return Var(names.get(name, name))
        case Extreme(kind, left, right):
            return Extreme(kind, rename(left, names), rename(right, names))
        case Div(base, divisor) | Mod(base, divisor):
            by = divisor if isinstance(divisor, int) else rename(divisor, names)
            return type(atom)(rename(base, names), by)


# --- coordinates ------------------------------------------------------------------------------------------------------


def flatten(indices: Iterable[Size], strides: Iterable[Size]) -> Index:
    """Sum of index times stride."""
    terms: list[tuple[Monomial, int]] = []
    for index, stride in zip(indices, strides, strict=True):
        terms += (as_index(index) * stride).terms
    return collect(terms)


def unflatten(flat: Index, shape: tuple[Size, ...], ranges: Ranges) -> tuple[Index, ...]:
    """Row-major coordinates of position `flat` in `shape`."""
    coordinates: list[Index] = []
    inner: Size = 1
    for position, size in reversed(list(enumerate(shape))):
        if size in (0, 1):
            coordinates.append(ZERO)
            continue
        quotient = floordiv(flat, inner, ranges)
        coordinates.append(quotient if position == 0 else modulo(quotient, size, ranges))
        inner = as_size(inner * size)
    return tuple(reversed(coordinates))


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides, in elements."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = as_size(step * size) if not (isinstance(size, int) and size == 0) else step
    return tuple(reversed(strides))


def element_span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from a tensor's first one to its last, gaps included; 0 for an empty tensor."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
