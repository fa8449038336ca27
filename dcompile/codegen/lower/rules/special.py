"""Rules for special functions of one number, as polynomials and series over the operations that there are.

Methods and coefficients are those of Cephes (S. L. Moshier, Methods and Programs for Mathematical Functions, 1989),
which eager uses too: so results agree to rounding, and infinite, undefined and out-of-range arguments give the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile.codegen.lower.context import Lowering
from dcompile.codegen.lower.lazy_tensor import LazyTensor
from dcompile.codegen.lower.loop_builder import Body
from dcompile.codegen.lower.rule import Result, Rule
from dcompile.codegen.lower.rules.expr import Numbers
from dcompile.codegen.lower.rules.pointwise import Pointwise
from dcompile.ir.nodes import Ref

I0_NEAR = (
    -4.4153416464793395e-18, 3.3307945188222384e-17, -2.431279846547955e-16, 1.715391285555133e-15,
    -1.1685332877993451e-14, 7.676185498604936e-14, -4.856446783111929e-13, 2.95505266312964e-12,
    -1.726826291441556e-11, 9.675809035373237e-11, -5.189795601635263e-10, 2.6598237246823866e-09,
    -1.300025009986248e-08, 6.046995022541919e-08, -2.670793853940612e-07, 1.1173875391201037e-06,
    -4.4167383584587505e-06, 1.6448448070728896e-05, -5.754195010082104e-05, 0.00018850288509584165,
    -0.0005763755745385824, 0.0016394756169413357, -0.004324309995050576, 0.010546460394594998, -0.02373741480589947,
    0.04930528423967071, -0.09490109704804764, 0.17162090152220877, -0.3046826723431984, 0.6767952744094761,
)  # fmt: skip
I0_FAR = (
    -7.233180487874754e-18, -4.830504485944182e-18, 4.46562142029676e-17, 3.461222867697461e-17,
    -2.8276239805165836e-16, -3.425485619677219e-16, 1.7725601330565263e-15, 3.8116806693526224e-15,
    -9.554846698828307e-15, -4.150569347287222e-14, 1.54008621752141e-14, 3.8527783827421426e-13,
    7.180124451383666e-13, -1.7941785315068062e-12, -1.3215811840447713e-11, -3.1499165279632416e-11,
    1.1889147107846439e-11, 4.94060238822497e-10, 3.3962320257083865e-09, 2.266668990498178e-08,
    2.0489185894690638e-07, 2.8913705208347567e-06, 6.889758346916825e-05, 0.0033691164782556943, 0.8044904110141088,
)  # fmt: skip
I1_NEAR = (
    2.7779141127610464e-18, -2.111421214358166e-17, 1.5536319577362005e-16, -1.1055969477353862e-15,
    7.600684294735408e-15, -5.042185504727912e-14, 3.223793365945575e-13, -1.9839743977649436e-12,
    1.1736186298890901e-11, -6.663489723502027e-11, 3.625590281552117e-10, -1.8872497517228294e-09,
    9.381537386495773e-09, -4.445059128796328e-08, 2.0032947535521353e-07, -8.568720264695455e-07,
    3.4702513081376785e-06, -1.3273163656039436e-05, 4.781565107550054e-05, -0.00016176081582589674,
    0.0005122859561685758, -0.0015135724506312532, 0.004156422944312888, -0.010564084894626197, 0.024726449030626516,
    -0.05294598120809499, 0.1026436586898471, -0.17641651835783406, 0.25258718644363365,
)  # fmt: skip
I1_FAR = (
    7.517296310842105e-18, 4.414348323071708e-18, -4.6503053684893586e-17, -3.209525921993424e-17,
    2.96262899764595e-16, 3.3082023109209285e-16, -1.8803547755107825e-15, -3.8144030724370075e-15,
    1.0420276984128802e-14, 4.272440016711951e-14, -2.1015418427726643e-14, -4.0835511110921974e-13,
    -7.198551776245908e-13, 2.0356285441470896e-12, 1.4125807436613782e-11, 3.2526035830154884e-11,
    -1.8974958123505413e-11, -5.589743462196584e-10, -3.835380385964237e-09, -2.6314688468895196e-08,
    -2.512236237870209e-07, -3.882564808877691e-06, -0.00011058893876262371, -0.009761097491361469,
    0.7785762350182801,
)  # fmt: skip
"""Chebyshev coefficients of exp(-x) I(x) up to 8, and of exp(-x) sqrt(x) I(x) from there; I1's near ones over x."""
NDTRI_P0 = (
    -59.96335010141079, 98.00107541859997, -56.67628574690703, 13.931260938727968, -1.2391658386738125,
)  # fmt: skip
NDTRI_Q0 = (
    1.0, 1.9544885833814176, 4.676279128988815, 86.36024213908905, -225.46268785411937, 200.26021238006066,
    -82.03722561683334, 15.90562251262117, -1.1833162112133,
)  # fmt: skip
NDTRI_P1 = (
    4.0554489230596245, 31.525109459989388, 57.16281922464213, 44.08050738932008, 14.684956192885803,
    2.1866330685079025, -0.1402560791713545, -0.03504246268278482, -0.0008574567851546854,
)  # fmt: skip
NDTRI_Q1 = (
    1.0, 15.779988325646675, 45.39076351288792, 41.3172038254672, 15.04253856929075, 2.504649462083094,
    -0.14218292285478779, -0.03808064076915783, -0.0009332594808954574,
)  # fmt: skip
NDTRI_P2 = (
    3.2377489177694603, 6.915228890689842, 3.9388102529247444, 1.3330346081580755, 0.20148538954917908,
    0.012371663481782003, 0.00030158155350823543, 2.6580697468673755e-06, 6.239745391849833e-09,
)  # fmt: skip
NDTRI_Q2 = (
    1.0, 6.02427039364742, 3.6798356385616087, 1.3770209948908132, 0.21623699359449663, 0.013420400608854318,
    0.00032801446468212774, 2.8924786474538068e-06, 6.790194080099813e-09,
)  # fmt: skip
K0_NEAR = (
    1.374465435613523e-16, 4.25981614279661e-14, 1.0349695257633842e-11, 1.904516377220209e-09,
    2.5347910790261494e-07, 2.286212103119452e-05, 0.001264615411446926, 0.0359799365153615, 0.3442898999246285,
    -0.5353273932339028,
)  # fmt: skip
K0_FAR = (
    5.300433772686263e-18, -1.6475804301524212e-17, 5.2103915050390274e-17, -1.678231096805412e-16,
    5.512055978524319e-16, -1.848593377343779e-15, 6.3400764774050706e-15, -2.2275133269916698e-14,
    8.032890775363575e-14, -2.9800969231727303e-13, 1.140340588208475e-12, -4.514597883373944e-12,
    1.8559491149547177e-11, -7.957489244477107e-11, 3.577397281400301e-10, -1.69753450938906e-09,
    8.574034017414225e-09, -4.660489897687948e-08, 2.766813639445015e-07, -1.8317555227191195e-06,
    1.39498137188765e-05, -0.00012849549581627802, 0.0015698838857300533, -0.0314481013119645, 2.4403030820659555,
)  # fmt: skip
K1_NEAR = (
    -7.023863479386288e-18, -2.427449850519366e-15, -6.666901694199329e-13, -1.4114883926335278e-10,
    -2.213387630734726e-08, -2.4334061415659684e-06, -0.0001730288957513052, -0.006975723859639864,
    -0.12261118082265715, -0.3531559607765449, 1.5253002273389478,
)  # fmt: skip
K1_FAR = (
    -5.756744483665017e-18, 1.7940508731475592e-17, -5.689462558442859e-17, 1.838093544366639e-16,
    -6.057047248373319e-16, 2.038703165624334e-15, -7.019837090418314e-15, 2.4771544244813043e-14,
    -8.976705182324994e-14, 3.3484196660784293e-13, -1.2891739609510289e-12, 5.13963967348173e-12,
    -2.1299678384275683e-11, 9.218315187605006e-11, -4.1903547593418965e-10, 2.015049755197033e-09,
    -1.0345762465678097e-08, 5.7410841254500495e-08, -3.5019606030878126e-07, 2.406484947837217e-06,
    -1.936197974166083e-05, 0.00019521551847135162, -0.002857816859622779, 0.10392373657681724, 2.7206261904844427,
)  # fmt: skip
"""The same for K: near ones, up to 2, without the part that has a logarithm."""
ERFCX = (
    -2.2370566594359995e-18, 5.068148904796111e-17, 7.418235256624044e-17, -1.2507950530688648e-15,
    -1.864562880419313e-15, 3.3478119482868056e-14, 3.25254814814874e-14, -9.65469674843344e-13,
    1.9455868545777347e-13, 2.86879501093067e-11, -6.318088340886684e-11, -7.754400208831351e-10,
    4.521959811218287e-09, 1.076499946567091e-08, -2.1886401049234397e-07, 7.74038306619849e-07, 4.13902798607301e-06,
    -6.916973302501207e-05, 0.0004907758365258086, -0.002413163540417608, 0.009074997670705265, -0.026658668435305753,
    0.05920993999819189, -0.08424913336651792, -0.004590054580646478, 2.3551578691348034,
)  # fmt: skip
"""Chebyshev coefficients of (1 + 2 x) exp(x**2) erfc(x) over (x - 3.75) / (x + 3.75)."""
DIGAMMA = (
    8.33333333333333333333e-2, -2.10927960927960927961e-2, 7.57575757575757575758e-3, -4.16666666666666666667e-3,
    3.96825396825396825397e-3, -8.33333333333333333333e-3, 8.33333333333333333333e-2,
)  # fmt: skip


