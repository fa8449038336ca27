"""Integer index algebra: polynomials over loop variables, sizes, floor-divisions and remainders.

An `Index` is a sum of terms, each an integer coefficient times a product of atoms. Loop variables and size symbols are
both `Var` atoms, so a dynamic stride is the ordinary product `i0*s1`. Every expression is kept in one canonical form
(terms sorted, zero terms dropped), so equal indices compare and hash equal, and no general computer algebra is needed:
building an affine index costs a few microseconds where sympy takes over a hundred.

`Div` and `Mod` are floor division and its remainder by constants. Every rewrite is exact for floor division, whatever
the sign; variables are never negative. Two forms of one thing are brought to one: `(x//3)//4` is `x//12`, `(x%12)//4`
is `(x//4)%3`, and `4*(x//4) + x%4` is `x`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Var:
    """A loop variable (`i0`, `j1`), a size symbol (`s0`), or a run-time integer (`v3`: value 3 of the loop body)."""

    name: str

    def __str__(self) -> str:
        return self.name

    @cached_property
    def key(self) -> tuple[str, ...]:
        return ("0", self.name)


@dataclass(frozen=True)
class Div:
    """Floor division by a positive integer."""

    base: Index
    divisor: int

    def __str__(self) -> str:
        return f"(({self.base})//{self.divisor})"

    @cached_property
    def key(self) -> tuple[str, ...]:
        return ("1", str(self))


@dataclass(frozen=True)
class Mod:
    """Remainder of floor division by a positive integer, never negative."""

    base: Index
    divisor: int

    def __str__(self) -> str:
        return f"(({self.base})%{self.divisor})"

    @cached_property
    def key(self) -> tuple[str, ...]:
        return ("2", str(self))


Atom: TypeAlias = Var | Div | Mod
Monomial: TypeAlias = tuple[Atom, ...]
Size: TypeAlias = "int | Index"
"""A length: an int when known, an `Index` over size symbols when not."""
Ranges: TypeAlias = Mapping[str, int]
"""Exclusive upper bound of each variable whose bound is known; all variables are at least 0."""
Interval: TypeAlias = "tuple[int | None, int | None]"
"""Least and greatest value; None where there is no bound."""


@dataclass(frozen=True)
class Index:
    """A canonical sum of `coefficient * product of atoms`; the constant term has the empty product."""

    terms: tuple[tuple[Monomial, int], ...] = ()

    def __add__(self, other: Size) -> Index:
        return _collect((*self.terms, *as_index(other).terms))

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
        return _collect((_product(a, b), m * n) for a, m in self.terms for b, n in right)

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
        """The value, when there is no variable in it."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of all variables, also those inside divisions and remainders."""
        return frozenset(name for monomial, _ in self.terms for atom in monomial for name in _atom_variables(atom))

    @property
    def is_affine(self) -> bool:
        """No division or remainder anywhere."""
        return all(isinstance(atom, Var) for monomial, _ in self.terms for atom in monomial)

    def coefficient(self, name: str) -> Index | None:
        """What `name` is multiplied by, if the index is linear in it (None if it is not; zero if it is absent)."""
        rest: list[tuple[Monomial, int]] = []
        for monomial, value in self.terms:
            if not any(name in _atom_variables(atom) for atom in monomial):
                continue
            others = tuple(atom for atom in monomial if atom != Var(name))
            if len(others) != len(monomial) - 1 or any(name in _atom_variables(atom) for atom in others):
                return None
            rest.append((others, value))
        return _collect(rest)


def _term_text(monomial: Monomial, coefficient: int) -> str:
    if not monomial:
        return str(coefficient)
    product = "*".join(map(str, monomial))
    return product if coefficient == 1 else f"{coefficient}*{product}"


def _atom_variables(atom: Atom) -> frozenset[str]:
    return frozenset((atom.name,)) if isinstance(atom, Var) else atom.base.variables


def _product(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted((*a, *b), key=lambda atom: atom.key)) if a and b else a or b


def _collect(terms: Iterable[tuple[Monomial, int]]) -> Index:
    total: dict[Monomial, int] = {}
    divided = False
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
        divided = divided or any(type(atom) is Mod for atom in monomial)
    if divided:
        _rejoin(total)
    kept = [(monomial, coefficient) for monomial, coefficient in total.items() if coefficient]
    kept.sort(key=_term_key, reverse=True)
    return Index(tuple(kept))


def _term_key(term: tuple[Monomial, int]) -> tuple[tuple[str, ...], ...]:
    return tuple(atom.key for atom in term[0])


def _rejoin(total: dict[Monomial, int]) -> None:
    """`c*(x % n) + c*n*(x // n)` is `c*x`: what flattening coordinates comes to."""
    again = True
    while again:
        again = any(_rejoin_one(total, monomial) for monomial in list(total) if total.get(monomial))


