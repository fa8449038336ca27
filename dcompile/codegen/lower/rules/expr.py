"""Arithmetic on values of a loop body, for rules that are formulas."""

from __future__ import annotations

from collections.abc import Sequence

from dcompile.codegen.lower.loop_builder import Body
from dcompile.ir.nodes import Ref


class Numbers:
    """Arithmetic on values of a body; numbers become constants of their dtype."""

    def __init__(self, body: Body, dtype: str) -> None:
        self.body, self.dtype = body, dtype

    def __call__(self, op: str, *args: Ref | float) -> Ref:
        return self.body.apply(op, *(self.ref(arg) for arg in args))

    def ref(self, value: Ref | float) -> Ref:
        """Return a value's number; floats become constants, integers are values of the body already."""
        return self.body.const(value, self.dtype) if isinstance(value, float) else value

    def polynomial(self, x: Ref, coefficients: Sequence[float]) -> Ref:
        """Evaluate a polynomial by Horner's rule, highest power first."""
        result = self.ref(coefficients[0])
        for coefficient in coefficients[1:]:
            result = self("add", self("mul", result, x), coefficient)
        return result

    def signed(self, magnitude: Ref, like: Ref) -> Ref:
        """Return the magnitude with the sign of another number."""
        return self("where", self("signbit", like), self("neg", magnitude), magnitude)