def _bessel(near: Sequence[float], far: Sequence[float], *, odd: bool, scaled: bool) -> Callable[..., Ref]:
    """The modified Bessel function I0 or I1, times exp(-|x|) if scaled."""

    def meaning(body: Body, x: Ref) -> Ref:
        n = Numbers(body, body.dtype(x))
        size = n("abs", x)
        first = n.chebyshev(n("sub", n("div", size, 2.0), 2.0), near)
        first = n("mul", first, size) if odd else first
        second = n("div", n.chebyshev(n("sub", n("div", 32.0, size), 2.0), far), n("sqrt", size))
        if not scaled:
            exp = n("exp", size)
            first = n("mul", exp, first)
            second = n("div", n("mul", exp, n.chebyshev(n("sub", n("div", 32.0, size), 2.0), far)), n("sqrt", size))
        result = n("where", n("le", size, 8.0), first, second)
        return n("where", n("lt", x, 0.0), n("neg", result), result) if odd else result

    return meaning


def _bessel_k(near: Sequence[float], far: Sequence[float], *, odd: bool, scaled: bool) -> Callable[..., Ref]:
    """The modified Bessel function K0 or K1, times exp(x) if scaled."""
    inner = _bessel(I1_NEAR if odd else I0_NEAR, I1_FAR if odd else I0_FAR, odd=odd, scaled=False)

    def meaning(body: Body, x: Ref) -> Ref:
        n = Numbers(body, body.dtype(x))
        product = n("mul", n("log", n("mul", 0.5, x)), inner(body, x))
        series = n.chebyshev(n("sub", n("mul", x, x), 2.0), near)
        first = n("add", product, n("div", series, x)) if odd else n("sub", series, product)
        second = n.chebyshev(n("sub", n("div", 8.0, x), 2.0), far)
        if scaled:
            first = n("mul", first, n("exp", x))
        else:
            second = n("mul", n("exp", n("neg", x)), second)
        result = n("where", n("le", x, 2.0), first, n("div", second, n("sqrt", x)))
        result = n("where", n("eq", x, 0.0), math.inf, result)
        return n("where", n("lt", x, 0.0), math.nan, result)

    return meaning