def _rejoin_one(total: dict[Monomial, int], monomial: Monomial) -> bool:
    coefficient = total[monomial]
    for place, atom in enumerate(monomial):
        if not isinstance(atom, Mod):
            continue
        quotient = _div_atom(atom.base, atom.divisor, {}).terms
        if len(quotient) != 1 or quotient[0][1] != 1:
            continue
        others = monomial[:place] + monomial[place + 1 :]
        partner = _product(others, quotient[0][0])
        if total.get(partner, 0) == coefficient * atom.divisor:
            del total[monomial], total[partner]
            for inner, factor in atom.base.terms:
                whole = _product(others, inner)
                total[whole] = total.get(whole, 0) + coefficient * factor
            return True
    return False


def as_index(value: Size) -> Index:
    """An int or an index, as an index."""
    if isinstance(value, Index):
        return value
    return Index((((), value),)) if value else ZERO


ZERO = Index()


@lru_cache(maxsize=4096)
def var(name: str) -> Index:
    """The index that is just the variable `name`."""
    return Index((((Var(name),), 1),))


def upper_bound(index: Index, ranges: Ranges) -> int | None:
    """A bound on the value of `index` when every variable stays below its range; None if there is none known."""
    return bounds(index, ranges)[1]


def bounds(index: Index, ranges: Ranges) -> Interval:
    """Least and greatest value that `index` might take: never too tight, and exact where terms vary independently."""
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
    if isinstance(atom, Var):
        return 0, max(ranges[atom.name] - 1, 0) if atom.name in ranges else None
    low, high = bounds(atom.base, ranges)
    if isinstance(atom, Mod):
        inside = low is not None and low >= 0 and high is not None
        return 0, min(high, atom.divisor - 1) if inside and high is not None else atom.divisor - 1
    return None if low is None else low // atom.divisor, None if high is None else high // atom.divisor


