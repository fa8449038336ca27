"""Branch-free functions of float64, which g++ vectorizes: exponentials, logarithms, sines, erf, powers, remainders.

libm takes 2 to 10 times as long, one element at a time. Other float64 functions are left to it, and so are arguments
beyond a polynomial's range, without their neighbours: a loop calls a vector function, by the name under which g++ looks
for one, and that checks whether any vector lane is out of range. g++ must not emit a branch before the call, or there
are no vectors: see the beginning of `base.py`. Largest errors are in tests/codegen/emit/cpp/library: test_base.py and
test_math_f64.py.
"""

from __future__ import annotations

MATH_F64_LIBM = r"""
/* near, but what the library says of a and b where `far` holds */
#if defined __AVX2__ && !defined __clang__
typedef double doubles_2 __attribute__((vector_size(16))); typedef double doubles_4 __attribute__((vector_size(32)));
INLINE u32 far_lanes(doubles_2 x) { return __builtin_ia32_movmskpd(x); }
INLINE u32 far_lanes(doubles_4 x) { return __builtin_ia32_movmskpd256(x); }
#ifdef __AVX512DQ__
typedef double doubles_8 __attribute__((vector_size(64)));
INLINE u32 far_lanes(doubles_8 x) {
  typedef long long longs __attribute__((vector_size(64)));
  return __builtin_ia32_cvtq2mask512((longs)x);
}
#define FAR_8(name) FAR_VECTOR(name, doubles_8, _ZGVeN8vvv_##name)
#else
#define FAR_8(name)
#endif
typedef double (*of_two)(double, double);
template <class V> static __attribute__((noinline)) V far_apart(V a, V b, V near, u32 lanes, of_two by) {
  for (; lanes; lanes &= lanes - 1) near[__builtin_ctz(lanes)] = by(a[__builtin_ctz(lanes)], b[__builtin_ctz(lanes)]);
  return near;
}
#define FAR_VECTOR(name, V, called) \
  extern "C" __attribute__((visibility("hidden"))) V called(V a, V b, V near) { \
    const u32 lanes = far_lanes((V)is_##name(a, b)); \
    return __builtin_expect(lanes != 0, 0) ? far_apart(a, b, near, lanes, by_##name) : near; \
  }
#define FAR(name) \
  extern "C" __attribute__((const, simd("notinbranch"), visibility("hidden"))) double name(double, double, double); \
  extern "C" __attribute__((visibility("hidden"))) double one_##name(double a, double b, double near) __asm__(#name); \
  extern "C" double one_##name(double a, double b, double near) { return is_##name(a, b) ? by_##name(a, b) : near; } \
  FAR_VECTOR(name, doubles_2, _ZGVbN2vvv_##name) FAR_VECTOR(name, doubles_4, _ZGVcN4vvv_##name) \
  FAR_VECTOR(name, doubles_4, _ZGVdN4vvv_##name) FAR_8(name)
#else
#define FAR(name) \
  INLINE double name(double a, double b, double near) { return is_##name(a, b) ? by_##name(a, b) : near; }
#endif
template <class V> INLINE V size_of(V x) { return x < 0. ? -x : x; }
/* beyond that, quarter turns are too many to be taken off in three steps */
template <class V> INLINE auto is_far_sin(V x, V) { return size_of(x) > 1e9; }
template <class V> INLINE auto is_far_cos(V x, V) { return size_of(x) > 1e9; }
/* a quotient beyond that is not exact, nor is it by what is infinite */
template <class V> INLINE auto is_far_fmod(V a, V b) {
  return (size_of(a) >= 0x1p52 * size_of(b)) | (size_of(b) == __builtin_inf());
}
static double by_far_sin(double x, double) { return __builtin_sin(x); }
static double by_far_cos(double x, double) { return __builtin_cos(x); }
static double by_far_fmod(double a, double b) { return __builtin_fmod(a, b); }
FAR(far_sin) FAR(far_cos) FAR(far_fmod)
"""


