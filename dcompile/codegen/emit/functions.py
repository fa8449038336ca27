"""The float functions of the prelude: branch-free polynomials, for one element and for vectors of them."""

from __future__ import annotations

FUNCTIONS = r"""
/* float functions; largest errors measured against float64 are in tests/codegen/emit/test_prelude.py; F is float, or 16
   of them (wide.py) */
INLINE float copysign_(float x, float sign) { return __builtin_copysignf(x, sign); }
/* r times 2 to the whole number in t, to which SHIFT was added, in two steps, so that results may be denormal or
   overflow; rounded once */
INLINE float scale_(float r, float t, float) {
  const int32 i = (int32)(t - SHIFT), half = i >> 1;
  return unbits(bits(r) + (u32(half) << 23)) * unbits(u32(i - half + 127) << 23);
}
/* 2 to the whole number in t, to which SHIFT - 127 was added, of -126 to 127 */
template <class F> INLINE F power_(F t) { return unbits(bits(t) << 23); }
template <class F> INLINE F exp_of(F a) {
  const F x = min_number_(max_number_(a, -105.f), 90.f);
  const F t = fma_(x, 1.442695041f, SHIFT), j = t - SHIFT;
  F f = fma_(j, -6.93145752e-1f, x);
  f = fma_(j, -1.42860677e-6f, f);
  F r = fma_(f, 1.37805939e-3f, 8.37312452e-3f);
  r = fma_(r, f, 4.16695364e-2f);
  r = fma_(r, f, 1.66664720e-1f);
  r = fma_(r, f, 4.99999851e-1f);
  r = fma_(r, f, 1.f);
  r = fma_(r, f, 1.f);
  return scale_(r, t, x);
}
template <class F> INLINE F exp2_of(F a) {
  const F x = min_number_(max_number_(a, -152.f), 130.f);
  const F t = x + SHIFT, f = x - (t - SHIFT);
  F r = fma_(f, 1.53502474e-4f, 1.33990591e-3f);
  r = fma_(r, f, 9.61844705e-3f);
  r = fma_(r, f, 5.55033041e-2f);
  r = fma_(r, f, 2.40226487e-1f);
  r = fma_(r, f, 6.93147182e-1f);
  r = fma_(r, f, 1.f);
  return scale_(r, t, x);
}
#define FUNCTION(name) INLINE float name##_(float x) { return name##_of(x); } VECTOR_FUNCTION(name)
FUNCTION(exp) FUNCTION(exp2)
INLINE float log_(float a) {
  const bool tiny = a < 1.17549435e-38f;
  const float x = tiny ? a * 8388608.f : a;
  const u32 e = (bits(x) - 0x3f2aaaabu) & 0xff800000u;
  const float f = unbits(bits(x) - e) - 1.f, s = f * f;
  const float i = fma_((float)(int32)e, 1.19209290e-7f, tiny ? -23.f : 0.f);
  float r = fma_(-0.130310059f, s, -0.121483512f), t = fma_(0.140869141f, s, 0.139814854f);
  r = fma_(r, s, -0.166846126f);
  t = fma_(t, s, 0.200120345f);
  r = fma_(r, s, -0.249996200f);
  r = fma_(t, f, r);
  r = fma_(r, f, 0.333331972f);
  r = fma_(r, f, -0.5f);
  // i * ln 2 without its last bits, and f, as a sum and what rounding takes from it
  const float n = i * 0.693145752f, h = n + f;
  r = h + fma_(i, 1.42860677e-6f, fma_(r, s, f - (h - n)));
  r = a == __builtin_inff() ? a : r;
  r = a == 0.f ? -__builtin_inff() : r;
  return a < 0.f || a != a ? __builtin_nanf("") : r;
}
INLINE float log1p_(float x) {
  const float u = 1.f + x, d = u - 1.f;
  const float near = log_(u) * (x / (d == 0.f ? 1.f : d));
  return d == 0.f ? x : u == __builtin_inff() ? u : u == 0.f ? -u - __builtin_inff() : near;
}
INLINE float expm1_(float x) {
  float r = 1.98412698e-4f;
  r = fma_(r, x, 1.38888889e-3f);
  r = fma_(r, x, 8.33333333e-3f);
  r = fma_(r, x, 4.16666667e-2f);
  r = fma_(r, x, 1.66666667e-1f);
  r = fma_(r, x, 0.5f);
  r = fma_(r * x, x, x);
  return __builtin_fabsf(x) < 0.4f ? r : exp_(x) - 1.f;
}
template <class F> INLINE F tanh_of(F a) {
  const F t = abs_(a), s = a * a;
  F r = fma_(s, 1.57394409e-2f, -5.23025580e-2f);
  r = fma_(r, s, 1.33152470e-1f);
  r = fma_(r, s, -3.33327681e-1f);
  r = fma_(r * s, a, a);
  const F far = copysign_(1.f - 2.f / (1.f + exp_of(2.f * t)), a);
  return t < 0.55f ? r : a != a ? a : far;
}
template <class F> INLINE F sigmoid_of(F x) { return 1.f / (1.f + exp_of(-x)); }
/* where t is large, 1 - erf(t) = 2^(t * polynomial), up to where erf is 1: the power needs no second step to be scaled.
   The polynomial's first term is added apart, or its rounding would be a quarter of the result's */
template <class F> INLINE F erf_of(F a) {
  const F u = min_number_(abs_(a), 3.95f), s = u * u;
  F r = fma_(u, 3.07729701e-4f, -4.63018427e-3f);
  r = fma_(r, u, 3.29979546e-2f);
  r = fma_(r, u, -1.51821896e-1f);
  r = fma_(r, u, -9.17177141e-1f);
  const F t = fma_(fma_(r, u, -1.62809312f), u, SHIFT - 127.f);
  const F f = fma_(r, s, fma_(u, -1.62809312f, (SHIFT - 127.f) - t));
  F p = fma_(f, 1.53533605e-4f, 1.33988750e-3f);
  p = fma_(p, f, 9.61843319e-3f);
  p = fma_(p, f, 5.55032939e-2f);
  p = fma_(p, f, 2.40226269e-1f);
  p = fma_(p, f, 6.93147182e-1f);
  p = fma_(p, f, 1.f);
  const F far = fma_(p, -power_(t), 1.f);
  F q = fma_(s, -5.96761703e-4f, 4.99119423e-3f);
  q = fma_(q, s, -2.67681349e-2f);
  q = fma_(q, s, 1.12819925e-1f);
  q = fma_(q, s, -3.76125336e-1f);
  q = fma_(q, s, 1.28379166e-1f);
  q = fma_(q, u, u);
  return copysign_(u > 0.927734375f ? far : q, a);
}
FUNCTION(tanh) FUNCTION(sigmoid) FUNCTION(erf)
#define LIBM(name, builtin) INLINE double name##_(double x) { return __builtin_##builtin(x); }
LIBM(exp, exp) LIBM(exp2, exp2) LIBM(expm1, expm1) LIBM(log, log) LIBM(log1p, log1p) LIBM(tanh, tanh) LIBM(erf, erf)
INLINE double sigmoid_(double x) { return 1. / (1. + __builtin_exp(-x)); }
#define LIBM2(name, builtin) LIBM(name, builtin) INLINE float name##_(float x) { return __builtin_##builtin##f(x); }
LIBM2(log2, log2) LIBM2(log10, log10) LIBM2(sin, sin) LIBM2(cos, cos) LIBM2(tan, tan)
LIBM2(erfc, erfc) LIBM2(lgamma, lgamma) LIBM2(asin, asin) LIBM2(acos, acos) LIBM2(sinh, sinh) LIBM2(cosh, cosh)
LIBM2(asinh, asinh) LIBM2(acosh, acosh) LIBM2(atanh, atanh)
#define LIBM_PAIR(name) \
  INLINE float name##_(float a, float b) { return __builtin_##name##f(a, b); } \
  INLINE double name##_(double a, double b) { return __builtin_##name(a, b); }
LIBM_PAIR(pow) LIBM_PAIR(atan2) LIBM_PAIR(hypot) LIBM_PAIR(nextafter)
template <class F> INLINE F logaddexp_(F a, F b) {
  const F low = min_(a, b), high = max_(a, b);
  return low == high && low - low != 0 ? high : high + log1p_(exp_(low - high));
}
INLINE bool signbit_(float x) { return bits(x) >> 31; }
INLINE bool signbit_(double x) { return __builtin_signbit(x); }
static float64 zeta_of(float64 x, float64 q) { /* Cephes, as eager: also for float32 */
  const float64 divisors[] = {12., -720., 30240., -1209600., 47900160., -1.8924375803183791606e9, 7.47242496e10,
    -2.950130727918164224e12, 1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17,
    -7.1661652561756670113e18};
  if (x == 1.) return __builtin_inf();
  if (x < 1. || (q <= 0. && q != floor_(q) && x != floor_(x))) return __builtin_nan("");
  if (q <= 0. && q == floor_(q)) return __builtin_inf();
  float64 sum = __builtin_pow(q, -x), term = 0., w = q;
  for (int i = 0; i < 9 || w <= 9.; i++) {
    w += 1.;
    term = __builtin_pow(w, -x);
    sum += term;
    if (-1.11022302462515654042e-16 * sum < term && term < 1.11022302462515654042e-16 * sum) return sum;
  }
  sum += term * w / (x - 1.) - 0.5 * term;
  float64 factor = 1.;
  for (int i = 0; i < 12; i++) {
    factor *= x + 2 * i;
    term /= w;
    const float64 more = factor * term / divisors[i];
    sum += more;
    if (abs_(more / sum) < 1.11022302462515654042e-16) return sum;
    factor *= x + 2 * i + 1;
    term /= w;
  }
  return sum;
}
INLINE double zeta_(double x, double q) { return zeta_of(x, q); }
INLINE float zeta_(float x, float q) { return (float)zeta_of(x, q); }
"""
