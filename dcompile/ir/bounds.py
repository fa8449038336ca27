"""Bounds of indices: numeric intervals, and proofs of inequalities with symbolic sizes.

Intervals suffice where every bound is a number. With symbolic bounds, the proof of `x >= 0` eliminates one variable
after another. It sets the variable to the end of its range at which `x` is smallest, until only size symbols are left.
Each symbol is then written as its smallest value plus a rest. If no coefficient is negative, `x` is not negative.

For example, `i1 < s1` follows from `s1 - 1 - i1`, which is 0 at `i1 = s1 - 1`. An inequality without a proof may still
be true.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

from dcompile.ir.polynomial import ZERO, Atom, Div, Extreme, Index, Mod, Monomial, Size, Var, as_index, split_by, var

Ranges: TypeAlias = Mapping[str, Size]
"""Exclusive upper bound of each variable whose bound is known. All variables but `z...` are at least 0."""
Interval: TypeAlias = "tuple[int | None, int | None]"
"""Smallest and largest value; None where there is no bound."""

MIN_SYMBOL_VALUES: Mapping[str, int | None] = {"s": 2, "u": 0, "z": None}
"""Smallest value of a size symbol, by the first letter of its name."""


def is_symbol(name: str) -> bool:
    """Whether a variable is a size, rather than a loop variable or a run-time integer."""
    return name[0] in MIN_SYMBOL_VALUES


def upper_bound(index: Index, ranges: Ranges) -> int | None:
    """Upper bound of `index` where every variable stays below its range; None if none is known."""
    return bounds(index, ranges)[1]


def bounds(index: Index, ranges: Ranges) -> Interval:
    """Bounds of `index`: conservative, and exact where its terms vary independently."""
    low: int | None = 0
    high: int | None = 0
    for monomial, coefficient in index.terms:
        least, greatest = _product_bounds(monomial, ranges)
        if coefficient < 0:
            least, greatest = greatest, least
        low = None if low is None or least is None else low + coefficient * least
        high = None if high is None or greatest is None else high + coefficient * greatest
    return low, high


def _product_bounds(monomial: Monomial, ranges: Ranges) -> Interval:
    least: int | None = 1
    greatest: int | None = 1
    for atom in monomial:
        low, high = _atom_bounds(atom, ranges)
        if low is None or low < 0 or least is None or least < 0:
            corners = [None if x is None or y is None else x * y for x in (least, greatest) for y in (low, high)]
            known = [corner for corner in corners if corner is not None]
            least, greatest = (min(known), max(known)) if len(known) == 4 else (None, None)
            continue
        least = least * low
        if low == high == 0 or greatest == 0:
            greatest = 0
        else:
            greatest = None if greatest is None or high is None else greatest * high
    return least, greatest


def _atom_bounds(atom: Atom, ranges: Ranges) -> Interval:
    match atom:
        case Var(name):
            limit = ranges.get(name)
            return MIN_SYMBOL_VALUES.get(name[0], 0), max(limit - 1, 0) if isinstance(limit, int) else None
        case Extreme(kind, left, right):
            return _extreme_bounds(kind == "max", bounds(left, ranges), bounds(right, ranges))
        case Mod(base, divisor):
            limit = divisor if isinstance(divisor, int) else upper_bound(divisor, ranges)
            low, high = bounds(base, ranges)
            known = [end for end in (high, None if limit is None else limit - 1) if end is not None]
            if low is None or low < 0:
                known = known[-1:] if limit is not None else []
            return 0, min(known, default=None)
        case Div(base, divisor):
            low, high = bounds(base, ranges)
            if isinstance(divisor, int):
                return None if low is None else low // divisor, None if high is None else high // divisor
            by = max(bounds(divisor, ranges)[0] or 1, 1)  # the larger the divisor, the nearer to 0 (or to -1)
            return (0 if low is not None and low >= 0 else low), (None if high is None else max(high // by, -1))


def _extreme_bounds(largest: bool, left: Interval, right: Interval) -> Interval:
    choose = max if largest else min
    lows, highs = (left[0], right[0]), (left[1], right[1])
    known_low = [end for end in lows if end is not None]
    known_high = [end for end in highs if end is not None]
    low = choose(known_low) if len(known_low) == 2 or (largest and known_low) else None
    high = choose(known_high) if len(known_high) == 2 or (not largest and known_high) else None
    return low, high


# --- proofs -----------------------------------------------------------------------------------------------------------


def is_nonnegative(index: Index, ranges: Ranges) -> bool:
    """Whether `index >= 0` can be proved within the ranges."""
    low, high = bounds(index, ranges)
    if low is not None and low >= 0:
        return True
    if high is not None and high < 0:
        return False
    if _is_numeric(index, ranges):
        return False
    return _proved(index, tuple((name, ranges[name]) for name in sorted(index.variables) if name in ranges))


def is_below(index: Index, limit: Size, ranges: Ranges) -> bool:
    """Whether `index < limit` can be proved within the ranges."""
    if isinstance(limit, int):
        high = upper_bound(index, ranges)
        if high is not None:
            return high < limit
    return is_nonnegative(as_index(limit) - 1 - index, ranges)


def _is_numeric(index: Index, ranges: Ranges) -> bool:
    """Whether all bounds are numbers, so that a symbolic proof can add nothing to the interval."""
    return all(isinstance(ranges.get(name), int) for name in index.variables)


@lru_cache(maxsize=1 << 13)
def _proved(index: Index, known: tuple[tuple[str, Size], ...]) -> bool:
    least = _end(index, dict(known), lower=True)
    return least is not None and _never_negative(least)


def _end(index: Index, ranges: Ranges, lower: bool) -> Index | None:
    """Polynomial of size symbols that bounds `index` from below (or from above); None if none is found."""
    for _ in range(16):
        atom = next((a for m, _ in index.terms for a in m if not (isinstance(a, Var) and is_symbol(a.name))), None)
        if atom is None:
            return index
        factor, rest = index.split(atom)
        if factor is None:
            return None
        if is_nonnegative(factor, ranges):
            rises = True
        elif is_nonnegative(factor * -1, ranges):
            rises = False
        else:
            return None
        end = _atom_end(atom, ranges, lower=lower == rises)
        if end is None:
            return None
        index = rest + factor * end
    return None


def _atom_end(atom: Atom, ranges: Ranges, lower: bool) -> Index | None:
    match atom:
        case Var(name):
            if lower:
                return ZERO
            limit = ranges.get(name)
            return None if limit is None else as_index(limit) - 1
        case Mod(base, divisor):
            return ZERO if lower else as_index(divisor) - 1
        case Extreme(kind, left, right):
            # the larger of two is at least either one: any bounded side serves
            return None if lower != (kind == "max") else next(
                (end for side in (left, right) if (end := _end(side, ranges, lower)) is not None), None
            )  # fmt: skip
        case Div(base, divisor):
            if lower:
                return ZERO if is_nonnegative(base, ranges) else None
            end = _end(base, ranges, lower=False)
            return None if end is None else _divided_end(end, divisor)


def _divided_end(end: Index, divisor: Size) -> Index | None:
    """Upper bound of `end // divisor`."""
    whole, rest = split_by(end, divisor)
    least, greatest = bounds(rest, {})
    if greatest is not None and greatest < 0:
        return whole - 1
    if is_nonnegative(as_index(divisor) - 1 - rest, {}):
        return whole
    return whole + rest if least is not None and least >= 0 else None


def _never_negative(index: Index) -> bool:
    """Whether a polynomial of size symbols has no negative coefficient once symbols are counted from their minimum."""
    shifted = ZERO
    for monomial, coefficient in index.terms:
        term = as_index(coefficient)
        for atom in monomial:
            assert isinstance(atom, Var), f"{atom} is not a size"
            least = MIN_SYMBOL_VALUES[atom.name[0]]
            if least is None:
                return False
            term = term * (var(atom.name) + least)
        shifted = shifted + term
    return all(coefficient >= 0 for _, coefficient in shifted.terms)