_BASE = r"""
INLINE u64 bits(double x) { u64 u; __builtin_memcpy(&u, &x, 8); return u; }
INLINE double unbits(u64 u) { double x; __builtin_memcpy(&x, &u, 8); return x; }
INLINE double select_(bool mask, double a, double b) { return mask ? a : b; }
INLINE double copysign_(double x, double sign) { return __builtin_copysign(x, sign); }
/* added to a small number, it rounds that to a whole number, plus 2046, in the lowest bits */
static constexpr double SHIFT_64 = 6755399441055744. + 2046.;
#ifdef __FMA__
INLINE double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
INLINE double fma_(double a, double b, double c) { return a * b + c; }
#endif
/* ((a x + b) x + c) x + ..., of floats, vectors and doubles */
template <class F, class A, class B, class... C> INLINE F horner(F x, A a, B b, C... more) {
  F r = fma_(x, a, b);
  ((r = fma_(r, x, more)), ...);
  return r;
}
/* r times 2 to the whole number in t, to which SHIFT_64 was added, by way of 2^512 or 2^-512: rounded once */
INLINE double scale_(double r, double t, double x) {
  const double rest = select_(x < 0., 0x1p-512, 0x1p512);
  return r * unbits((bits(t) << 52) - bits(rest)) * rest;
}
/* (e^f - 1 - f) / f^2 by its series, whose terms from the twelfth on are r f^11 */
INLINE double exp_rest(double r, double f) {
  return horner(f, r, 2.08767569878681e-9, 2.505210838544172e-8, 2.755731922398589e-7, 2.7557319223985893e-6,
    2.48015873015873e-5, 1.984126984126984e-4, 1.3888888888888889e-3, 8.333333333333333e-3, 4.1666666666666664e-2,
    1.6666666666666666e-1, 0.5);
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
  return copysign_(select_(abs_(x) < 0.4, r, exp_(x) - 1.), x);
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
  return copysign_(select_(t < 0.625, fma_(t * z, p / q, t), far), a);
}
#ifndef NO_DOUBLES
#ifdef __FMA__
"""

