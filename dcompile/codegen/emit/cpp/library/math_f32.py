"""The float functions of the prelude: branch-free polynomials, for one element and for vectors.

Rarer ones come last: the tangent, inverse trigonometric and hyperbolic functions, logarithms to other bases. The
library's, one element at a time, took 2 to 10 times as long as eager's vectors.
"""

from __future__ import annotations

MATH_F32 = r"""
/* float functions; F is float, or a vector of them (simd.py); tests/codegen/emit/cpp/library/test_base.py has the
   largest errors */
INLINE float select_(bool mask, float a, float b) { return mask ? a : b; }
/* whole numbers in all bits of a float, and back */
INLINE float as_number(u32 u) { return (float)(int32)u; }
INLINE u32 as_integer(float x) { return u32((int32)x); }
INLINE float copysign_(float x, float sign) { return __builtin_copysignf(x, sign); }
/* r times 2 to the whole number in t, to which SHIFT was added, in two steps, so that results may be denormal or
   overflow; rounded once */
INLINE float scale_(float r, float t, float) {
  const int32 i = (int32)(t - SHIFT), half = i >> 1;
  return unbits(bits(r) + (u32(half) << 23)) * unbits(u32(i - half + 127) << 23);
}
/* the same for t of at most SHIFT */
INLINE float scale_down_(float r, float t) { return scale_(r, t, 0.f); }
/* 2 to the whole number in t, to which SHIFT - 127 was added, of -126 to 127 */
template <class F> INLINE F power_(F t) { return unbits(bits(t) << 23); }
/* for f from -log(2) / 2 to log(2) / 2 */
template <class F> INLINE F exp_near(F f) {
  return horner(f, 1.37805939e-3f, 8.37312452e-3f, 4.16695364e-2f, 1.66664720e-1f, 4.99999851e-1f, 1.f, 1.f);
}
template <class F> INLINE F exp_of(F a) {
  const F x = min_number_(max_number_(a, -105.f), 90.f);
  const F t = fma_(x, 1.442695041f, SHIFT), j = t - SHIFT;
  F f = fma_(j, -6.93145752e-1f, x);
  f = fma_(j, -1.42860677e-6f, f);
  return scale_(exp_near(f), t, x);
}
/* the same of what is at most 0, or NaN: x minus the largest x */
template <class F> INLINE F exp_below_of(F a) {
  const F x = max_number_(a, -105.f), t = fma_(x, 1.442695041f, SHIFT), j = t - SHIFT;
  F f = fma_(j, -6.93145752e-1f, x);
  f = fma_(j, -1.42860677e-6f, f);
  return scale_down_(exp_near(f), t);
}
template <class F> INLINE F exp2_of(F a) {
  const F x = min_number_(max_number_(a, -152.f), 130.f);
  const F t = x + SHIFT, f = x - (t - SHIFT);
  F r = horner(f, 1.53502474e-4f, 1.33990591e-3f, 9.61844705e-3f, 5.55033041e-2f, 2.40226487e-1f, 6.93147182e-1f,
    1.f);
  return scale_(r, t, x);
}
#define FUNCTION(name) INLINE float name##_(float x) { return name##_of(x); } VECTOR_FUNCTION(name)
#define WOVEN(name) INLINE float name##_(float x) { return name##_of(x); } VECTOR_WOVEN(name)
#define FUNCTION_2(name) INLINE float name##_(float a, float b) { return name##_of(a, b); } VECTOR_FUNCTION_2(name)
WOVEN(exp) WOVEN(exp_below) WOVEN(exp2)
/* log(a) = i log(2) + f + r s, i a whole number and f from -1/3 to 1/3 */
template <class F> INLINE void log_parts(F a, F& i, F& f, F& r, F& s) {
  const auto tiny = a < 1.17549435e-38f;
  const F x = select_(tiny, a * 8388608.f, a);
  const auto e = (bits(x) - 0x3f2aaaabu) & 0xff800000u;
  f = unbits(bits(x) - e) - 1.f;
  s = f * f;
  i = fma_(as_number(e), 1.19209290e-7f, select_(tiny, -23.f, F{}));
  F t = fma_(s, 0.140869141f, 0.139814854f);
  r = fma_(s, -0.130310059f, -0.121483512f);
  r = fma_(r, s, -0.166846126f);
  t = fma_(t, s, 0.200120345f);
  r = fma_(r, s, -0.249996200f);
  r = fma_(t, f, r);
  r = fma_(r, f, 0.333331972f);
  r = fma_(r, f, -0.5f);
}
/* the logarithm r of a, or what it is where a is no positive number */
template <class F> INLINE F log_ends(F a, F r) {
  const F above = select_(a == 0.f, -__builtin_inff(), select_(a == __builtin_inff(), a, r));
  return select_(a >= 0.f, above, __builtin_nanf(""));
}
template <class F> INLINE F log_of(F a) {
  F i, f, r, s;
  log_parts(a, i, f, r, s);
  // i * ln 2 without its last bits, and f, as a sum and what rounding takes from it
  const F n = i * 0.693145752f, h = n + f;
  return log_ends(a, h + fma_(i, 1.42860677e-6f, fma_(r, s, f - (h - n))));
}
template <class F> INLINE F log1p_of(F x) {
  const F u = 1.f + x, d = u - 1.f, near = log_of(u) * (x / select_(d == 0.f, 1.f, d));
  const F above = select_(u == __builtin_inff(), u, select_(u == 0.f, -u - __builtin_inff(), near));
  return select_(d == 0.f, x, above);
}
template <class F> INLINE F expm1_of(F x) {
  F r = horner(x, 1.98412698e-4f, 1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f, 1.66666667e-1f, 0.5f);
  r = fma_(r * x, x, x);
  return copysign_(select_(abs_(x) < 0.4f, r, exp_of(x) - 1.f), x); /* -0, too */
}
FUNCTION(log) FUNCTION(log1p) FUNCTION(expm1)
template <class F> INLINE F tanh_of(F a) {
  const F t = abs_(a), s = a * a;
  F r = horner(s, 1.57394409e-2f, -5.23025580e-2f, 1.33152470e-1f, -3.33327681e-1f);
  r = fma_(r * s, t, t);
  const F far = 1.f - 2.f / (1.f + exp_of(2.f * t));
  return copysign_(select_(t < 0.55f, r, select_(a != a, a, far)), a); /* of -0, too */
}
template <class F> INLINE F sigmoid_of(F x) { return 1.f / (1.f + exp_of(-x)); }
/* 1 - 2^(u first + s r), s = u u, where that is at least 0: the power needs no second step to be scaled. The first term
   is added apart, or its rounding would be a quarter of the result's */
template <class F> INLINE F far_erf(F u, F s, F r, float first) {
  const F t = fma_(fma_(r, u, first), u, SHIFT - 127.f);
  const F f = fma_(r, s, fma_(u, first, (SHIFT - 127.f) - t));
  F p = horner(f, 1.53533605e-4f, 1.33988750e-3f, 9.61843319e-3f, 5.55032939e-2f, 2.40226269e-1f, 6.93147182e-1f,
    1.f);
  return fma_(p, -power_(t), 1.f);
}
/* where u is large, 1 - erf(u) = 2^(u * polynomial), up to where erf is 1 */
template <class F> INLINE F erf_of(F a) {
  const F u = min_number_(abs_(a), 3.95f), s = u * u;
  F r = horner(u, 3.07729701e-4f, -4.63018427e-3f, 3.29979546e-2f, -1.51821896e-1f, -9.17177141e-1f);
  const F far = far_erf(u, s, r, -1.62809312f);
  F q = horner(s, -5.96761703e-4f, 4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f);
  q = fma_(q, u, u);
  return copysign_(select_(u > 0.927734375f, far, q), a);
}
/* GELU's: what is lost beside 1 need not be right, and one of erf's two polynomials suffices, to 1.6e-8: 0.85 of a
   GELU's time (AVX-512) */
template <class F> INLINE F one_plus_erf_of(F a) {
  const F u = min_number_(abs_(a), 3.95f), s = u * u;
  F r = horner(u, -4.53584809e-5f, 4.45506817e-4f, -1.48943944e-3f, -7.74632307e-4f, 2.82536824e-2f, -1.48481615e-1f,
    -9.18416393e-1f);
  return 1.f + copysign_(far_erf(u, s, r, -1.62790859f), a);
}
WOVEN(tanh) WOVEN(sigmoid) WOVEN(erf) WOVEN(one_plus_erf)
#if defined __FMA__ || defined VECTORS
/* sine and cosine of what is left of x when quarter turns are taken off, and how many were, plus 254. What is left, d,
   is within half a quarter, in two floats: the first step is exact. Up to there both are polynomials */
template <class F> INLINE auto reduced_sine(F x, F& sine, F& cosine) {
  const F t = fma_(x, 0.636619772f, SHIFT), j = t - SHIFT;
  const F first = fma_(j, -1.57079625f, x), more = j * 7.54978942e-8f, d = first - more, s = d * d;
  const F low = fma_(j, -5.39030253e-15f, ((first - d) - more) - fma_(j, 7.54978942e-8f, -more));
  F p = horner(s, -1.95114568e-4f, 8.33213329e-3f, -1.66666538e-1f);
  const F half = fma_(s, -0.5f, 1.f);
  sine = d + fma_(p, s * d, low);
  F q = horner(s, 2.44287858e-5f, -1.3887278e-3f, 4.16666456e-2f);
  cosine = half + fma_(d, -low, fma_(q, s * s, fma_(s, -0.5f, 1.f - half)));
  return bits(t);
}
/* sin(x + turns * pi / 2): which of the two it is, and its sign, the number of quarters says */
template <class F> INLINE F sine_of(F x, u32 turns) {
  F sine, cosine;
  const auto quarters = reduced_sine(x, sine, cosine) + (turns - 254u);
  const F near = select_((quarters & 1u) != 0u, cosine, sine);
  return unbits(bits(near) ^ (quarters << 30 & 0x80000000u));
}
/* what lies too far from 0 for that is left to the library, alone among its neighbours */
INLINE float beyond_(float x, float near, float (*library)(float)) { return abs_(x) > 100000.f ? library(x) : near; }
static float library_sin(float x) { return __builtin_sinf(x); }
static float library_cos(float x) { return __builtin_cosf(x); }
static float library_tan(float x) { return __builtin_tanf(x); }
template <class F> INLINE F sin_of(F x) { return beyond_(x, select_(x == 0.f, x, sine_of(x, 0)), library_sin); }
template <class F> INLINE F cos_of(F x) { return beyond_(x, sine_of(x, 1), library_cos); }
FUNCTION(sin) FUNCTION(cos)
#endif
#if defined __FMA__ || defined VECTORS
/* a^b = exp(b log(a)), the logarithm and its product with b in two floats each */
template <class F> INLINE F pow_of(F a, F b) {
  const F x = abs_(a), given = select_(x < 1.17549435e-38f, x * 8388608.f, x);
  const auto e = (bits(given) - 0x3f3504f3u) & 0xff800000u;
  const F i = fma_(as_number(e), 1.19209290e-7f, select_(x < 1.17549435e-38f, -23.f, F{}));
  const F m = unbits(bits(given) - e) - 1.f, part = 1.f / (m + 2.f);
  /* q = m / (m + 2), and log(1 + m) = 2 atanh(q) */
  const F q = part * m, q_low = part * fma_(q, -m, fma_(q, -2.f, m)), s = q * q;
  F r = horner(s, 1.170929e-1f, 1.4273566e-1f, 2.00000763e-1f);
  const F s_low = fma_(q, q_low + q_low, fma_(q, q, -s)), cube = s * q;
  const F cube_low = fma_(s, q_low, fma_(s_low, q, fma_(s, q, -cube)));
  const F third = cube * 0.333333343f, third_low = fma_(cube, 0.333333343f, -third), main = q + third;
  const F more = fma_(fma_(r, s, -9.93410776e-9f), cube, fma_(cube_low, 0.333333343f, q_low + third_low));
  const F rest = ((q - main) + third) + more, twice = main + main;
  const F sum = fma_(i, 6.93147182e-1f, twice), taken = fma_(i, -6.93147182e-1f, sum);
  const F sum_low = fma_(i, -1.90465421e-9f, fma_(rest, 2.f, twice - taken));
  F log = sum + sum_low;
  const F log_low = (sum - log) + sum_low;
  log = select_(x < __builtin_inff(), select_(x == 0.f, -__builtin_inff(), log), x);
  const F by = min_number_(max_number_(b, -3e38f), 3e38f), p = log * by;
  const F p_low = select_(abs_(p) < 200.f, fma_(log_low, by, fma_(log, by, -p)), F{});
  const F y = min_number_(max_number_(p, -105.f), 90.f), t = fma_(y, 1.442695041f, SHIFT), j = t - SHIFT;
  const F f = fma_(j, -1.42860677e-6f, fma_(j, -6.93145752e-1f, y)) + p_low;
  const F power = scale_(exp_near(f), t, y);
  /* what a negative number's power is: b may be odd, even (also beyond 2^24), or no whole number */
  const F small = min_number_(max_number_(b, -16777216.f), 16777216.f);
  const auto n = as_integer(small);
  const auto whole = as_number(n) == small;
  const F turned = select_(whole, unbits(bits(power) ^ (bits(a) & n << 31)), power);
  const F defined = select_(a < 0.f & not_(whole) & x < __builtin_inff(), __builtin_nanf(""), turned);
  return select_(b == 0.f | a == 1.f, 1.f, defined);
}
FUNCTION_2(pow)
#ifdef VECTORS
static __attribute__((noinline)) wide by_library(wide a, wide b, wide near, u32 lanes, float (*library)(float, float)) {
  for (; lanes; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    near[lane] = library(a[lane], b[lane]);
  }
  return near;
}
/* exact as the library's: a quotient below 2^22 is rounded to a whole number that is at most one off, and what is left
   of a fits a float then */
INLINE wide fmod_of(wide a, wide b) {
  const wide size = abs_(b), turn = copysign_(size, a);
  const wide q = __builtin_convertvector(__builtin_convertvector(a / b, wide_int), wide);
  const wide left = fused(-q, b, a);
  const wide forth = select_((left < 0.f) != (a < 0.f) & (left != 0.f), left + turn, left);
  const wide back = select_(abs_(forth) >= size, forth - turn, forth), near = copysign_(back, a);
  const u32 lanes = holding(not_((abs_(a) < 0x1p22f * size) & (size < __builtin_inff())));
  return __builtin_expect(lanes != 0, 0) ? by_library(a, b, near, lanes, __builtin_fmodf) : near;
}
INLINE wide mod_of(wide a, wide b) {
  const wide r = fmod_of(a, b);
  return select_((r != 0.f) & ((r < 0.f) != (b < 0.f)), r + b, r);
}
#endif
VECTOR_FUNCTION_2(fmod) VECTOR_FUNCTION_2(mod)
#endif
#if !defined __FMA__ && !defined VECTORS
LIBM1(sin, sin) LIBM1(cos, cos)
INLINE float pow_(float a, float b) { return __builtin_powf(a, b); }
#endif
/* the neighbour of a towards b: numbers of one sign follow each other as their bits do */
#define NEXTAFTER(F, whole, sign) \
  INLINE F nextafter_(F a, F b) { \
    const whole u = bits(a), up = (a < b) == (a > 0) ? 1 : -1; \
    const F away = unbits(a == 0 ? whole(1) | (bits(b) & sign) : u + up); \
    return a != a | b != b ? a + b : a == b ? b : away; \
  }
NEXTAFTER(float, u32, 0x80000000u) NEXTAFTER(double, u64, 0x8000000000000000ul)
/* numbers below `least`, the smallest that is not denormal, are made larger by 2 to `up` first */
#define FREXP(F, whole, least, up, places, most) \
  INLINE F raised_(F x) { return x * (__builtin_fabs(x) < least ? (F)(1ul << up) : F(1)); } \
  INLINE int32 exponent_(F x) { \
    const int32 above = int32(bits(raised_(x)) >> places & most); \
    return above == 0 | above == most ? 0 : above - most / 2 + 1 - (__builtin_fabs(x) < least ? up : 0); \
  } \
  INLINE F mantissa_(F x) { \
    const whole u = bits(raised_(x)), above = u >> places & most; \
    return above == 0 | above == most ? x : unbits((u & ~((whole)most << places)) | (whole)(most / 2 - 1) << places); \
  }
FREXP(float, u32, 0x1p-126f, 32, 23, 255) FREXP(double, u64, 0x1p-1022, 60, 52, 2047)
template <class F> INLINE F logaddexp_(F a, F b) {
  const F low = min_(a, b), high = max_(a, b);
  return low == high && low - low != 0 ? high : high + log1p_(exp_(low - high));
}
INLINE bool signbit_(float x) { return bits(x) >> 31; }
INLINE bool signbit_(double x) { return bits(x) >> 63; }
"""


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
  F r = horner(z, 4.22105119e-2f, 2.41528153e-2f, 4.54759113e-2f, 7.49525279e-2f, 1.66667536e-1f);
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
  F r = horner(s, -1.7870689e-3f, 1.08854854e-2f, -3.11240591e-2f, 5.79042025e-2f, -8.40037689e-2f, 1.09511547e-1f,
    -1.42640501e-1f, 1.9998531e-1f, -3.33332986e-1f);
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
  F r = horner(z, 2.78392554e-6f, 1.98426351e-4f, 8.33331142e-3f, 1.66666672e-1f);
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
  F r = horner(q, -4.04562161e-4f, -1.23797311e-3f, 1.31407729e-3f, 8.64023343e-3f, -8.0579808e-3f, -5.42074703e-2f,
    1.64054602e-1f, -1.66030958e-1f, -9.27639157e-2f, 1.27697837f);
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
