"""Functions of float64 without branches, which g++ makes vectors of: exponentials, logarithms, tanh, sigmoid.

The library's, one element at a time, took 2 to 8 times as long as eager's vectors. A part of the prelude's functions
(`functions.py`); largest errors are in tests/codegen/emit/test_prelude.py.
"""

from __future__ import annotations

DOUBLES = r"""
INLINE u64 bits(double x) { u64 u; __builtin_memcpy(&u, &x, 8); return u; }
INLINE double unbits(u64 u) { double x; __builtin_memcpy(&x, &u, 8); return x; }
INLINE double select_(bool mask, double a, double b) { return mask ? a : b; }
/* added to a small number, it rounds that to a whole number, plus 2046, in the lowest bits */
static constexpr double SHIFT_64 = 6755399441055744. + 2046.;
#ifdef __FMA__
INLINE double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
INLINE double fma_(double a, double b, double c) { return a * b + c; }
#endif
/* r times 2 to the whole number in t, to which SHIFT_64 was added, by way of 2^512 or 2^-512: rounded once */
INLINE double scale_(double r, double t, double x) {
  const double rest = select_(x < 0., 0x1p-512, 0x1p512);
  return r * unbits((bits(t) << 52) - bits(rest)) * rest;
}
/* (e^f - 1 - f) / f^2 by its series, whose terms from the twelfth on are r f^11 */
INLINE double exp_rest(double r, double f) {
  r = fma_(r, f, 2.08767569878681e-9);
  r = fma_(r, f, 2.505210838544172e-8);
  r = fma_(r, f, 2.755731922398589e-7);
  r = fma_(r, f, 2.7557319223985893e-6);
  r = fma_(r, f, 2.48015873015873e-5);
  r = fma_(r, f, 1.984126984126984e-4);
  r = fma_(r, f, 1.3888888888888889e-3);
  r = fma_(r, f, 8.333333333333333e-3);
  r = fma_(r, f, 4.1666666666666664e-2);
  r = fma_(r, f, 1.6666666666666666e-1);
  return fma_(r, f, 0.5);
}
/* e^f for f from -log(2) / 2 to log(2) / 2 */
INLINE double exp_near(double f) {
  const double r = fma_(exp_rest(1.6059043836821613e-10, f), f, 1.);
  return fma_(r, f, 1.);
}
INLINE double between(double x, double low, double high) {
  const double above = x < low ? low : x;
  return above > high ? high : above;
}
INLINE double exp_(double a) {
  const double x = between(a, -746., 710.);
  const double t = fma_(x, 1.4426950408889634, SHIFT_64), j = t - SHIFT_64;
  const double f = fma_(j, -1.9082149292705877e-10, fma_(j, -0.6931471803691238, x));
  return scale_(exp_near(f), t, x);
}
INLINE double exp2_(double a) {
  const double x = between(a, -1076., 1025.), t = x + SHIFT_64, f = x - (t - SHIFT_64);
  /* f log(2) in two numbers */
  const double p = f * 0.6931471805599453, low = fma_(f, 2.3190468138462996e-17, fma_(f, 0.6931471805599453, -p));
  const double r = exp_near(p);
  return scale_(fma_(r, low, r), t, x);
}
INLINE double expm1_(double x) {
  double r = fma_(x, 7.647163731819816e-13, 1.1470745597729725e-11);
  r = exp_rest(fma_(r, x, 1.6059043836821613e-10), x);
  r = fma_(r * x, x, x);
  return __builtin_copysign(select_(abs_(x) < 0.4, r, exp_(x) - 1.), x);
}
/* log(a) = i log(2) + f - half f^2 + rest, f from sqrt(1/2) - 1 to sqrt(2) - 1 */
INLINE void log_parts(double a, double& i, double& f, double& half, double& rest) {
  const bool tiny = a < 0x1p-1022;
  const double x = select_(tiny, a * 0x1p54, a);
  const u64 moved = bits(x) + (0x3ff0000000000000ul - 0x3fe6a09e667f3bcdul);
  f = unbits((moved & 0xffffffffffffful) + 0x3fe6a09e667f3bcdul) - 1.;
  i = unbits(moved >> 52 | 0x4330000000000000ul) - (0x1p52 + 1023.) - select_(tiny, 54., 0.);
  const double s = f / (2. + f), z = s * s, w = z * z;
  const double odd = w * fma_(w, fma_(w, 0.15313837699209373, 0.22222198432149784), 0.3999999999940942);
  const double even = fma_(w, fma_(w, fma_(w, 0.14798198605116586, 0.1818357216161805), 0.2857142874366239),
    0.6666666666666735);
  half = 0.5 * f * f;
  rest = s * (half + fma_(z, even, odd));
}
INLINE double log_ends(double a, double r) {
  const double above = select_(a == 0., -__builtin_inf(), select_(a == __builtin_inf(), a, r));
  return select_(a >= 0., above, __builtin_nan(""));
}
INLINE double log_(double a) {
  double i, f, half, rest;
  log_parts(a, i, f, half, rest);
  const double sum = fma_(i, 0.6931471803691238, f - (half - fma_(i, 1.9082149292705877e-10, rest)));
  return log_ends(a, sum);
}
INLINE double log1p_(double x) {
  const double u = 1. + x, d = u - 1., near = log_(u) * (x / select_(d == 0., 1., d));
  const double above = select_(u == __builtin_inf(), u, select_(u == 0., -u - __builtin_inf(), near));
  return select_(d == 0., x, above);
}
INLINE double sigmoid_(double x) { return 1. / (1. + exp_(-x)); }
INLINE double tanh_(double a) {
  const double t = abs_(a), z = a * a;
  const double p = fma_(fma_(z, -9.64399179425052238628e-1, -9.92877231001918586564e1), z, -1.61468768441708447952e3);
  const double q = fma_(fma_(z + 1.12811678491632931402e2, z, 2.23548839060100448583e3), z, 4.84406305325125486048e3);
  const double far = select_(a != a, a, 1. - 2. / (1. + exp_(2. * t)));
  return __builtin_copysign(select_(t < 0.625, fma_(t * z, p / q, t), far), a);
}
"""
