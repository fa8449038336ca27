"""Integer index algebra: polynomials over loop variables and sizes, their bounds, divisions, and coordinates.

An `Index` is a sum of terms, each an integer coefficient times a product of atoms. Loop variables and size symbols are
both `Var` atoms, so a dynamic stride is the ordinary product `i0*s1`. `Div` and `Mod` are floor division and its
remainder, by numbers or by polynomials of size symbols. Every rewrite is exact for floor division, whatever the sign.

Every expression is kept in one canonical form (terms sorted, zero terms dropped), so equal indices compare and hash
equal. `(x//3)//4` is `x//12`, `(x%12)//4` is `(x//4)%3`, and `4*(x//4) + x%4` is `x`. `(i0*s1 + i1)//s1` is `i0` where
`i1` stays below `s1`. No general computer algebra is needed: building an affine index takes a few microseconds, and
sympy over a hundred.

Numeric intervals suffice where every bound is a number. With symbolic bounds, the proof of `x >= 0` eliminates one
variable after another. It sets the variable to the end of its range at which `x` is smallest, until only size symbols
are left. Each symbol is then written as its smallest value plus a rest. If no coefficient is negative, `x` is not
negative. For example, `i1 < s1` follows from `s1 - 1 - i1`, which is 0 at `i1 = s1 - 1`. An inequality without a proof
may still be true.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True)
class Var:
    """A loop variable (`i0`, `j1`), a size symbol (`s0`), or a run-time integer (`v3`: value 3 of the loop body).

    The first letter of a size symbol gives its range. `s` is at least 2, as torch makes separate graphs for sizes 0 and
    1. `u` is at least 0, and `z` any integer. All other variables are at least 0.
    """

    name: str

    def __str__(self) -> str:
        return self.name

    @cached_property
    def key(self) -> tuple[str, ...]:
        return ("0", self.name)


@dataclass(frozen=True)
class Div:
    """Floor division by a positive integer: a number, or a polynomial of size symbols."""

    base: Index
    divisor: Size

    def __str__(self) -> str:
        return f"(({self.base})//{_divisor_text(self.divisor)})"

    @cached_property
    def key(self) -> tuple[str, ...]:
        return ("1", str(self))


@dataclass(frozen=True)
class Mod:
    """Remainder of floor division by a positive integer, never negative."""

    base: Index
    divisor: Size

    def __str__(self) -> str:
        return f"(({self.base})%{_divisor_text(self.divisor)})"

    @cached_property
    def key(self) -> tuple[str, ...]:
        return ("2", str(self))


@dataclass(frozen=True)
class Extreme:
    """The larger or the smaller of two sizes, without loop variables."""

    kind: Literal["max", "min"]
    left: Index
    right: Index

    def __str__(self) -> str:
        return f"{self.kind}({self.left}, {self.right})"

    @cached_property
    def key(self) -> tuple[str, ...]:
        return ("3", str(self))


Atom: TypeAlias = Var | Div | Mod | Extreme
Monomial: TypeAlias = tuple[Atom, ...]
Size: TypeAlias = "int | Index"
"""A length: an int if known, else an `Index` over size symbols."""


@dataclass(frozen=True)
class Index:
    """A canonical sum of `coefficient * product of atoms`; the constant term has the empty product."""

    terms: tuple[tuple[Monomial, int], ...] = ()

    def __add__(self, other: Size) -> Index:
        right = as_index(other)
        if not (self.terms and right.terms):
            return self if self.terms else right
        return collect((*self.terms, *right.terms))

    __radd__ = __add__

    def __sub__(self, other: Size) -> Index:
        return self + as_index(other) * -1

    def __rsub__(self, other: Size) -> Index:
        return as_index(other) + self * -1

    def __mul__(self, other: Size) -> Index:
        if isinstance(other, int):
            return (
                Index(tuple((monomial, coefficient * other) for monomial, coefficient in self.terms)) if other else ZERO
            )
        right = other.terms
        return collect((product(a, b), m * n) for a, m in self.terms for b, n in right)

    __rmul__ = __mul__

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        return " + ".join(_term_text(monomial, coefficient) for monomial, coefficient in self.terms)

    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    @property
    def constant(self) -> int | None:
        """Value of an index without variables; None for others."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of all variables, also those inside divisions and remainders."""
        return frozenset(name for monomial, _ in self.terms for atom in monomial for name in atom_variables(atom))

    @property
    def is_affine(self) -> bool:
        """Whether there is no division, remainder or extreme."""
        return all(isinstance(atom, Var) for monomial, _ in self.terms for atom in monomial)

    def coefficient(self, name: str) -> Index | None:
        """Factor of `name` if the index is linear in it: zero if it is absent, None if it is not linear."""
        return self.split(Var(name))[0]

    def split(self, variable: Atom) -> tuple[Index | None, Index]:
        """(a, b) with `index == a * variable + b`; a is None if the index is not linear in it."""
        linear: list[tuple[Monomial, int]] = []
        rest: list[tuple[Monomial, int]] = []
        inside = {variable.name} if isinstance(variable, Var) else set()
        for monomial, value in self.terms:
            others = tuple(atom for atom in monomial if atom != variable)
            if any(not inside.isdisjoint(atom_variables(atom)) for atom in others) or len(others) < len(monomial) - 1:
                return None, self
            (rest if len(others) == len(monomial) else linear).append((others, value))
        # a part of a canonical sum is canonical; a single term needs no order
        return collect(linear) if len(linear) > 1 else Index(tuple(linear)), Index(tuple(rest))