def _spherical_j0(body: Body, x: Ref) -> Ref:
    n = Numbers(body, body.dtype(x))
    terms = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    near = n.polynomial(n("mul", x, x), terms)
    result = n("where", n("lt", n("abs", x), 0.5), near, n("div", n("sin", x), x))
    return n("where", n("isinf", x), 0.0, result)


def _erfcx(body: Body, x: Ref) -> Ref:
    """exp(x**2) erfc(x), as M. M. Shepherd and J. G. Laframboise (Mathematics of Computation 36, 1981) expand it."""
    n = Numbers(body, "float64")
    wide = body.cast(x, "float64")
    size = n("abs", wide)
    place = n("div", n("sub", size, 3.75), n("add", size, 3.75))
    series = n.chebyshev(n("mul", 2.0, place), ERFCX)
    right = n("where", n("isinf", size), 0.0, n("div", series, n("add", n("mul", 2.0, size), 1.0)))
    square = body.cast(body.apply("mul", x, x), "float64")  # rounded as eager's
    left = n("sub", n("mul", 2.0, n("exp", square)), right)
    return body.cast(n("where", n("lt", wide, 0.0), left, right), body.dtype(x))


def _erfinv(body: Body, y: Ref) -> Ref:
    """A rational approximation and two steps of Newton's method."""
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
    """Below 0 by reflection, up to 10 by recurrence, from there a series."""
    n = Numbers(body, body.dtype(x))
    negative = n("lt", x, 0.0)
    part = n("sub", x, n("trunc", x))
    double = body.cast(part, "float64")  # as eager: the tangent near a pole
    wide = Numbers(body, "float64")
    tangent = wide("div", math.pi, wide("tan", wide("mul", math.pi, double)))
    at = n("where", negative, n("sub", 1.0, x), x)
    total = n.ref(0.0)
    for _ in range(10):
        step = n("where", n("lt", at, 10.0), 1.0, 0.0)  # of two values chosen at once, g++ makes branches, no vectors
        total, at = n("sub", total, n("div", step, at)), n("add", at, step)
    square = n("div", 1.0, n("mul", at, at))
    series = n("where", n("lt", at, 1e17), n("mul", square, n.polynomial(square, DIGAMMA)), 0.0)
    far = n("sub", n("sub", n("add", total, n("log", at)), n("div", 0.5, at)), series)
    result = n("where", n("eq", at, 10.0), n("add", total, 2.25175258906672110764), far)
    reflected = n("sub", result, body.cast(tangent, body.dtype(x)))
    pole = n("eq", part, 0.0)
    result = n("where", negative, n("where", pole, math.nan, reflected), result)
    return n("where", n("eq", x, 0.0), n.signed(n.ref(math.inf), n("neg", x)), result)


