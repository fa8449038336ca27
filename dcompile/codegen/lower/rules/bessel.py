"""Rules for Bessel functions of the first and second kind and for Airy's, over the operations that there are.

Methods and coefficients are those of Cephes (S. L. Moshier, Methods and Programs for Mathematical Functions, 1989:
j0.c, j1.c, airy.c) as eager has them: of denominators whose highest coefficient is 1, that power is left out. Where
Cephes sums the series of Ai until it does not change, here are as many of its terms as that takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rule import Rule
from dcompile.codegen.lower.rules.expr import Numbers
from dcompile.codegen.lower.rules.pointwise import Pointwise
from dcompile.ir.nodes import Ref

J0_NEAR = (
    -4794432209.782018, 1956174919465.5657, -249248344360967.72, 9708622510473064.0,
)  # fmt: skip
J0_NEAR_UNDER = (
    499.563147152651, 173785.4016763747, 48440965.83399621, 11185553704.535683, 2112775201154.892, 310518229857422.56,
    3.1812195594320496e+16, 1.7108629408104315e+18,
)  # fmt: skip
Y0_NEAR = (
    15592.436785523574, -14663929.59039716, 5435264770.518765, -982136065717.9115, 87590639439536.7,
    -3466283033847297.0, 4.4273326857256984e+16, -1.8495080043698668e+16,
)  # fmt: skip
Y0_NEAR_UNDER = (
    1041.2835366425984, 626107.330137135, 268919633.39381415, 86400248710.3935, 20297961275010.555,
    3171577528429750.5, 2.5059625617265306e+17,
)  # fmt: skip
J1_NEAR = (
    -899971225.7055594, 452228297998.19403, -72749424522181.83, 3682957328638529.0,
)  # fmt: skip
J1_NEAR_UNDER = (
    620.8364781180543, 256987.25675774884, 83514679.14319493, 22151159547.97925, 4749141220799.914, 784369607876235.9,
    8.952223361846274e+16, 5.322786203326801e+18,
)  # fmt: skip
Y1_NEAR = (
    1263204747.9017804, -647355876379.1603, 114509511541823.73, -8127702555013251.0, 2.024394757135949e+17,
    -7.788771962659501e+17,
)  # fmt: skip
Y1_NEAR_UNDER = (
    594.3015923461282, 235564.09294306856, 73481194.44597217, 18760131610.870617, 3882312774962.3857,
    620557727146953.8, 6.871410873553005e+16, 3.9727060811656064e+18,
)  # fmt: skip
J0_ZEROS, J1_ZEROS = (5.78318596294678452118, 30.4712623436620863991), (14.6819706421238932572, 49.2184563216946036703)
"""Squares of the first zeros."""
FAR_P_0 = (
    0.0007969367292973471, 0.08283523921074408, 1.239533716464143, 5.447250030587687, 8.74716500199817,
    5.303240382353949, 1.0,
)  # fmt: skip
FAR_P_UNDER_0 = (
    0.0009244088105588637, 0.08562884743544745, 1.2535274390105895, 5.470977403304171, 8.761908832370695,
    5.306052882353947, 1.0,
)  # fmt: skip
FAR_Q_0 = (
    -0.011366383889846916, -1.2825271867050931, -19.553954425773597, -93.20601521237683, -177.68116798048806,
    -147.07750515495118, -51.41053267665993, -6.050143506007285,
)  # fmt: skip
FAR_Q_UNDER_0 = (
    64.3178256118178, 856.4300259769806, 3882.4018360540163, 7240.467741956525, 5930.727011873169, 2062.0933166032783,
    242.0057402402914,
)  # fmt: skip
FAR_P_1 = (
    0.0007621256162081731, 0.07313970569409176, 1.1271960812968493, 5.112079511468076, 8.424045901417724,
    5.214515986823615, 1.0,
)  # fmt: skip
FAR_P_UNDER_1 = (
    0.0005713231280725487, 0.06884559087544954, 1.105142326340617, 5.073863861286015, 8.399855543276042,
    5.209828486823619, 1.0,
)  # fmt: skip
FAR_Q_1 = (
    0.05108625947501766, 4.982138729512334, 75.82382841325453, 366.7796093601508, 710.8563049989261,
    597.4896124006136, 211.68875710057213, 25.207020585802372,
)  # fmt: skip
FAR_Q_UNDER_1 = (
    74.23732770356752, 1056.4488603826283, 4986.410583376536, 9562.318924047562, 7997.041604473507,
    2826.1927851763908, 336.0936078106983,
)  # fmt: skip
FAR = ((FAR_P_0, FAR_P_UNDER_0, FAR_Q_0, FAR_Q_UNDER_0), (FAR_P_1, FAR_P_UNDER_1, FAR_Q_1, FAR_Q_UNDER_1))
AIRY_RIGHT = (
    0.346538101525629, 12.007595273964581, 76.27960536152345, 168.08922493463058, 159.75639135016442,
    70.53609068404442, 14.026469116338967, 1.0,
)  # fmt: skip
AIRY_RIGHT_UNDER = (
    0.5675945326387702, 14.75625625848472, 84.51389701414746, 177.31808814540045, 164.2346928715297,
    71.47784008255756, 14.095913560783403, 1.0,
)  # fmt: skip
AIRY_SINE = (
    -0.1316963234183318, -0.6264565444319123, -0.6931580360369335, -0.2797799815451191, -0.04919001326095003,
    -0.004062659235948854, -0.0001592764962392621, -2.776491081552329e-06, -1.6778769848911465e-08,
)  # fmt: skip
AIRY_SINE_UNDER = (
    13.356042070655324, 32.682503279522464, 26.736704094149957, 9.187074029072596, 1.4752914677166642,
    0.11568717379518804, 0.004402916416152112, 7.547203482874142e-05, 4.5185009297058035e-07,
)  # fmt: skip
AIRY_COSINE = (
    0.01973399320916857, 0.39110302961568827, 1.0657989759959559, 0.9391692298166502, 0.35146565610554764,
    0.06338889196289255, 0.005858041130483885, 0.000282851600836737, 6.98793669997261e-06, 8.117892395543892e-08,
    3.415517847659236e-10,
)  # fmt: skip
AIRY_COSINE_UNDER = (
    9.30892908077442, 19.835292871831214, 15.564662893286462, 5.476860694229755, 0.9542936116189619,
    0.08645808263523921, 0.004126565238242226, 0.00010125908511650914, 1.1716673321441352e-06, 4.9183457006293e-09,
)  # fmt: skip


TERMS = 13
"""Of the series of Ai: up to 2.09 the next ones are below 1e-19."""


class _Bessel(Numbers):
    """What J and Y of one order share."""

    def ratio(self, at: Ref, over: Sequence[float], under: Sequence[float]) -> Ref:
        return self("div", self.polynomial(at, over), self.polynomial(at, under))

    def far(self, x: Ref, order: int, first: str, second: str) -> Ref:
        """Beyond 5: a wave, of which both parts are multiplied by a polynomial in 5 / x; Y has the other signs."""
        over, under, beside, beneath = FAR[order]
        inverse = self("div", 5.0, x)
        at = self("mul", inverse, inverse) if order else self("div", 25.0, self("mul", x, x))
        phase = self("sub", x, (2 * order + 1) * math.pi / 4)
        one = self("mul", self.ratio(at, over, under), self(first, phase))
        other = self("mul", self("mul", inverse, self.ratio(at, beside, beneath)), self(second, phase))
        wave = self("sub" if first == "cos" else "add", one, other)
        return self("div", self("mul", wave, math.sqrt(2 / math.pi)), self("sqrt", x))


def _j0(body: Body, x: Ref) -> Ref:
    n = _Bessel(body, body.dtype(x))
    x = n("abs", x)
    square = n("mul", x, x)
    zeros = n("mul", n("sub", square, J0_ZEROS[0]), n("sub", square, J0_ZEROS[1]))
    near = n("div", n("mul", zeros, n.polynomial(square, J0_NEAR)), n.polynomial(square, J0_NEAR_UNDER))
    near = n("where", n("lt", x, 1e-5), n("sub", 1.0, n("div", square, 4.0)), near)
    return n("where", n("le", x, 5.0), near, n.far(x, 0, "cos", "sin"))


def _j1(body: Body, given: Ref) -> Ref:
    n = _Bessel(body, body.dtype(given))
    negative = n("lt", given, 0.0)
    x = n("where", negative, n("neg", given), given)
    square = n("mul", x, x)
    near = n("mul", n.ratio(square, J1_NEAR, J1_NEAR_UNDER), x)
    near = n("mul", n("mul", near, n("sub", square, J1_ZEROS[0])), n("sub", square, J1_ZEROS[1]))
    result = n("where", n("le", x, 5.0), near, n.far(x, 1, "cos", "sin"))
    return n("where", negative, n("neg", result), result)


def _y0(body: Body, x: Ref) -> Ref:
    n = _Bessel(body, body.dtype(x))
    logarithm = n("mul", n("mul", 2 / math.pi, n("log", x)), _j0(body, x))
    return _second_kind(n, x, n("add", n.ratio(n("mul", x, x), Y0_NEAR, Y0_NEAR_UNDER), logarithm), 0)


def _y1(body: Body, x: Ref) -> Ref:
    n = _Bessel(body, body.dtype(x))
    logarithm = n("mul", 2 / math.pi, n("sub", n("mul", _j1(body, x), n("log", x)), n("div", 1.0, x)))
    return _second_kind(n, x, n("add", n("mul", x, n.ratio(n("mul", x, x), Y1_NEAR, Y1_NEAR_UNDER)), logarithm), 1)


def _second_kind(n: _Bessel, x: Ref, near: Ref, order: int) -> Ref:
    """Y, which is infinite at 0 and nothing below."""
    result = n("where", n("le", x, 5.0), near, n.far(x, order, "sin", "cos"))
    result = n("where", n("eq", x, 0.0), -math.inf, result)
    return n("where", n("lt", x, 0.0), math.nan, result)


def _airy_ai(body: Body, x: Ref) -> Ref:
    n = _Bessel(body, body.dtype(x))
    left, right = n("lt", x, -2.09), n("ge", x, 2.09)
    result = n("where", left, _airy_left(n, x), n("where", right, _airy_right(n, x), _airy_series(n, x)))
    result = n("where", n("gt", x, 103.892), 0.0, result)
    infinite = n("eq", n("abs", x), math.inf)  # vectors have no "isinf": it took 6 times as long
    return n("where", infinite, math.nan, result)


def _airy_left(n: _Bessel, x: Ref) -> Ref:
    """A wave."""
    root = n("sqrt", n("neg", x))
    angle = n("div", n("mul", n("mul", -2.0, x), root), 3.0)
    z = n("div", 1.0, angle)
    square = n("mul", z, z)
    phase = n("add", angle, math.pi / 4)
    sine = n("mul", square, n.polynomial(square, AIRY_SINE))
    sine = n("add", 1.0, n("div", sine, n.polynomial(square, AIRY_SINE_UNDER)))
    cosine = n("mul", z, n.polynomial(square, AIRY_COSINE))
    cosine = n("div", cosine, n.polynomial(square, AIRY_COSINE_UNDER))
    wave = n("sub", n("mul", n("sin", phase), sine), n("mul", n("cos", phase), cosine))
    return n("mul", n("div", 1 / math.sqrt(math.pi), n("sqrt", root)), wave)


def _airy_right(n: _Bessel, x: Ref) -> Ref:
    """What falls off."""
    root = n("sqrt", x)
    zeta = n("div", n("mul", n("mul", 2.0, x), root), 3.0)
    ratio = n.ratio(n("div", 1.0, zeta), AIRY_RIGHT, AIRY_RIGHT_UNDER)
    under = n("mul", n("mul", 2.0, n("sqrt", root)), n("exp", zeta))
    return n("div", n("mul", 1 / math.sqrt(math.pi), ratio), under)


def _airy_series(n: _Bessel, x: Ref) -> Ref:
    cube = n("mul", n("mul", x, x), x)
    even, odd = (n.polynomial(cube, _series(step)) for step in (-1, 1))
    at_zero, slope = 0.355028053887817239260, 0.258819403792806798405  # of Ai, the slope's sign changed
    return n("sub", n("mul", at_zero, even), n("mul", slope, n("mul", x, odd)))


def _series(step: int) -> tuple[float, ...]:
    """Coefficients of x**3k, the highest first: each is the one before over 3k (3k + step)."""
    found = [1.0]
    for k in range(3, 3 * TERMS, 3):
        found.append(found[-1] / (k * (k + step)))
    return tuple(reversed(found))


_MEANINGS: dict[str, Callable[[Body, Ref], Ref]] = {
    "bessel_j0": _j0, "bessel_j1": _j1, "bessel_y0": _y0, "bessel_y1": _y1, "airy_ai": _airy_ai,
}  # fmt: skip

RULES: dict[str, Rule] = {
    f"aten.special_{name}.default": Rule(Pointwise(meaning, 1, heavy=True, ops=60))
    for name, meaning in _MEANINGS.items()
}