def _term_text(monomial: Monomial, coefficient: int) -> str:
    if not monomial:
        return str(coefficient)
    text = "*".join(map(str, monomial))
    return text if coefficient == 1 else f"{coefficient}*{text}"


def _divisor_text(divisor: Size) -> str:
    return str(divisor) if isinstance(divisor, int) else f"({divisor})"


def atom_variables(atom: Atom) -> frozenset[str]:
    """Names of the variables in an atom."""
    match atom:
        case Var(name):
            return frozenset((name,))
        case Extreme(_, left, right):
            return left.variables | right.variables
        case Div(base, divisor) | Mod(base, divisor):
            return base.variables if isinstance(divisor, int) else base.variables | divisor.variables


def product(a: Monomial, b: Monomial) -> Monomial:
    """Product of two monomials."""
    return tuple(sorted((*a, *b), key=lambda atom: atom.key)) if a and b else a or b


def collect(terms: Iterable[tuple[Monomial, int]]) -> Index:
    """Canonical sum of terms."""
    total: dict[Monomial, int] = {}
    divided = False
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
        divided = divided or any(type(atom) is Mod for atom in monomial)
    if divided:
        _rejoin(total)
    kept = [(monomial, coefficient) for monomial, coefficient in total.items() if coefficient]
    if len(kept) > 1:
        kept.sort(key=_term_key, reverse=True)
    return Index(tuple(kept))


def _term_key(term: tuple[Monomial, int]) -> tuple[tuple[str, ...], ...]:
    return tuple(atom.key for atom in term[0])


def _rejoin(total: dict[Monomial, int]) -> None:
    """Simplify `c*(x % n) + c*n*(x // n)` to `c*x`, which arises from flattening coordinates."""
    again = True
    while again:
        again = any(_rejoin_one(total, monomial) for monomial in list(total) if total.get(monomial))


def _rejoin_one(total: dict[Monomial, int], monomial: Monomial) -> bool:
    coefficient = total[monomial]
    for place, atom in enumerate(monomial):
        if not isinstance(atom, Mod):
            continue
        others = monomial[:place] + monomial[place + 1 :]
        with_quotient = product(others, (_quotient(atom),))
        partners = [(product(with_quotient, m), coefficient * c) for m, c in as_index(atom.divisor).terms]
        if _contains(total, partners):
            del total[monomial]
            for partner, value in partners:
                total[partner] -= value
            for inner, factor in atom.base.terms:
                whole = product(others, inner)
                total[whole] = total.get(whole, 0) + coefficient * factor
            return True
    return False


def _contains(total: Mapping[Monomial, int], terms: list[tuple[Monomial, int]]) -> bool:
    """Whether a sum contains these terms. Terms of a sum, such as `(s0 + 1)*x`, may be parts of larger ones."""
    if len(terms) == 1:
        return all(total.get(monomial) == value for monomial, value in terms)
    return all(abs(total.get(m, 0)) >= abs(value) and total.get(m, 0) * value > 0 for m, value in terms)


