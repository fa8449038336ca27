"""Integer index algebra: polynomials over loop variables, sizes, floor-divisions and remainders.

An `Index` is a sum of terms, each an integer coefficient times a product of atoms. Loop variables and size symbols are
both `Var` atoms, so a dynamic stride is the ordinary product `i0*s1`. Every expression is kept in one canonical form
(terms sorted, zero terms dropped), so equal indices compare and hash equal, and no general computer algebra is needed:
building an affine index costs a few microseconds where sympy takes over a hundred.

`Div` and `Mod` are floor division and its remainder, for operands that are never negative (every index is).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
    """Floor division of a non-negative index by a positive integer."""

    base: Index
    divisor: int

    def __str__(self) -> str:
        return f"(({self.base})//{self.divisor})"

    @cached_property
    def key(self) -> tuple[str, ...]:
        return ("1", str(self))


@dataclass(frozen=True)
class Mod:
    """Remainder of a non-negative index by a positive integer."""

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
        right = as_index(other).terms
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
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
    kept = [(monomial, coefficient) for monomial, coefficient in total.items() if coefficient]
    kept.sort(key=lambda term: tuple(atom.key for atom in term[0]), reverse=True)
    return Index(tuple(kept))


def as_index(value: Size) -> Index:
    """An int or an index, as an index."""
    if isinstance(value, Index):
        return value
    return Index((((), value),)) if value else ZERO


ZERO = Index()


def var(name: str) -> Index:
    """The index that is just the variable `name`."""
    return Index((((Var(name),), 1),))


def upper_bound(index: Index, ranges: Ranges) -> int | None:
    """The largest value of `index` when every variable stays below its range; None if it has no known bound."""
    total = 0
    for monomial, coefficient in index.terms:
        product = 1
        for atom in monomial:
            bound = _atom_bound(atom, ranges)
            if bound is None:
                if coefficient < 0:
                    product = 0  # the atom may be 0, and then the term is largest
                    break
                return None
            product *= bound
        total += coefficient * product if coefficient > 0 or not monomial else 0
    return total


def _atom_bound(atom: Atom, ranges: Ranges) -> int | None:
    if isinstance(atom, Var):
        return max(ranges[atom.name] - 1, 0) if atom.name in ranges else None
    base = upper_bound(atom.base, ranges)
    if isinstance(atom, Mod):
        return atom.divisor - 1 if base is None else min(base, atom.divisor - 1)
    return None if base is None else base // atom.divisor


def _split(index: Index, divisor: int) -> tuple[Index, Index]:
    """`index == divisor * whole + rest`, term by term."""
    whole = [(m, c // divisor) for m, c in index.terms if c % divisor == 0]
    rest = [(m, c) for m, c in index.terms if c % divisor]
    constant = next((c for m, c in rest if not m), 0)
    if constant and not 0 <= constant < divisor:
        rest = [(m, c if m else c % divisor) for m, c in rest]
        whole.append(((), constant // divisor))
    return _collect(whole), _collect(rest)


def floordiv(index: Size, divisor: Size, ranges: Ranges) -> Index:
    """`index // divisor` for a non-negative index and a constant positive divisor, simplified under `ranges`."""
    base, by = as_index(index), as_index(divisor).constant
    assert by is not None and by > 0, f"division by {divisor}: only positive constants are supported"
    if by == 1:
        return base
    whole, rest = _split(base, by)
    if _nonnegative(rest):
        bound = upper_bound(rest, ranges)
        if bound is not None and bound < by:
            return whole
        return whole + _div_atom(rest, by)
    return _div_atom(base, by)


def modulo(index: Size, divisor: Size, ranges: Ranges) -> Index:
    """`index % divisor` for a non-negative index and a constant positive divisor, simplified under `ranges`."""
    base, by = as_index(index), as_index(divisor).constant
    assert by is not None and by > 0, f"remainder by {divisor}: only positive constants are supported"
    if by == 1:
        return ZERO
    _, rest = _split(base, by)
    if not _nonnegative(rest):
        rest = base
    else:
        bound = upper_bound(rest, ranges)
        if bound is not None and bound < by:
            return rest
    if rest.constant is not None:
        return as_index(rest.constant % by)
    if len(rest.terms) == 1 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        atom = rest.terms[0][0][0]
        if isinstance(atom, Mod) and atom.divisor % by == 0:
            return modulo(atom.base, by, ranges)  # (x % 12) % 4 == x % 4
    return Index((((Mod(rest, by),), 1),))


def _nonnegative(index: Index) -> bool:
    return all(coefficient > 0 for _, coefficient in index.terms)


def _div_atom(base: Index, by: int) -> Index:
    if base.constant is not None:
        return as_index(base.constant // by)
    if len(base.terms) == 1 and base.terms[0][1] == 1 and len(base.terms[0][0]) == 1:
        atom = base.terms[0][0][0]
        if isinstance(atom, Div):
            return _div_atom(atom.base, atom.divisor * by)  # (x // 3) // 4 == x // 12
    return Index((((Div(base, by),), 1),))


def substitute(index: Index, values: Mapping[str, Index], ranges: Ranges) -> Index:
    """Replace variables by indices; divisions are simplified again under the ranges of the new variables."""
    if not index.variables & values.keys():
        return index
    total = ZERO
    for monomial, coefficient in index.terms:
        term = as_index(coefficient)
        for atom in monomial:
            term = term * _substitute_atom(atom, values, ranges)
        total = total + term
    return total


def _substitute_atom(atom: Atom, values: Mapping[str, Index], ranges: Ranges) -> Index:
    if isinstance(atom, Var):
        return values.get(atom.name, var(atom.name))
    base = substitute(atom.base, values, ranges)
    return (floordiv if isinstance(atom, Div) else modulo)(base, atom.divisor, ranges)


def flatten(indices: Iterable[Size], strides: Iterable[Size]) -> Index:
    """Sum of index times stride."""
    total = ZERO
    for index, stride in zip(indices, strides, strict=True):
        total = total + as_index(index) * stride
    return total


def unflatten(flat: Index, shape: tuple[int, ...], ranges: Ranges) -> tuple[Index, ...]:
    """Row-major coordinates of position `flat` in `shape` (constant sizes)."""
    coordinates: list[Index] = []
    inner = 1
    for position, size in reversed(list(enumerate(shape))):
        quotient = floordiv(flat, max(inner, 1), ranges)
        coordinates.append(quotient if position == 0 else modulo(quotient, max(size, 1), ranges))
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
