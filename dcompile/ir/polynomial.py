"""Integer polynomials over loop variables, sizes, floor divisions and remainders, for the algebra of `ir.index`.

An `Index` is a sum of terms, each an integer coefficient times a product of atoms. Loop variables and size symbols are
both `Var` atoms, so a dynamic stride is the ordinary product `i0*s1`.

Every expression is kept in one canonical form (terms sorted, zero terms dropped), so equal indices compare and hash
equal. No general computer algebra is needed: building an affine index takes a few microseconds, and sympy over a
hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
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