def _quotient(mod: Mod) -> Div:
    """Floor division whose remainder this is."""
    inner = single_atom(mod.base)
    if isinstance(inner, Div):
        return Div(inner.base, as_size(as_index(inner.divisor) * mod.divisor))  # (x // 3) // 4 == x // 12
    return Div(mod.base, mod.divisor)


def single_atom(index: Index) -> Atom | None:
    """The only atom of an index that consists of one; None for others."""
    if len(index.terms) == 1 and index.terms[0][1] == 1 and len(index.terms[0][0]) == 1:
        return index.terms[0][0][0]
    return None


def split_by(index: Index, divisor: Size) -> tuple[Index, Index]:
    """(whole, rest) with `index == divisor * whole + rest`, term by term.

    If the divisor is a number, the constant of `rest` is in [0, divisor).
    """
    if isinstance(divisor, int):
        whole = [(m, c // divisor) for m, c in index.terms if c % divisor == 0 or not m]
        rest = [(m, c if m else c % divisor) for m, c in index.terms if c % divisor]
        return collect(whole), collect(rest)
    lead, number = max(divisor.terms, key=lambda term: (len(term[0]), _term_key(term)))
    quotient = ZERO
    for _ in range(len(index.terms) + 4):
        found = next(((m, c) for m, c in index.terms if c % number == 0 and _without(m, lead) is not None), None)
        if found is None:
            break
        others = _without(found[0], lead)
        assert others is not None
        step = Index(((others, found[1] // number),))
        quotient, index = quotient + step, index - step * divisor
    return quotient, index


def exact_quotient(size: Size, divisor: Size) -> Size | None:
    """`size / divisor`, if that is a polynomial."""
    if divisor == 0:
        return None
    whole, rest = split_by(as_index(size), as_size(divisor))
    return as_size(whole) if rest == ZERO else None


def _without(monomial: Monomial, factor: Monomial) -> Monomial | None:
    """`monomial / factor`, if that is a monomial."""
    left = list(monomial)
    for atom in factor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def as_index(value: Size) -> Index:
    """Convert an int to an index."""
    return value if isinstance(value, Index) else _number(value)


@lru_cache(maxsize=4096, typed=True)  # True is not 1 in generated code
def _number(value: int) -> Index:
    return Index((((), value),)) if value else ZERO


def as_size(value: Size) -> Size:
    """Canonical form of a length: an int if it is known."""
    if isinstance(value, int):
        return value
    constant = value.constant
    return value if constant is None else constant


def size_product(sizes: Iterable[Size]) -> Size:
    """Number of points of a space."""
    return as_size(prod(sizes))


ZERO = Index()


@lru_cache(maxsize=4096)
def var(name: str) -> Index:
    """Index that consists of the variable `name`."""
    return Index((((Var(name),), 1),))


def evaluate(index: Index, values: Mapping[str, int]) -> int:
    """Value of `index` for given variables: the reference semantics of the algebra."""
    return int(evaluate_on(index, values))


def evaluate_on(index: Index, values: Mapping[str, Any]) -> Any:
    """`evaluate` for any operands with integer arithmetic: NumPy arrays give the index at many points."""
    total: Any = 0
    for monomial, coefficient in index.terms:
        result: Any = coefficient
        for atom in monomial:
            result = result * _evaluate_atom(atom, values)
        total = total + result
    return total


def _evaluate_atom(atom: Atom, values: Mapping[str, Any]) -> Any:
    match atom:
        case Var(name):
            return values[name]
        case Extreme(kind, left, right):
            return (max if kind == "max" else min)(evaluate_on(left, values), evaluate_on(right, values))
        case Div(base, divisor):
            return evaluate_on(base, values) // evaluate_on(as_index(divisor), values)
        case Mod(base, divisor):
            return evaluate_on(base, values) % evaluate_on(as_index(divisor), values)


TYPICAL = 64


def typical(size: Size) -> int:
    """Number in place of a size, for decisions that only concern speed: every size symbol counts as 64.

    The size seen during tracing is not used: a plan would depend on it, and so could differ by rank.
    """
    return size if isinstance(size, int) else max(evaluate(size, dict.fromkeys(size.variables, TYPICAL)), 0)


# --- bounds -----------------------------------------------------------------------------------------------------------

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


# --- divisions --------------------------------------------------------------------------------------------------------


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
