"""Convert expressions of size symbols to JSON and back, for the records and keys of cached traces.

A record is data: numbers, and lists that begin with the name of an operation of a short table. Terms of sums and
products are sorted by their records, so that a text does not depend on the names of symbols.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Record: TypeAlias = Any
"""JSON data: None, numbers, texts, and lists. A dictionary with one entry names a kind of value."""

_SYMPY = "Add Mul Pow And Or Not Eq Ne Lt Le Gt Ge"
_TORCH = (
    "Max Min Mod PythonMod FloorDiv CleanDiv ModularIndexing Where CeilToInt FloorToInt TruncToInt RoundToInt CeilDiv "
    "LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv TruncToFloat RoundDecimal ToFloat Identity"
)
_UNORDERED = frozenset(("Add", "Mul", "And", "Or", "Max", "Min"))
"""Operations whose arguments sympy sorts by names of symbols."""


class NotKeepable(Exception):
    """Raised for a value of a traced or captured graph that has no record. The message names it."""


@functools.cache
def _operations() -> Mapping[str, Any]:
    """Name -> sympy's or torch's operation."""
    import sympy  # type: ignore[import-untyped, unused-ignore]
    from torch.utils._sympy import functions

    found = {name: getattr(sympy, name) for name in _SYMPY.split()}
    return found | {name: getattr(functions, name) for name in _TORCH.split() if hasattr(functions, name)}


@functools.cache
def _operation_names() -> Mapping[Any, str]:
    return {operation: name for name, operation in _operations().items()}


def expression_record(expression: Any, number_of: Callable[[Any], int]) -> Record:
    """Return the record of an expression. `number_of` numbers its symbols. Raises NotKeepable."""
    import sympy

    if expression.is_Symbol:
        return ["symbol", number_of(expression)]
    if expression.is_Integer:
        return int(expression)
    if expression is sympy.true or expression is sympy.false:
        return bool(expression)
    if expression.is_Rational:
        return ["quotient", int(expression.p), int(expression.q)]
    if expression.is_Float and sympy.Float(float(expression)) == expression:
        return ["float", float(expression).hex()]
    name = _operation_names().get(expression.func)
    if name is None:
        raise NotKeepable(f"a size is computed by {type(expression).__name__}")
    args = [expression_record(argument, number_of) for argument in expression.args]
    return [name, *(sorted(args, key=json.dumps) if name in _UNORDERED else args)]


def expression_of(record: Record, symbols: Sequence[Any]) -> Any:
    """Return the expression of a record, in terms of the given symbols. Raises NotKeepable."""
    import sympy

    if isinstance(record, bool):
        return sympy.true if record else sympy.false
    if isinstance(record, int):
        return sympy.Integer(record)
    name, *args = record
    if name == "symbol":
        return symbols[args[0]]
    if name == "quotient":
        return sympy.Rational(*args)
    if name == "float":
        return sympy.Float(float.fromhex(args[0]))
    operation = _operations().get(name)
    if operation is None:
        raise NotKeepable(f"a record has an operation of an unknown kind, {name}")
    return operation(*(expression_of(argument, symbols) for argument in args))
