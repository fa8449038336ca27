"""Send float64 arguments beyond a polynomial's range to libm, without their neighbours.

A loop calls a vector function, by the name under which g++ looks for one. That function checks whether any vector lane
is out of range. g++ must not emit a branch before the call, or there are no vectors: see the beginning of `base.py`.
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