def _split(index: Index, divisor: int) -> tuple[Index, Index]:
    """`index == divisor * whole + rest`, term by term; the constant of `rest` is in [0, divisor)."""
    whole = [(m, c // divisor) for m, c in index.terms if c % divisor == 0 or not m]
    rest = [(m, c if m else c % divisor) for m, c in index.terms if c % divisor]
    return _collect(whole), _collect(rest)


def floordiv(index: Size, divisor: Size, ranges: Ranges) -> Index:
    """`index // divisor`, simplified under `ranges`; a symbolic divisor must divide every term."""
    base, by = as_index(index), as_index(divisor).constant
    if by is None:
        return _cancel(base, as_index(divisor))
    assert by > 0, f"division by {divisor}"
    if by == 1:
        return base
    whole, rest = _split(base, by)
    low, high = bounds(rest, ranges)
    if low is None or low < 0:
        whole, rest = ZERO, base  # what is left over may be negative, though the whole is not
        low, high = bounds(rest, ranges)
    if low is not None and low >= 0 and high is not None and high < by:
        return whole
    parts = _common_factor(rest, by, ranges)
    if parts is not None:
        factor, multiple, _ = parts
        return whole + floordiv(multiple, by // factor, ranges)
    return whole + _div_atom(rest, by, ranges)


def modulo(index: Size, divisor: Size, ranges: Ranges) -> Index:
    """`index % divisor`, simplified under `ranges`; a symbolic divisor must divide every term."""
    base, by = as_index(index), as_index(divisor).constant
    if by is None:
        _cancel(base, as_index(divisor))
        return ZERO
    assert by > 0, f"remainder by {divisor}"
    if by == 1:
        return ZERO
    _, rest = _split(base, by)
    low, high = bounds(rest, ranges)
    if low is None or low < 0:
        rest = base
        low, high = bounds(rest, ranges)
    if low is not None and low >= 0 and high is not None and high < by:
        return rest
    parts = _common_factor(rest, by, ranges)
    if parts is not None:
        factor, multiple, below = parts
        return modulo(multiple, by // factor, ranges) * factor + below
    if rest.constant is not None:
        return as_index(rest.constant % by)
    atom = _single_atom(rest)
    if isinstance(atom, Mod) and atom.divisor % by == 0:
        return modulo(atom.base, by, ranges)  # (x % 12) % 4 == x % 4
    return Index((((Mod(rest, by),), 1),))


def _common_factor(index: Index, by: int, ranges: Ranges) -> tuple[int, Index, Index] | None:
    """The largest factor of `by` with `index == factor * multiple + below` and `0 <= below < factor`, if there is one.

    With it, `index // by == multiple // (by // factor)`.
    """
    terms = sorted(((m, c) for m, c in index.terms if m), key=lambda term: -abs(term[1]))
    constant = next((c for m, c in index.terms if not m), 0)
    factor = by
    for count, (_, coefficient) in enumerate(terms, 1):
        factor = gcd(factor, coefficient)
        if factor == 1:
            return None
        if count < len(terms) and terms[count][1] % factor == 0:
            continue
        below = _collect((*terms[count:], ((), constant % factor)))
        low, high = bounds(below, ranges)
        if low is not None and low >= 0 and high is not None and high < factor:
            multiple = _collect((*((m, c // factor) for m, c in terms[:count]), ((), constant // factor)))
            return factor, multiple, below
    return None


def _cancel(index: Index, divisor: Index) -> Index:
    """Division by a product of sizes that is a factor of every term."""
    assert len(divisor.terms) == 1, f"division by {divisor}: only a product of sizes can be divided by"
    ((symbols, number),) = divisor.terms
    result: list[tuple[Monomial, int]] = []
    for monomial, coefficient in index.terms:
        left = list(monomial)
        for symbol in symbols:
            assert symbol in left, f"{index} is not a multiple of {divisor}"
            left.remove(symbol)
        assert coefficient % number == 0, f"{index} is not a multiple of {divisor}"
        result.append((tuple(left), coefficient // number))
    return _collect(result)


def _single_atom(index: Index) -> Atom | None:
    if len(index.terms) == 1 and index.terms[0][1] == 1 and len(index.terms[0][0]) == 1:
        return index.terms[0][0][0]
    return None


def _div_atom(base: Index, by: int, ranges: Ranges) -> Index:
    if base.constant is not None:
        return as_index(base.constant // by)
    atom = _single_atom(base)
    if isinstance(atom, Div):
        return floordiv(atom.base, atom.divisor * by, ranges)  # (x // 3) // 4 == x // 12
    if isinstance(atom, Mod) and atom.divisor % by == 0:
        return modulo(floordiv(atom.base, by, ranges), atom.divisor // by, ranges)  # (x % 12) // 4 == (x // 4) % 3
    return Index((((Div(base, by),), 1),))


def substitute(index: Index, values: Mapping[str, Index], ranges: Ranges) -> Index:
    """Replace variables by indices; divisions are simplified again under the ranges of the new variables."""
    if values.keys().isdisjoint(index.variables):
        return index
    return _substituted(index, tuple(values.items()), tuple(ranges.items()))


@lru_cache(maxsize=1 << 14)  # the layers of a model ask the same again and again
def _substituted(index: Index, replaced: tuple[tuple[str, Index], ...], bounds: tuple[tuple[str, int], ...]) -> Index:
    values, ranges = dict(replaced), dict(bounds)
    terms: list[tuple[Monomial, int]] = []
    for monomial, coefficient in index.terms:
        product = as_index(coefficient)
        for atom in monomial:
            product = product * _substitute_atom(atom, values, ranges)
        terms += product.terms
    return _collect(terms)


def _substitute_atom(atom: Atom, values: Mapping[str, Index], ranges: Ranges) -> Index:
    if isinstance(atom, Var):
        return values[atom.name] if atom.name in values else var(atom.name)
    if values.keys().isdisjoint(atom.base.variables):
        return Index((((atom,), 1),))
    base = substitute(atom.base, values, ranges)
    return (floordiv if isinstance(atom, Div) else modulo)(base, atom.divisor, ranges)


def rename(index: Index, names: Mapping[str, str]) -> Index:
    """Give variables other names, all at once; nothing is simplified, so ranges must go with the names."""
    if names.keys().isdisjoint(index.variables):
        return index
    return _collect((_rename_atoms(monomial, names), coefficient) for monomial, coefficient in index.terms)


def _rename_atoms(monomial: Monomial, names: Mapping[str, str]) -> Monomial:
    atoms: list[Atom] = []
    for atom in monomial:
        if isinstance(atom, Var):
            atoms.append(Var(names.get(atom.name, atom.name)))
        else:
            atoms.append(type(atom)(rename(atom.base, names), atom.divisor))
    return tuple(sorted(atoms, key=lambda atom: atom.key))


def flatten(indices: Iterable[Size], strides: Iterable[Size]) -> Index:
    """Sum of index times stride."""
    terms: list[tuple[Monomial, int]] = []
    for index, stride in zip(indices, strides, strict=True):
        terms += (as_index(index) * stride).terms
    return _collect(terms)


def unflatten(flat: Index, shape: tuple[int, ...], ranges: Ranges) -> tuple[Index, ...]:
    """Row-major coordinates of position `flat` in `shape` (constant sizes)."""
    coordinates: list[Index] = []
    inner = 1
    for position, size in reversed(list(enumerate(shape))):
        if size <= 1:
            coordinates.append(ZERO)
            continue
        quotient = floordiv(flat, inner, ranges)
        coordinates.append(quotient if position == 0 else modulo(quotient, size, ranges))
        inner *= size
    return tuple(reversed(coordinates))


def evaluate(index: Index, values: Mapping[str, int]) -> int:
    """The number that `index` is for given variables; the reference meaning of the algebra."""
    return int(evaluate_on(index, values))


def evaluate_on(index: Index, values: Mapping[str, Any]) -> Any:
    """As `evaluate`, for anything with integer arithmetic: NumPy arrays give the index at many points."""
    total: Any = 0
    for monomial, coefficient in index.terms:
        product: Any = coefficient
        for atom in monomial:
            product = product * _evaluate_atom(atom, values)
        total = total + product
    return total


def _evaluate_atom(atom: Atom, values: Mapping[str, Any]) -> Any:
    if isinstance(atom, Var):
        return values[atom.name]
    base = evaluate_on(atom.base, values)
    return base // atom.divisor if isinstance(atom, Div) else base % atom.divisor


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides, in elements."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size if not (isinstance(size, int) and size == 0) else step
    return tuple(reversed(strides))