def _trigamma(body: Body, x: Ref) -> Ref:
    n = Numbers(body, body.dtype(x))
    low = n("lt", x, 0.5)
    sine = n("sin", n("mul", math.pi, x))
    total = n("where", low, n("sub", 0.0, n("div", math.pi**2, n("mul", sine, sine))), 0.0)
    at = n("where", low, n("sub", 1.0, x), x)
    for _ in range(6):
        total = n("add", total, n("div", 1.0, n("mul", at, at)))
        at = n("add", at, 1.0)
    square = n("div", 1.0, n("mul", at, at))
    inner = n("sub", 1 / 30, n("mul", square, 1 / 42))
    inner = n("mul", square, n("sub", 1 / 6, n("mul", square, inner)))
    inner = n("add", n("add", 1.0, n("div", 1.0, n("mul", 2.0, at))), inner)
    total = n("add", total, n("div", inner, at))
    return n("where", low, n("neg", total), total)


def _zeta(body: Body, x: Ref, q: Ref) -> Ref:
    return body.apply("zeta", x, q)


def _polygamma(low: Lowering, value: torch.Tensor, /, order: Any, x: Any) -> Result:
    """The derivative of digamma of a given order; torch takes the order first, its method second."""
    order, x = (x, order) if isinstance(order, LazyTensor) else (order, x)
    if order == 0:
        return Pointwise(_digamma, 1, heavy=True, ops=60)(low, value, x)
    if order == 1:
        return Pointwise(_trigamma, 1, heavy=True, ops=40)(low, value, x)
    factor = math.exp(math.lgamma(order + 1)) * (1 if order % 2 else -1)

    def meaning(body: Body, x: Ref) -> Ref:
        n = Numbers(body, body.dtype(x))
        return n("mul", factor, n("zeta", float(order + 1), x))

    return Pointwise(meaning, 1, heavy=True, ops=60)(low, value, x)


