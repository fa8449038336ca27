"""Rarer float functions: the tangent, inverse trigonometric and hyperbolic functions, logarithms to other bases.

They are part of the prelude (`math_f32.py`), without branches, for one element and for vectors. The library's, one
element at a time, took 2 to 10 times as long as eager's vectors.
"""

from __future__ import annotations

MATH_F32_RARE = r"""
#if defined __FMA__ || defined VECTORS
/* half a quarter turn is the most that is left; an odd number of quarters turns the quotient over */
template <class F> INLINE F tan_of(F x) {
  F sine, cosine;
  const auto quarters = reduced_sine(x, sine, cosine);
  const auto odd = (quarters & 1u) != 0u;
  const F near = select_(odd, -cosine, sine) / select_(odd, sine, cosine);
  return beyond_(x, select_(x == 0.f, x, near), library_tan);
}
/* asin(s) for s up to 1/2, whose square is z, without its first term */
template <class F> INLINE F arc_of(F s, F z) {
  F r = fma_(z, 4.22105119e-2f, 2.41528153e-2f);
  r = fma_(r, z, 4.54759113e-2f);
  r = fma_(r, z, 7.49525279e-2f);
  r = fma_(r, z, 1.66667536e-1f);
  return r * z * s;
}
/* beyond 1/2 by way of half the angle; pi / 2 and pi in two floats each */
template <class F> INLINE F asin_of(F a) {
  const F x = abs_(a), z = select_(x > 0.5f, (1.f - x) * 0.5f, x * x), s = select_(x > 0.5f, sqrt_(z), x);
  const F more = arc_of(s, z), twice = s + s, first = 1.57079637f - twice;
  const F far = first + fma_(more, -2.f, ((1.57079637f - first) - twice) - 4.37113883e-8f);
  return copysign_(select_(x > 0.5f, far, s + more), a);
}
template <class F> INLINE F acos_of(F a) {
  const F x = abs_(a), z = select_(x > 0.5f, (1.f - x) * 0.5f, x * x), s = select_(x > 0.5f, sqrt_(z), a);
  const F more = arc_of(s, z), twice = (s + more) * 2.f;
  const F first = 1.57079637f - s, near = first + (((1.57079637f - first) - s) - (more + 4.37113883e-8f));
  return select_(x > 0.5f, select_(a < 0.f, (3.14159274f - twice) - 8.74227766e-8f, twice), near);
}
/* the smaller by the larger, which is at most 1, and then what is left of half a turn */
template <class F> INLINE F atan2_of(F y, F x) {
  const F a = abs_(y), b = abs_(x);
  const auto steep = a > b;
  const F low = select_(steep, b, a), high = select_(steep, a, b);
  const F q = select_(a == b, select_(a == 0.f, a, 1.f), low / high), s = q * q;
  F r = fma_(s, -1.7870689e-3f, 1.08854854e-2f);
  r = fma_(r, s, -3.11240591e-2f);
  r = fma_(r, s, 5.79042025e-2f);
  r = fma_(r, s, -8.40037689e-2f);
  r = fma_(r, s, 1.09511547e-1f);
  r = fma_(r, s, -1.42640501e-1f);
  r = fma_(r, s, 1.9998531e-1f);
  r = fma_(r, s, -3.33332986e-1f);
  const F near = fma_(r * s, q, q), up = select_(steep, (1.57079637f - near) - 4.37113883e-8f, near);
  const auto back = (bits(x) & 0x80000000u) != 0u;
  return copysign_(select_(back, (3.14159274f - up) - 8.74227766e-8f, up), y);
}
/* half of e^x: e^x itself may be too large where sinh and cosh are not */
template <class F> INLINE F half_exp(F a) {
  const F x = min_number_(a, 90.f), t = fma_(x, 1.442695041f, SHIFT), j = t - SHIFT;
  return scale_(exp_near(fma_(j, -1.42860677e-6f, fma_(j, -6.93145752e-1f, x))), t - 1.f, x);
}
template <class F> INLINE F sinh_of(F a) {
  const F x = abs_(a), z = x * x, half = half_exp(x);
  F r = fma_(z, 2.78392554e-6f, 1.98426351e-4f);
  r = fma_(r, z, 8.33331142e-3f);
  r = fma_(r, z, 1.66666672e-1f);
  return copysign_(select_(x < 1.f, fma_(r * z, x, x), half - 0.25f / half), a);
}
template <class F> INLINE F cosh_of(F a) {
  const F half = half_exp(abs_(a));
  return half + 0.25f / half;
}
/* (1 + 2 x) e^(x^2) erfc(x) is close to a polynomial in (x - 2) / (x + 2); the square's last bits count in a power */
template <class F> INLINE F erfc_of(F a) {
  const F x = min_number_(abs_(a), 10.5f), s = x * x, s_low = fma_(x, x, -s), part = 1.f / (x + 2.f);
  const F first = (x - 2.f) * part, q = fma_(part, fma_(-first, x, fma_(first + 1.f, -2.f, x)), first);
  F r = fma_(q, -4.04562161e-4f, -1.23797311e-3f);
  r = fma_(r, q, 1.31407729e-3f);
  r = fma_(r, q, 8.64023343e-3f);
  r = fma_(r, q, -8.0579808e-3f);
  r = fma_(r, q, -5.42074703e-2f);
  r = fma_(r, q, 1.64054602e-1f);
  r = fma_(r, q, -1.66030958e-1f);
  r = fma_(r, q, -9.27639157e-2f);
  r = fma_(r, q, 1.27697837f);
  const F scale = fma_(x, 2.f, 1.f), quotient = r / scale;
  const F close = quotient + fma_(-quotient, scale, r) / scale, power = exp_of(-s);
  const F near = power * fma_(-s_low, close, close);
  return select_(a != a, a, select_(a < 0.f, 2.f - near, near));
}
FUNCTION(tan) FUNCTION(asin) FUNCTION(acos) FUNCTION_2(atan2) FUNCTION(sinh) FUNCTION(cosh) FUNCTION(erfc)
/* to another base: `base` and `base_low` are 1 / log(base), `two` and `two_low` the logarithm of 2, `two` so short that
   its multiples are exact */
template <class F> INLINE F log_by(F a, float base, float base_low, float two, float two_low) {
  F i, f, r, s;
  log_parts(a, i, f, r, s);
  const F p = f * base, p_low = fma_(f, base_low, fma_(f, base, -p)), n = i * two, h = n + p;
  return log_ends(a, h + fma_(i, two_low, (p - (h - n)) + fma_(r * s, base, p_low)));
}
template <class F> INLINE F log2_of(F a) { return log_by(a, 1.44269502f, 1.92596299e-8f, 1.f, 0.f); }
template <class F> INLINE F log10_of(F a) {
  return log_by(a, 0.434294492f, -1.01030501e-8f, 0.301025391f, 4.60503898e-6f);
}
/* log(1 + t + low) */
template <class F> INLINE F log_above_one(F t, F low) {
  const F u = 1.f + t, lost = select_(t > 1.f, 1.f - (u - t), t - (u - 1.f));
  return log_of(u) + (lost + low) / u;
}
template <class F> INLINE F asinh_of(F a) {
  const F x = abs_(a), s = x * x, more = s / (1.f + sqrt_(1.f + s)), t = x + more;
  const F near = log_above_one(t, more - (t - x)), far = log_of(x) + 0.693147181f;
  return copysign_(select_(x > 1e9f, far, near), a);
}
template <class F> INLINE F acosh_of(F a) {
  const F t = a - 1.f, root = sqrt_(t * (t + 2.f)), sum = root + t;
  const F near = log_above_one(sum, t - (sum - root)), far = log_of(a) + 0.693147181f;
  return select_(a < 1.f, __builtin_nanf(""), select_(a > 1e9f, far, near));
}
template <class F> INLINE F atanh_of(F a) {
  const F x = abs_(a), d = 1.f - x, q = (x + x) / d, low = (fma_(-q, d, x + x) - q * ((1.f - d) - x)) / d;
  return copysign_(select_(x == 1.f, __builtin_inff(), 0.5f * log_above_one(q, low)), a);
}
FUNCTION(log2) FUNCTION(log10) FUNCTION(asinh) FUNCTION(acosh) FUNCTION(atanh)
#else
LIBM1(log2, log2) LIBM1(log10, log10) LIBM1(tan, tan) LIBM1(erfc, erfc) LIBM1(asin, asin) LIBM1(acos, acos)
LIBM1(sinh, sinh) LIBM1(cosh, cosh) LIBM1(asinh, asinh) LIBM1(acosh, acosh) LIBM1(atanh, atanh)
INLINE float atan2_(float a, float b) { return __builtin_atan2f(a, b); }
#endif
/* in double, in which no square of a float is too large or too small */
INLINE float hypot_(float a, float b) {
  const float near = (float)__builtin_sqrt((double)a * a + (double)b * b);
  return isinf_(a) | isinf_(b) ? __builtin_inff() : near;
}
"""