_MORE = r"""
/* what is left of x without quarter turns, d and `low`, and how many they were, plus 2046. The first step is exact */
INLINE u64 quarters_of(double x, double& d, double& low) {
  const double t = fma_(x, 0.6366197723675814, SHIFT_64), j = t - SHIFT_64;
  const double first = fma_(j, -1.5707963267948966, x), more = j * 6.123233995736766e-17;
  d = first - more;
  low = fma_(j, 1.4973849048591833e-33, ((first - d) - more) - fma_(j, 6.123233995736766e-17, -more));
  return bits(t);
}
/* sine and cosine of d + low, d within half a quarter, as sums of two numbers, of which the second is returned */
INLINE double sine_near(double d, double low, double& first) {
  const double s = d * d, v = s * d, v_low = fma_(fma_(d, d, -s), d, fma_(s, d, -v));
  double r = horner(s, 1.58969099521155010221e-10, -2.50507602534068634195e-8, 2.75573137070700676789e-6,
    -1.98412698298579493134e-4, 8.33333333332248946124e-3);
  first = d;
  return fma_(v, -1.66666666666666324348e-1, fma_(v_low, -1.66666666666666324348e-1, low - s * fma_(-v, r, 0.5 * low)));
}
INLINE double cosine_near(double d, double low, double& first) {
  const double s = d * d, half = 0.5 * s;
  double r = horner(s, -1.13596475577881948265e-11, 2.0875723212981748279e-9, -2.75573143513906633035e-7,
    2.48015872894767294178e-5, -1.38888888888741095749e-3, 4.16666666666666019037e-2);
  first = 1. - half;
  return ((1. - first) - half) + fma_(s * s, r, -fma_(d, low, 0.5 * fma_(d, d, -s)));
}
/* sin(x + turns * pi / 2): which of the two it is, and its sign, the number of quarters says */
INLINE double turned_sine(double x, u64 turns) {
  double d, low, sine, cosine;
  const u64 quarters = quarters_of(x, d, low) + (turns - 2046u);
  const double more_sine = sine_near(d, low, sine), more_cosine = cosine_near(d, low, cosine);
  const double near = select_(quarters & 1, cosine + more_cosine, sine + more_sine);
  return unbits(bits(near) ^ (quarters << 62 & 0x8000000000000000ul));
}
INLINE double sin_(double x) { return far_sin(x, x, select_(x == 0., x, turned_sine(x, 0))); }
INLINE double cos_(double x) { return far_cos(x, x, turned_sine(x, 1)); }
/* e^(x + low) without its power of two, which is in t, as a sum of two numbers, of which the second is returned */
INLINE double exp_parts(double x, double low, double& t, double& first) {
  t = fma_(x, 1.4426950408889634, SHIFT_64);
  const double j = t - SHIFT_64, f = fma_(j, -0.6931471803691238, x), f_low = fma_(j, -1.9082149292705877e-10, low);
  const double g = f + f_low, r = fma_(g * g, exp_rest(1.6059043836821613e-10, g), f_low), one = 1. + f;
  const double rest = ((1. - one) + f) + r;
  first = one + rest;
  return rest - (first - one);
}
/* erf(u) / u - 1 for u up to 1, whose square is s */
INLINE double erf_rest(double s) {
  return horner(s, 5.960685338520971e-11, -1.137495573607015e-09, 1.466032872274226e-08, -1.6350396222864617e-07,
    1.64610084778027e-06, -1.4925595772180906e-05, 0.0001205533113295582, -0.0008548326981425542,
    0.005223977624828431, -0.026866170645077875, 0.11283791670954885, -0.3761263890318375, 0.1283791670955126);
}
/* where u is large, 1 - erf(u) = e^polynomial, up to where erf is 1. Odd powers apart: what waits is half as long, with
   AVX2 0.79 of the time */
INLINE double erf_(double a) {
  const double x = abs_(a), u = x > 6. ? 6. : x, s = u * u;
  double r = fma_(s, 2.0202085069086934e-10, 4.593073322135117e-08);
  double odd = fma_(s, -4.864742504739347e-12, -3.8897805298077685e-09);
  r = fma_(r, s, 2.11470188127795e-06);
  odd = fma_(odd, s, -3.6954722919866033e-07);
  r = fma_(r, s, 2.2531599602456287e-05);
  odd = fma_(odd, s, -8.578380622501582e-06);
  r = fma_(r, s, -0.00013656237055273518);
  odd = fma_(odd, s, -1.9519659087947285e-05);
  r = fma_(r, s, -0.0019189610690146927);
  odd = fma_(odd, s, 0.000773055780438025);
  r = fma_(r, s, 0.0189880316660273);
  odd = fma_(odd, s, 0.0004135511059813081);
  r = fma_(r, s, -0.6366440570475073);
  odd = fma_(odd, s, -0.10270228438601402);
  r = fma_(r, s, -5.132857965659138e-07);
  odd = fma_(odd, s, -1.1283739912794626);
  return copysign_(select_(u > 1., 1. - exp_(fma_(odd, u, r)), fma_(erf_rest(s), u, u)), a);
}
/* exact as the library's: a quotient is rounded to a whole number that is at most one too large */
INLINE double fmod_(double a, double b) {
  const double size = abs_(b), turn = copysign_(size, a), left = fma_(-trunc_(a / b), b, a);
  const double back = select_((left < 0.) != (a < 0.) & (left != 0.), left + turn, left);
  return far_fmod(a, b, copysign_(back, a));
}
/* a^b = e^(b log(a)), the logarithm and its product with b in two numbers each. q = m / (m + 2), and
   log(1 + m) = 2 atanh(q) */
INLINE double pow_(double a, double b) {
  const double x = abs_(a);
  const bool tiny = x < 0x1p-1022;
  const double given = select_(tiny, x * 0x1p54, x);
  const u64 moved = bits(given) + (0x3ff0000000000000ul - 0x3fe6a09e667f3bcdul);
  const double m = unbits((moved & 0xffffffffffffful) + 0x3fe6a09e667f3bcdul) - 1.;
  const double i = unbits(moved >> 52 | 0x4330000000000000ul) - (0x1p52 + 1023.) - select_(tiny, 54., 0.);
  const double part = 1. / (m + 2.), q = part * m, q_low = part * fma_(q, -m, fma_(q, -2., m)), s = q * q;
  double r = horner(s, 0.05985190262435825, 0.058386399589892446, 0.06668091311535707, 0.07692280412122863,
    0.09090909402064903, 0.11111111109083532, 0.14285714285720996, 0.19999999999999993);
  const double s_low = fma_(q, q_low + q_low, fma_(q, q, -s)), cube = s * q;
  const double cube_low = fma_(s, q_low, fma_(s_low, q, fma_(s, q, -cube)));
  const double third = cube * 0.3333333333333333, third_low = fma_(cube, 0.3333333333333333, -third);
  const double more = fma_(cube_low, 0.3333333333333333, q_low + third_low), main = q + third, twice = main + main;
  const double rest = ((q - main) + third) + fma_(fma_(r, s, 1.850371707708594e-17), cube, more);
  const double whole = i * 0.6931471803691238, sum = whole + twice;
  const double sum_low = ((whole - sum) + twice) + fma_(i, 1.9082149292705877e-10, rest + rest), near = sum + sum_low;
  const double log = select_(x < __builtin_inf(), select_(x == 0., -__builtin_inf(), near), x);
  const double by = between(b, -1e308, 1e308), p = log * by;
  const double p_low = select_(abs_(p) < 1000., fma_((sum - near) + sum_low, by, fma_(near, by, -p)), 0.);
  const double y = between(p, -746., 710.);
  double t, e;
  exp_parts(y, p_low, t, e);
  const double power = scale_(e, t, y);
  /* what a negative number's power is: b may be odd, even (also beyond 2^53), or no whole number */
  const double half = b * 0.5;
  const bool is_whole = trunc_(b) == b, odd = is_whole & (trunc_(half) != half);
  const double turned = unbits(bits(power) ^ (odd ? bits(a) & 0x8000000000000000ul : 0ul));
  const double defined = select_(a < 0. & !is_whole & (x < __builtin_inf()), __builtin_nan(""), turned);
  return select_((b == 0.) | (a == 1.), 1., defined);
}
/* of floats, in doubles, that nothing is lost near its zeros: Stirling's series from 8 on, below by recurrence, below 0
   by reflection; quotients of gammas and sines have one logarithm */
INLINE float lgamma_(float a) {
  const double x = a, y = select_(x < 0., 1. - x, abs_(x)), part = x - round_(x);
  const double product = ((y * (y + 1.)) * ((y + 2.) * (y + 3.))) * (((y + 4.) * (y + 5.)) * ((y + 6.) * (y + 7.)));
  const double z = select_(y < 8., y + 8., y), by = select_(y < 8., product, 1.), over = 1. / z, s = over * over;
  double r = horner(s, 6.410256410256410e-3, -1.917526917526918e-3, 8.417508417508417e-4, -5.952380952380953e-4,
    7.936507936507937e-4, -2.777777777777778e-3, 8.333333333333333e-2);
  const double series = fma_(z - 0.5, log_(z), fma_(r, over, 0.9189385332046728 - z));
  const double sine = abs_(turned_sine(part * 3.141592653589793, 0));
  const double more = log_(select_(x < 0., by * 3.141592653589793, 1.) / select_(x < 0., sine, by));
  const double sum = more + select_(x < 0., -series, series);  /* at the zeros an error of rounding would be all */
  return float(select_(isinf_(x), __builtin_inf(), select_((x == 1.) | (x == 2.), 0., sum)));
}
#else
LIBM(sin, sin) LIBM(cos, cos) LIBM(erf, erf) LIBM1(lgamma, lgamma)
INLINE double fmod_(double a, double b) { return __builtin_fmod(a, b); }
INLINE double pow_(double a, double b) { return __builtin_pow(a, b); }
#endif
INLINE double one_plus_erf_(double a) { return 1. + erf_(a); }
/* the library's, one element at a time: operations of the caller's are ATen's instead (lower/dtypes.py) */
LIBM(tan, tan) LIBM(asin, asin) LIBM(acos, acos) LIBM(sinh, sinh) LIBM(cosh, cosh) LIBM(erfc, erfc) LIBM(log2, log2)
LIBM(log10, log10) LIBM(asinh, asinh) LIBM(acosh, acosh) LIBM(atanh, atanh) LIBM(lgamma, lgamma)
INLINE double atan2_(double a, double b) { return __builtin_atan2(a, b); }
INLINE double hypot_(double a, double b) { return __builtin_hypot(a, b); }
#endif
"""

MATH_F64 = _BASE + MATH_F64_LIBM + _MORE
