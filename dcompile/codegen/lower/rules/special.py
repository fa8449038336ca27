"""Rules for special functions of distributions and initializers: the inverse error function and digamma.

Both are polynomials and series over existing operations, with Cephes' coefficients as in eager (S. L. Moshier, Methods
and Programs for Mathematical Functions, 1989). Results agree to rounding, also for infinite, undefined and out-of-range
arguments. Rarer functions (Bessel, Airy, zeta, polygamma, ...) have no rule: ATen computes them, as counted fallbacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rule import Rule
from dcompile.codegen.lower.rules.pointwise import Pointwise
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


DIGAMMA = (
    8.33333333333333333333e-2, -2.10927960927960927961e-2, 7.57575757575757575758e-3, -4.16666666666666666667e-3,
    3.96825396825396825397e-3, -8.33333333333333333333e-3, 8.33333333333333333333e-2,
)  # fmt: skip


def _erfinv(body: Body, y: Ref) -> Ref:
    """Evaluate a rational approximation and two steps of Newton's method."""
    n = Numbers(body, body.dtype(y))
    size, square = n("abs", y), n("mul", y, y)
    top = n.polynomial(square, (-0.140543331, 0.914624893, -1.645349621, 0.886226899))
    bottom = n.polynomial(square, (0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0))
    centre = n("div", n("mul", y, top), bottom)
    z = n("sqrt", n("neg", n("log", n("div", n("sub", 1.0, size), 2.0))))
    top = n.polynomial(z, (1.641345311, 3.429567803, -1.624906493, -1.970840454))
    tail = n("div", n.signed(top, y), n.polynomial(z, (1.637067800, 3.543889200, 1.0)))
    x = n("where", n("le", size, 0.7), centre, tail)
    for _ in range(2):
        slope = n("mul", 2 / math.sqrt(math.pi), n("exp", n("mul", n("neg", x), x)))
        x = n("sub", x, n("div", n("sub", n("erf", x), y), slope))
    x = n("where", n("eq", size, 1.0), n.signed(n.ref(math.inf), y), x)
    return n("where", n("gt", size, 1.0), math.nan, x)


def _digamma(body: Body, x: Ref) -> Ref:
    """Evaluate digamma: below 0 by reflection, up to 10 by recurrence, and beyond by a series."""
    n = Numbers(body, body.dtype(x))
    negative = n("lt", x, 0.0)
    part = n("sub", x, n("trunc", x))
    wide = Numbers(body, "float64")  # as eager: the tangent near a pole
    angle = wide("mul", math.pi, body.cast(part, "float64"))
    tangent = wide("div", wide("mul", math.pi, wide("cos", angle)), wide("sin", angle))  # pi over it
    at = n("where", negative, n("sub", 1.0, x), x)
    total = n.ref(0.0)
    for _ in range(10):
        step = n("where", n("lt", at, 10.0), 1.0, 0.0)  # selecting two values at once, g++ emits branches, not vectors
        total, at = n("sub", total, n("div", step, at)), n("add", at, step)
    square = n("div", 1.0, n("mul", at, at))
    series = n("where", n("lt", at, 1e17), n("mul", square, n.polynomial(square, DIGAMMA)), 0.0)
    far = n("sub", n("sub", n("add", total, n("log", at)), n("div", 0.5, at)), series)
    result = n("where", n("eq", at, 10.0), n("add", total, 2.25175258906672110764), far)
    reflected = n("sub", result, body.cast(tangent, body.dtype(x)))
    pole = n("eq", part, 0.0)
    result = n("where", negative, n("where", pole, math.nan, reflected), result)
    return n("where", n("eq", x, 0.0), n.signed(n.ref(math.inf), n("neg", x)), result)


RULES: dict[str, Rule] = {
    "aten.erfinv.default": Rule(Pointwise(_erfinv, 1, heavy=True, ops=60)),
    "aten.digamma.default": Rule(Pointwise(_digamma, 1, heavy=True, ops=60)),
}
