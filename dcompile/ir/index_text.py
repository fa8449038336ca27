"""Parse printed index expressions: sums of products, `((i0)//3)`, `((j0)%8)`, `max(s0, s1)`.

Sums get their canonical form. Divisions stay as written: their simplification depends on ranges of variables, and
printed ones are simplified already.
"""

from __future__ import annotations

from collections.abc import Callable

from dcompile.ir.cursor import TextCursor
from dcompile.ir.index import Div, Extreme, Index, Mod, Size, as_index, as_size, var

WHOLE_NUMBER = r"\d+(?![\w.])"
VARIABLE = r"[A-Za-z_]\w*"


def parse_index(cursor: TextCursor, rename: Callable[[str], str] = str) -> Index:
    """Parse a sum. `rename` returns the program's name of a variable."""
    total = _product(cursor, rename)
    while (operator := cursor.match(r"[+-]")) is not None:
        term = _product(cursor, rename)
        total = total + term if operator == "+" else total - term
    return total


def parse_size(cursor: TextCursor) -> Size:
    """Parse a size: a number, or an expression of size symbols."""
    return as_size(parse_index(cursor))


def parse_sizes(cursor: TextCursor) -> tuple[Size, ...]:
    """Parse `[4, s0]`."""
    cursor.need("[")
    sizes: list[Size] = []
    while not cursor.has("]"):
        if sizes:
            cursor.need(",")
        sizes.append(parse_size(cursor))
    return tuple(sizes)


def _product(cursor: TextCursor, rename: Callable[[str], str]) -> Index:
    """Parse factors, divisors and moduli, from left to right."""
    result = _atom(cursor, rename)
    while (operator := cursor.match(r"//|%|\*(?!\*)")) is not None:
        at = cursor.at
        right = _atom(cursor, rename)
        if operator == "*":
            result = result * right
            continue
        divisor = as_size(right)
        if isinstance(divisor, int) and divisor <= 0:
            cursor.fail("expected a positive divisor", at)
        atom = Div(result, divisor) if operator == "//" else Mod(result, divisor)
        result = Index((((atom,), 1),))
    return result


def _atom(cursor: TextCursor, rename: Callable[[str], str]) -> Index:
    if cursor.has("-"):
        return _atom(cursor, rename) * -1
    if (number := cursor.match(WHOLE_NUMBER)) is not None:
        return as_index(int(number))
    if (kind := cursor.match(r"(max|min)(?=\()")) is not None:
        cursor.need("(")
        left = parse_index(cursor, rename)
        cursor.need(",")
        right = parse_index(cursor, rename)
        cursor.need(")")
        return Index((((Extreme("max" if kind == "max" else "min", left, right),), 1),))
    if cursor.has("("):
        inside = parse_index(cursor, rename)
        cursor.need(")")
        return inside
    return var(rename(cursor.expect(VARIABLE, "a number, a variable or `(`")))
