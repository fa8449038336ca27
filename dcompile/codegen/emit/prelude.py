"""The C++ that every kernel file begins with: types, rounding to half precision, and functions that vectorise.

No header is included: a kernel then costs 0.04-0.08 s of compiler time, against seconds with the standard library's.
The float functions are branch-free polynomials rather than libm's or libmvec's: g++ calls libmvec in the vectorised
part of a loop and libm in the remainder, so an element's value would depend on where in a loop it falls, and fusing two
loops could change bits. Here scalar and vector code run the same operations. float64 uses libm, one element at a time.

bfloat16 and float16 live in registers as the float of the same value: `to_bfloat16` rounds, `store_bfloat16` packs.
"""

from __future__ import annotations

PRELUDE = r"""
typedef bool bool_; typedef unsigned char uint8; typedef signed char int8; typedef short int16; typedef int int32;
typedef long int64; typedef float float32; typedef double float64; typedef float bfloat16; typedef float float16;
typedef unsigned int u32; typedef unsigned short u16; typedef unsigned long u64;
#define INLINE static inline __attribute__((always_inline))
extern "C" int omp_get_max_threads() noexcept;
extern "C" int omp_get_thread_num() noexcept;
extern "C" void* aligned_alloc(u64, u64) noexcept;
extern "C" void free(void*) noexcept;
static int division_by_zero;
static int64 take_division_by_zero() { const int was = division_by_zero; division_by_zero = 0; return was; }

INLINE u32 bits(float x) { u32 u; __builtin_memcpy(&u, &x, 4); return u; }
INLINE float unbits(u32 u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
#ifdef __FMA__
INLINE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE float fma_(float a, float b, float c) { return a * b + c; }
#endif
template <class T> static T* scratch(int64 count) {
  void* memory = aligned_alloc(64, (u64(count) * sizeof(T) + 64) & ~63ul);
  if (!memory) __builtin_trap();
  return (T*)memory;
}

/* to[c, r] = from[r, c]; `lines` are the distances of neighbouring rows */
template <int bytes> struct Lanes;
template <> struct Lanes<2> { typedef u16 vector __attribute__((vector_size(16))); };
template <> struct Lanes<4> { typedef u32 vector __attribute__((vector_size(32))); };
template <class T> INLINE void turn_8(const T* from, int64 from_line, T* to, int64 to_line) {
#ifdef __clang__
  for (int r = 0; r < 8; r++) for (int c = 0; c < 8; c++) to[c * to_line + r] = from[r * from_line + c];
#else
  typedef typename Lanes<sizeof(T)>::vector vector;
  const vector low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
  vector a[8], b[8];
  for (int r = 0; r < 8; r++) __builtin_memcpy(&a[r], from + r * from_line, sizeof(vector));
  for (int turns = 0; turns < 3; turns++) {
    for (int r = 0; r < 4; r++) {
      b[2 * r] = __builtin_shuffle(a[r], a[r + 4], low);
      b[2 * r + 1] = __builtin_shuffle(a[r], a[r + 4], high);
    }
    for (int r = 0; r < 8; r++) a[r] = b[r];
  }
  for (int c = 0; c < 8; c++) __builtin_memcpy(to + c * to_line, &a[c], sizeof(vector));
#endif
}
template <class T> INLINE void turn(const T* from, int64 from_line, T* to, int64 to_line, int64 rows, int64 columns) {
  const int64 whole_rows = rows & ~7l, whole_columns = columns & ~7l;
  for (int64 r = 0; r < whole_rows; r += 8)
    for (int64 c = 0; c < whole_columns; c += 8)
      turn_8(from + r * from_line + c, from_line, to + c * to_line + r, to_line);
  for (int64 r = 0; r < rows; r++)
    for (int64 c = r < whole_rows ? whole_columns : 0; c < columns; c++) to[c * to_line + r] = from[r * from_line + c];
}

/* what a row reads where its mask is false: one select a row, where masked loads would take one each */
alignas(64) static const uint8 zeros[16384] = {};

/* memory <-> register */
/* an index that a value gives: opaque, because g++ 12 and 13 vectorise the gather wrongly, or crash, where the value
   comes from an 8-bit comparison (a bool cast to an integer); gathers of this kind are no faster as vectors */
INLINE int64 position(int64 x) { __asm__("" : "+r"(x)); return x; }
/* a number that is compared with positions below 2^31 */
INLINE int32 as_place(int64 x) { return x == int64(int32(x)) ? int32(x) : -1; }
INLINE bool load_bool(uint8 x) { return x != 0; }
INLINE float load_bfloat16(u16 x) { return unbits(u32(x) << 16); }
INLINE u16 store_bfloat16(float x) { return u16(bits(x) >> 16); }
INLINE float load_float16(u16 x) {
  const float magnitude = unbits(u32(x & 0x7fff) << 13) * 0x1p112f;
  const u32 special = (x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return unbits(bits(magnitude) | special | u32(x & 0x8000) << 16);
}
INLINE u16 store_float16(float x) {
  const u32 sign = bits(x) >> 16 & 0x8000, u = bits(x) & 0x7fffffff;
  const u32 normal = (u - (112u << 23)) >> 13;
  const u32 tiny = u32(int32(unbits(u < 0x38800000u ? u : 0u) * 0x1p24f));
  const u32 special = 0x7c00 | (u > 0x7f800000u ? 0x200 | (u >> 13 & 0x3ff) : 0);
  return u16(sign | (u >= 0x7f800000u ? special : u < 0x38800000u ? tiny : normal));
}

/* casts: float to integer as eager does on x86 (8 and 16 bits through a wider integer) */
template <class T> INLINE bool to_bool(T x) { return x != 0; }
template <class T> INLINE int64 to_int64(T x) { return (int64)x; }
template <class T> INLINE int32 to_int32(T x) { return (int32)x; }
template <class T> INLINE int16 to_int16(T x) { return (int16)(int32)x; }
template <class T> INLINE int8 to_int8(T x) { return (int8)(int32)x; }
template <class T> INLINE uint8 to_uint8(T x) { return (uint8)(int64)x; }
INLINE int16 to_int16(int64 x) { return (int16)x; }
INLINE int8 to_int8(int64 x) { return (int8)x; }
template <class T> INLINE float to_float32(T x) { return (float)x; }
template <class T> INLINE double to_float64(T x) { return (double)x; }
INLINE float to_float32(bool x) { return x ? 1.f : 0.f; } /* g++ has no vectors for the conversion of a comparison */
INLINE float round_bfloat16(float x) {
  const u32 u = bits(x), rounded = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
  return unbits(x != x ? (u & 0xffff0000u) | 0x400000u : rounded);
}
/* the same for what is no NaN with bits that bfloat16 has not (narrow.py) */
INLINE float nearest_bfloat16(float x) {
  const u32 u = bits(x);
  return unbits((u + (0x7fff + (u >> 16 & 1))) & 0xffff0000u);
}
INLINE float round_float16(float x) {
  const u32 sign = bits(x) & 0x80000000u, u = bits(x) & 0x7fffffff;
  const u32 normal = (u + 0xfff + (u >> 13 & 1)) & 0xffffe000u;
  const u32 tiny = bits((unbits(u < 0x38800000u ? u : 0u) + 0.5f) - 0.5f);
  const u32 finite = u < 0x38800000u ? tiny : normal >= 0x47800000u ? 0x7f800000u : normal;
  return unbits(sign | (x != x ? (u & 0xffffe000u) | 0x400000u : finite));
}
template <class T> INLINE float to_bfloat16(T x) { return round_bfloat16((float)x); }
template <class T> INLINE float to_float16(T x) { return round_float16((float)x); }

/* arithmetic whose corner cases C leaves open */
template <class T> INLINE T min_(T a, T b) { return a < b || a != a ? a : b; }
template <class T> INLINE T max_(T a, T b) { return a > b || a != a ? a : b; }
template <class T> INLINE T abs_(T x) { return x < 0 ? T(-x) : x; }
INLINE uint8 abs_(uint8 x) { return x; }
INLINE float abs_(float x) { return __builtin_fabsf(x); }
INLINE double abs_(double x) { return __builtin_fabs(x); }
template <class T> INLINE T sign_(T x) { return T((0 < x) - (x < 0)); }
template <class T> INLINE T divisor_(T b) { if (b == 0) division_by_zero = 1; return b == 0 ? T(1) : b; }
template <class T> INLINE T truncdiv_(T a, T b) { b = divisor_(b); return b == T(-1) ? T(-a) : T(a / b); }
template <class T> INLINE T fmod_(T a, T b) { b = divisor_(b); return b == T(-1) ? T(0) : T(a % b); }
template <class T> INLINE T mod_(T a, T b) {
  const T r = fmod_(a, b);
  return r != 0 && (r < 0) != (b < 0) ? T(r + b) : r;
}
template <class T> INLINE T floordiv_(T a, T b) {
  const T q = truncdiv_(a, b), r = fmod_(a, b);
  return T(q - (r != 0 && (r < 0) != (b < 0)));
}
template <class T> INLINE T pow_(T a, T b) {
  if (b < 0) return a == T(1) ? T(1) : a == T(-1) ? (b % 2 ? T(-1) : T(1)) : T(0);
  T result = 1;
  for (; b; b /= 2, a = T(a * a)) if (b % 2) result = T(result * a);
  return result;
}
template <class T> INLINE T gcd_(T a, T b) {
  a = abs_(a), b = abs_(b);
  while (b) { const T r = b == T(-1) ? T(0) : T(a % b); a = b; b = r; }
  return a;
}
INLINE float fmod_(float a, float b) { return __builtin_fmodf(a, b); }
INLINE double fmod_(double a, double b) { return __builtin_fmod(a, b); }
template <class F> INLINE F mod_float(F a, F b) {
  const F r = fmod_(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
INLINE float mod_(float a, float b) { return mod_float(a, b); }
INLINE double mod_(double a, double b) { return mod_float(a, b); }
INLINE float floor_(float x) { return __builtin_floorf(x); }
INLINE double floor_(double x) { return __builtin_floor(x); }
template <class F> INLINE F floordiv_float(F a, F b) {
  const F r = fmod_(a, b), q = (a - r) / b - F(r != 0 && (b < 0) != (r < 0)), whole = floor_(q);
  const F zero = (a < 0) != (b < 0) ? F(-0.0) : F(0.0);
  return b == 0 ? a / b : q == 0 ? zero : q - whole > F(0.5) ? whole + 1 : whole;
}
INLINE float floordiv_(float a, float b) { return floordiv_float(a, b); }
INLINE double floordiv_(double a, double b) { return floordiv_float(a, b); }
template <class T> INLINE T shl_(T a, T b) { return b < 0 || b >= T(sizeof(T) * 8) ? T(0) : T(u64(a) << b); }
template <class T> INLINE T shr_(T a, T b) {
  const T most = T(sizeof(T) * 8 - 1);
  return b < 0 || b > most ? (T(-1) < 0 ? T(a >> most) : T(0)) : T(a >> b);
}
INLINE bool not_(bool x) { return !x; }
template <class T> INLINE T not_(T x) { return T(~x); }
INLINE float ceil_(float x) { return __builtin_ceilf(x); }
INLINE double ceil_(double x) { return __builtin_ceil(x); }
INLINE float trunc_(float x) { return __builtin_truncf(x); }
INLINE double trunc_(double x) { return __builtin_trunc(x); }
INLINE float round_(float x) { return __builtin_rintf(x); }
INLINE double round_(double x) { return __builtin_rint(x); }
INLINE float sqrt_(float x) { return __builtin_sqrtf(x); }
INLINE double sqrt_(double x) { return __builtin_sqrt(x); }
INLINE bool isinf_(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
INLINE bool isinf_(double x) { return __builtin_fabs(x) == __builtin_inf(); }

/* Philox4x32-10: word `draw % 4` for the counter (position, draw / 4) (ir/philox.py); no loop: g++ vectorises none that
   has one inside */
#define PHILOX_ROUND(n) { \
  const u64 first = u64(0xD2511F53u) * a, second = u64(0xCD9E8D57u) * c; \
  a = u32(second >> 32) ^ b ^ (k0 + n * 0x9E3779B9u); b = u32(second); \
  c = u32(first >> 32) ^ d ^ (k1 + n * 0xBB67AE85u); d = u32(first); }
INLINE int32 philox_(int64 key, int64 position, int64 draw) {
  u32 a = u32(position), b = u32(u64(position) >> 32), c = u32(draw >> 2), d = u32(u64(draw >> 2) >> 32);
  const u32 k0 = u32(key), k1 = u32(u64(key) >> 32);
  PHILOX_ROUND(0) PHILOX_ROUND(1) PHILOX_ROUND(2) PHILOX_ROUND(3) PHILOX_ROUND(4)
  PHILOX_ROUND(5) PHILOX_ROUND(6) PHILOX_ROUND(7) PHILOX_ROUND(8) PHILOX_ROUND(9)
  const int word = draw & 3;
  return int32(word == 0 ? a : word == 1 ? b : word == 2 ? c : d);
}

/* float functions; largest errors measured against float64 are in tests/codegen/emit/test_prelude.py */
INLINE float scale_(float r, int32 i) {
  const int32 half = i >> 1;
  return r * unbits(u32(half + 127) << 23) * unbits(u32(i - half + 127) << 23);
}
INLINE float exp_(float a) {
  const float x = a < -105.f ? -105.f : a > 90.f ? 90.f : a;
  const float j = fma_(x, 1.442695041f, 12582912.f) - 12582912.f;
  float f = fma_(j, -6.93145752e-1f, x);
  f = fma_(j, -1.42860677e-6f, f);
  float r = 1.37805939e-3f;
  r = fma_(r, f, 8.37312452e-3f);
  r = fma_(r, f, 4.16695364e-2f);
  r = fma_(r, f, 1.66664720e-1f);
  r = fma_(r, f, 4.99999851e-1f);
  r = fma_(r, f, 1.f);
  r = fma_(r, f, 1.f);
  return scale_(r, (int32)j);
}
INLINE float exp2_(float a) {
  const float x = a < -152.f ? -152.f : a > 130.f ? 130.f : a;
  const float j = (x + 12582912.f) - 12582912.f, f = x - j;
  float r = 1.53502474e-4f;
  r = fma_(r, f, 1.33990591e-3f);
  r = fma_(r, f, 9.61844705e-3f);
  r = fma_(r, f, 5.55033041e-2f);
  r = fma_(r, f, 2.40226487e-1f);
  r = fma_(r, f, 6.93147182e-1f);
  r = fma_(r, f, 1.f);
  return scale_(r, (int32)j);
}
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
  r = fma_(r, s, f);
  r = fma_(i, 0.693147182f, r);
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
INLINE float tanh_(float a) {
  const float t = __builtin_fabsf(a), s = a * a;
  float r = 1.57394409e-2f;
  r = fma_(r, s, -5.23025580e-2f);
  r = fma_(r, s, 1.33152470e-1f);
  r = fma_(r, s, -3.33327681e-1f);
  r = fma_(r * s, a, a);
  const float far = __builtin_copysignf(1.f - 2.f / (1.f + exp_(2.f * t)), a);
  return t < 0.55f ? r : a != a ? a : far;
}
INLINE float sigmoid_(float x) { return 1.f / (1.f + exp_(-x)); }
INLINE float erf_(float a) {
  const float t = __builtin_fabsf(a), s = a * a;
  float r = fma_(-1.72853470e-5f, t, 3.83197126e-4f);
  r = fma_(r, s, fma_(-3.88396438e-3f, t, 2.42546219e-2f));
  r = fma_(r, t, -1.06777877e-1f);
  r = fma_(r, t, -6.34846687e-1f);
  r = fma_(r, t, -1.28717512e-1f);
  r = fma_(r, t, -t);
  const float far = __builtin_copysignf(1.f - exp_(t > 10.f ? -100.f : r), a);
  float q = -5.96761703e-4f;
  q = fma_(q, s, 4.99119423e-3f);
  q = fma_(q, s, -2.67681349e-2f);
  q = fma_(q, s, 1.12819925e-1f);
  q = fma_(q, s, -3.76125336e-1f);
  q = fma_(q, s, 1.28379166e-1f);
  q = fma_(q, a, a);
  return a != a ? a : t > 0.927734375f ? far : q;
}
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
