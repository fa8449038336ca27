"""Convert torch's symbolic sizes to the IR's, and floats computed from them. Only this file reads sympy.

Nothing here needs a size's value: reading one would add a guard, and the plan would depend on the sizes at tracing
time. Kernels evaluate floats such as `1 / x.shape[0]` as Python would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import torch

from dcompile import compat
from dcompile.errors import DcompileError
from dcompile.ir.index import (
    TYPICAL,
    Index,
    Size,
    as_index,
    as_size,
    bounds,
    extreme,
    floordiv,
    is_nonnegative,
    modulo,
    typical,
    var,
)

Shape: TypeAlias = "tuple[Size, ...]"
Fact: TypeAlias = "tuple[Any, int | None, int]"
"""A size symbol, its lower bound, and its divisor by a guard of torch's. A number computed by floats, such as `int(1.7
* size)`, is a symbol, too, if the index algebra has no form for it. Its own node in the graph defines it."""


class Inexpressible(DcompileError):
    """A size, or a decision about sizes, without a form in the index algebra: the op becomes a library call."""


def size_of(value: Any) -> Size:
    """Convert one of torch's sizes, an int or a SymInt. Raises Inexpressible."""
    if isinstance(value, int):
        return value
    return _read(value, strides=False)


def _read(value: Any, strides: bool) -> Size:
    expression, shape_env = compat.sizes.size_expression(value), value.node.shape_env
    symbols = _symbols_in(expression)
    facts = tuple(
        (s, compat.sizes.least_value(shape_env, s), compat.sizes.known_divisor(shape_env, s)) for s in symbols
    )
    try:
        return _known(expression, strides, facts)
    except Inexpressible:
        if not (rounded := compat.sizes.rounded_integers(shape_env, expression)):
            raise
    return _known(expression, strides, (*facts, *((number, least, 1) for number, least in rounded.items())))


@lru_cache(maxsize=1 << 14)
def _symbols_in(expression: Any) -> tuple[Any, ...]:
    return tuple(sorted(expression.free_symbols, key=str))


@lru_cache(maxsize=1 << 14)  # a layer's tensors share few sizes, whose expressions may be long
def _known(expression: Any, strides: bool, facts: tuple[Fact, ...]) -> Size:
    return as_size(_Reader({fact[0]: _as_multiple(*fact) for fact in facts}, strides).read(expression))


def shape_of(value: torch.Tensor) -> Shape:
    """Return the sizes of a (fake) tensor. Raises Inexpressible."""
    return tuple(size_of(size) for size in value.shape)


def strides_of(value: torch.Tensor) -> Shape:
    """Return the strides of a (fake) tensor. Raises Inexpressible."""
    return tuple(_stride(stride) for stride in value.stride())


def _stride(value: Any) -> Size:
    """Convert a stride; torch's `Max(1, size)` counts as the size, from which it differs only without elements."""
    if isinstance(value, int):
        return value
    return _read(value, strides=True)


def numbers(shape: Shape, what: str) -> tuple[int, ...]:
    """Return sizes that must be known at compile time. Raises Inexpressible."""
    known = tuple(size for size in shape if isinstance(size, int))
    if len(known) != len(shape):
        raise Inexpressible(f"{what} of symbolic size")
    return known


def variables_of(sizes: Iterable[Size]) -> frozenset[str]:
    """Return the symbols in sizes."""
    return frozenset(name for size in sizes if isinstance(size, Index) for name in size.variables)


def opaque_shape(value: torch.Tensor) -> tuple[Shape, Shape]:
    """Return sizes and strides of a library result; inexpressible ones become unique symbols without a definition."""
    return tuple(_opaque(size, size_of) for size in value.shape), tuple(_opaque(s, _stride) for s in value.stride())


def _opaque(value: Any, read: Callable[[Any], Size]) -> Size:
    try:
        return read(value)
    except Inexpressible:
        return var(f"?{value}")


def estimate(value: Any) -> int:
    """Return a size for decisions that affect only speed."""
    try:
        return typical(size_of(value))
    except Inexpressible:
        return TYPICAL


def _named(least: int | None, name: str) -> str:
    """Return the name of a size symbol: its first letter encodes the lower bound (`ir.polynomial.Var`)."""
    if not name.isidentifier():  # a number computed by floats: its text, with a hash for uniqueness
        name = re.sub(r"\W+", "_", name).strip("_")[:40] + "_" + sha256(name.encode()).hexdigest()[:8]
    letter = "s" if least is not None and least >= 2 else "u" if least is not None and least >= 0 else "z"
    return name if name[0] == letter else f"{letter}_{name}"


def _symbol(symbol: Any, shape_env: Any) -> tuple[str, int]:
    """Return (name, number): the symbol is the number times the variable of that name.

    The number is a divisor that torch has guarded. Expressions of the size and of its parts then become multiples of
    one variable, and equal ones are recognized.
    """
    return _as_multiple(
        symbol, compat.sizes.least_value(shape_env, symbol), compat.sizes.known_divisor(shape_env, symbol)
    )


def _as_multiple(symbol: Any, least: int | None, divisor: int) -> tuple[str, int]:
    if divisor == 1:
        return _named(least, str(symbol)), 1
    return _named(None if least is None else -(-least // divisor), f"{symbol}_{divisor}"), divisor


def traced_sizes(gm: Any) -> dict[str, int]:
    """Return the value of each size symbol of a graph at tracing: for checks, never for decisions."""
    found: dict[str, int] = {}
    for symbol, environment in compat.sizes.size_symbols(gm).items():
        hint = compat.sizes.size_hint(environment, symbol)
        if hint is not None:
            name, divisor = _symbol(symbol, environment)
            found[name] = hint // divisor
    return found


def is_symbolic(value: Any) -> bool:
    """Does a node's value contain a symbolic number?"""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    if isinstance(value, (tuple, list)):
        return any(map(is_symbolic, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class _Reader:
    """Converts one expression, by the name of its head: sympy itself is not imported."""

    def __init__(self, symbols: Mapping[Any, tuple[str, int]], strides: bool) -> None:
        self.symbols, self.strides = symbols, strides

    def read(self, expression: Any) -> Index:
        try:
            return self._expressed(expression)
        except Inexpressible:
            if expression not in self.symbols:
                raise
        return var(self.symbols[expression][0])

    def _expressed(self, expression: Any) -> Index:
        if expression.is_Integer:
            return as_index(int(expression))
        if expression.is_Symbol:
            name, number = self.symbols[expression]
            return var(name) * number
        head, args = type(expression).__name__, expression.args
        match head:
            case "Add":
                return sum((self.read(arg) for arg in args), as_index(0))
            case "Mul":
                total = as_index(1)
                for arg in args:
                    total = total * self.read(arg)
                return total
            case "Pow" | "PowByNatural":
                return self._power(*args)
            case "FloorDiv" | "CleanDiv":
                return self._divided(*map(self.read, args))
            case "Mod" | "PythonMod":
                return modulo(*self._division(*args), {})
            case "ModularIndexing":
                base, divisor, modulus = map(self.read, args)
                return modulo(floordiv(*self._checked(base, divisor), {}), as_size(modulus), {})
            case "CeilDiv":
                return self._rounded_up(*args)
            case "CeilToInt" if type(args[0]).__name__ == "IntTrueDiv":
                return self._rounded_up(*args[0].args)
            case "FloorToInt" if type(args[0]).__name__ == "IntTrueDiv":
                return self._divided(*map(self.read, args[0].args))
            case "TruncToInt" if type(args[0]).__name__ == "IntTrueDiv":
                return floordiv(*self._division(*args[0].args), {})
            case "CeilToInt":
                over, under = self._fraction(args[0])
                return self._divided(over + under - 1, under)
            case "FloorToInt":
                return self._divided(*self._fraction(args[0]))
            case "TruncToInt":
                return floordiv(*self._checked(*self._fraction(args[0])), {})
            case "Identity":
                return self.read(args[0])
            case "Max" | "Min":
                return self._extreme(head.lower(), [self.read(arg) for arg in args])
        raise Inexpressible(f"the size {expression}")

    def _power(self, base: Any, exponent: Any) -> Index:
        if not exponent.is_Integer or not 0 <= int(exponent) <= 8:
            raise Inexpressible(f"the size {base}**{exponent}")
        total = as_index(1)
        for _ in range(int(exponent)):
            total = total * self.read(base)
        return total

    def _division(self, base: Any, divisor: Any) -> tuple[Index, Size]:
        return self._checked(self.read(base), self.read(divisor))

    def _divided(self, base: Index, divisor: Index) -> Index:
        """Divide and round down; a bounded base that may be negative (a convolution of few columns) is shifted."""
        least, number = bounds(base, {})[0], divisor.constant
        if least is None or least >= 0 or not number or number < 0:
            return floordiv(*self._checked(base, divisor), {})
        shift = -(least // number)
        return floordiv(base + shift * number, number, {}) - shift

    def _checked(self, base: Index, divisor: Index) -> tuple[Index, Size]:
        """Check that C, Python and the index algebra agree on a division: nothing is negative."""
        if not is_nonnegative(base, {}) or not is_nonnegative(divisor, {}) or divisor.constant == 0:
            raise Inexpressible(f"({base}) divided by ({divisor}), which may be negative")
        return base, as_size(divisor)

    def _rounded_up(self, base: Any, divisor: Any) -> Index:
        number, by = self.read(base), self.read(divisor)
        return self._divided(number + by - 1, by)

    def _fraction(self, expression: Any) -> tuple[Index, Index]:
        """Return (numerator, denominator) of a float that a double holds exactly: `1.5 * size` or `size - 0.5`."""
        head, args = type(expression).__name__, expression.args
        if head == "ToFloat":
            return self.read(args[0]), as_index(1)
        if expression.is_Float or expression.is_Integer:
            over, under = float(expression).as_integer_ratio()
            if under <= 1 << 10 and abs(over) <= 1 << 20:
                return as_index(over), as_index(under)
        elif head == "FloatTrueDiv" and args[1].is_number and float(args[1]) == 1:
            return self._fraction(args[0])
        elif head in ("Add", "Mul") and len(args) == 2:
            (a, under_a), (b, under_b) = map(self._fraction, args)
            if head == "Add":
                return a * under_b + b * under_a, under_a * under_b
            if a.constant is not None or b.constant is not None:
                return a * b, under_a * under_b
        raise Inexpressible(f"the size {expression}")

    def _extreme(self, kind: str, args: list[Index]) -> Index:
        if self.strides and kind == "max":
            args = [arg for arg in args if arg.constant != 1] or args
        total = args[0]
        for arg in args[1:]:
            total = extreme(kind, total, arg)
        return total


FLOAT_OPS: Mapping[str, str | None] = MappingProxyType(
    {
        "operator.truediv": "div", "operator.mul": "mul", "operator.add": "add", "operator.sub": "sub",
        "operator.neg": "neg", "operator.pow": "pow", "torch.sym_float": None, "torch.sym_sqrt": "sqrt",
        "math.sqrt": "sqrt",
    }
)  # fmt: skip
"""Python operations on floats -> operations of the IR in float64; None: the argument as a float."""


@dataclass(frozen=True, slots=True)
class Real:
    """`target(*args)`, a key of FLOAT_OPS. Rules pass it to `Body.const`; none can branch on its value."""

    target: str
    args: tuple[Real | Index | int | float, ...]
    name: str = field(compare=False)
    """Its name in the host program, if a library call needs it."""

    def _unknown(self, *_: Any) -> NoReturn:
        raise Inexpressible("a decision by a number that sizes give")

    __bool__ = __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _unknown


def follows(args: Iterable[Any], known: frozenset[str]) -> bool:
    """Return whether these are numbers of the program text, or computed from known sizes."""
    return all(
        isinstance(arg, Real | int | float) or (isinstance(arg, Index) and arg.variables <= known) for arg in args
    )


def make_real(target: str, args: Any, name: str, known: frozenset[str]) -> Real | None:
    """Return the number that a node computes, if it is one of these operations on sizes known from the arguments."""
    return Real(target, tuple(args), name) if target in FLOAT_OPS and follows(args, known) else None