def _ndtri(body: Body, given: Ref) -> Ref:
    """Where the standard normal distribution reaches `given`."""
    n = Numbers(body, body.dtype(given))
    edge = 0.13533528323661269189  # exp(-2)
    upper = n("gt", given, n("sub", 1.0, edge))
    y = n("where", upper, n("sub", 1.0, given), given)
    centred = n("sub", y, 0.5)
    square = n("mul", centred, centred)
    ratio = n("div", n("mul", square, n.polynomial(square, NDTRI_P0)), n.polynomial(square, NDTRI_Q0))
    centre = n("mul", n("add", centred, n("mul", centred, ratio)), 2.50662827463100050242)
    x = n("sqrt", n("mul", -2.0, n("log", y)))
    z = n("div", 1.0, x)
    middle = n("div", n("mul", z, n.polynomial(z, NDTRI_P1)), n.polynomial(z, NDTRI_Q1))
    far = n("div", n("mul", z, n.polynomial(z, NDTRI_P2)), n.polynomial(z, NDTRI_Q2))
    tail = n("sub", n("sub", x, n("div", n("log", x), x)), n("where", n("lt", x, 8.0), middle, far))
    tail = n("where", upper, tail, n("neg", tail))
    result = n("where", n("gt", y, edge), centre, tail)
    result = n("where", n("eq", given, 0.0), -math.inf, n("where", n("eq", given, 1.0), math.inf, result))
    outside = body.apply("or", n("lt", given, 0.0), n("gt", given, 1.0))
    return n("where", outside, math.nan, result)


_HEAVY: dict[str, tuple[Callable[..., Ref], int]] = {
    "i0": (_bessel(I0_NEAR, I0_FAR, odd=False, scaled=False), 1),
    "special_i0e": (_bessel(I0_NEAR, I0_FAR, odd=False, scaled=True), 1),
    "special_i1": (_bessel(I1_NEAR, I1_FAR, odd=True, scaled=False), 1),
    "special_i1e": (_bessel(I1_NEAR, I1_FAR, odd=True, scaled=True), 1),
    "special_modified_bessel_i0": (_bessel(I0_NEAR, I0_FAR, odd=False, scaled=False), 1),
    "special_modified_bessel_i1": (_bessel(I1_NEAR, I1_FAR, odd=True, scaled=False), 1),
    "special_modified_bessel_k0": (_bessel_k(K0_NEAR, K0_FAR, odd=False, scaled=False), 1),
    "special_modified_bessel_k1": (_bessel_k(K1_NEAR, K1_FAR, odd=True, scaled=False), 1),
    "special_scaled_modified_bessel_k0": (_bessel_k(K0_NEAR, K0_FAR, odd=False, scaled=True), 1),
    "special_scaled_modified_bessel_k1": (_bessel_k(K1_NEAR, K1_FAR, odd=True, scaled=True), 1),
    "special_spherical_bessel_j0": (_spherical_j0, 1),
    "special_erfcx": (_erfcx, 1),
    "erfinv": (_erfinv, 1),
    "digamma": (_digamma, 1),
    "special_ndtri": (_ndtri, 1),
    "special_zeta": (_zeta, 2),
}

RULES: dict[str, Rule] = {
    **{f"aten.{name}.default": Rule(Pointwise(rule, n, heavy=True, ops=60)) for name, (rule, n) in _HEAVY.items()},
    "aten.special_zeta.self_scalar": Rule(Pointwise(_zeta, 2, heavy=True, ops=60)),
    "aten.special_zeta.other_scalar": Rule(Pointwise(_zeta, 2, heavy=True, ops=60)),
    "aten.polygamma.default": Rule(_polygamma),
}
