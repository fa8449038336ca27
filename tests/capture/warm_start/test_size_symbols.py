"""Expressions of sizes as JSON: the same after reading, whatever their symbols are called."""

import json

import pytest
import sympy
from torch.utils._sympy import functions

from dcompile.capture.warm_start.size_symbols import expression_of, expression_record
from dcompile.compat.process_state import NotKeepable

A, B = (sympy.Symbol(name, positive=True, integer=True) for name in ("s27", "s9"))
EXPRESSIONS = (
    sympy.Integer(-3),
    2 * A * B - A + 5,
    A**2 + sympy.Rational(1, 2),
    functions.FloorDiv(A + 1, 2) * functions.Mod(B, 8),
    functions.Max(1, A - B),
    functions.TruncToInt(functions.FloatTrueDiv(functions.ToFloat(A), sympy.Float(1.7))),
    sympy.Eq(functions.Mod(A * B, 16), 0),
    sympy.And(A < B, sympy.Ne(A, 7)),
    sympy.true,
)


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_an_expression_comes_back(expression):
    record = json.loads(json.dumps(expression_record(expression, [A, B].index)))
    assert expression_of(record, [A, B]) == expression
    swapped = expression.subs({A: B, B: A}, simultaneous=True)
    if not isinstance(expression, sympy.logic.boolalg.Boolean):  # sympy turns comparisons around
        assert expression_record(swapped, [B, A].index) == record
    C, D = (sympy.Symbol(name, positive=True, integer=True) for name in "ba")
    assert expression_of(record, [C, D]) == expression.subs({A: C, B: D})


def test_what_is_no_operation_on_sizes_is_refused():
    for record in (["exec", 1], ["Symbol", "x"], ["os.system", 1]):
        with pytest.raises(NotKeepable, match="unknown kind"):
            expression_of(record, [A])
    with pytest.raises(NotKeepable, match="is computed by"):
        expression_record(sympy.sin(A), [A].index)
