"""Sixteen floats at a time, with instructions that g++ does not find by itself: the prelude's part for `wide.py`.

Without AVX-512, or with another compiler than g++, VECTORS is not defined, and loops are g++'s to vectorise.
"""

from __future__ import annotations

WIDE = r"""
#if defined __AVX512F__ && defined __AVX512BW__ && defined __AVX512DQ__ && !defined __clang__
#define VECTORS
typedef float wide __attribute__((vector_size(64))); typedef int32 wide_int __attribute__((vector_size(64)));
typedef u32 wide_bits __attribute__((vector_size(64))); typedef int16 halves __attribute__((vector_size(32)));
typedef char bytes __attribute__((vector_size(16)));
INLINE wide widen(float x) { return x - wide{}; }
INLINE wide widen(wide x) { return x; }
INLINE wide_bits bits(wide x) { return (wide_bits)x; }
INLINE wide unbits(wide_bits u) { return (wide)u; }
template <class A, class B, class C> INLINE wide fma_(A a, B b, C c) {
  return __builtin_ia32_vfmaddps512_mask(widen(a), widen(b), widen(c), u16(-1), 4);
}
INLINE wide scale_(wide r, wide j) { return __builtin_ia32_scalefps512_mask(r, j, r, u16(-1), 4); }
INLINE wide sqrt_(wide x) { return __builtin_ia32_sqrtps512_mask(x, x, u16(-1), 4); }
INLINE wide abs_(wide x) { return unbits(bits(x) & 0x7fffffffu); }
INLINE wide copysign_(wide x, wide sign) { return unbits((bits(x) & 0x7fffffffu) | (bits(sign) & 0x80000000u)); }
INLINE wide min_number_(wide a, float b) { return __builtin_ia32_minps512_mask(widen(b), a, a, u16(-1), 4); }
INLINE wide max_number_(wide a, float b) { return __builtin_ia32_maxps512_mask(widen(b), a, a, u16(-1), 4); }
INLINE wide min_(wide a, float b) { return min_(a, widen(b)); }
INLINE wide min_(float a, wide b) { return min_(widen(a), b); }
INLINE wide max_(wide a, float b) { return max_(a, widen(b)); }
INLINE wide max_(float a, wide b) { return max_(widen(a), b); }
template <class A, class B> INLINE wide select_(wide_int mask, A a, B b) { return mask ? widen(a) : widen(b); }
template <class A, class B> INLINE wide select_(bool mask, A a, B b) { return mask ? widen(a) : widen(b); }
INLINE wide to_float32(wide_int mask) { return mask ? 1.f : 0.f; }
INLINE wide_int not_(wide_int mask) { return ~mask; }
INLINE wide_int places(int32 first) { return first + wide_int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

/* memory <-> register; g++ 12 widens vectors in two parts where it is left to convert them itself */
INLINE wide load_float32(const float* from) { wide x; __builtin_memcpy(&x, from, 64); return x; }
INLINE void put_float32(float* to, wide x) { __builtin_memcpy(to, &x, 64); }
INLINE wide load_bfloat16(const u16* from) {
  halves x;
  __builtin_memcpy(&x, from, 32);
  return unbits((wide_bits)__builtin_ia32_pmovzxwd512_mask(x, wide_int{}, u16(-1)) << 16);
}
INLINE halves narrowed(wide x) {
  return (halves)__builtin_ia32_pmovdw512_mask((wide_int)(bits(x) >> 16), halves{}, u16(-1));
}
INLINE void put_bfloat16(u16* to, wide x) {
  const halves y = narrowed(x);
  __builtin_memcpy(to, &y, 32);
}
/* past the caches; before other threads may read what was written so, finish_streams */
INLINE void stream_float32(float* to, wide x) {
  if (u64(to) & 63) put_float32(to, x); else __builtin_ia32_movntps512(to, x);
}
INLINE void stream_bfloat16(u16* to, wide x) {
  if (u64(to) & 31) return put_bfloat16(to, x);
  typedef long long quarters __attribute__((vector_size(32)));
  const halves y = narrowed(x);
  __builtin_ia32_movntdq256((quarters*)to, (quarters)y);
}
INLINE void finish_streams() { __builtin_ia32_sfence(); }
INLINE wide_int load_bool(const uint8* from) {
  bytes x;
  __builtin_memcpy(&x, from, 16);
  return __builtin_ia32_pmovzxbd512_mask(x, wide_int{}, u16(-1)) != 0;
}
INLINE void put_bool(uint8* to, wide_int mask) {
  const bytes x = __builtin_ia32_pmovdb512_mask(mask & 1, bytes{}, u16(-1));
  __builtin_memcpy(to, &x, 16);
}
INLINE wide_int load_bool(const bool* from) { return load_bool((const uint8*)from); }
INLINE void put_bool(bool* to, wide_int mask) { put_bool((uint8*)to, mask); }

/* the sum of the upper half's last bit, 0x7fff and the float's bits by one multiplication of 16-bit halves with 1: 3
   instructions in place of 5. (vcvtneps2bf16 would be one, but takes denormal numbers for zero.) */
INLINE wide nearest_bfloat16(wide x) {
#ifdef __AVX512VNNI__
  const wide_bits added = (bits(x) & 0x10000u) | 0x7fffu, ones = wide_bits{} + 0x10001u;
  const wide_int sum = __builtin_ia32_vpdpwssd_v16si((wide_int)x, (wide_int)added, (wide_int)ones);
  return unbits((wide_bits)sum & 0xffff0000u);
#else
  return unbits((bits(x) + (0x7fffu + (bits(x) >> 16 & 1u))) & 0xffff0000u);
#endif
}
INLINE wide round_bfloat16(wide x) {
  return x != x ? unbits((bits(x) & 0xffff0000u) | 0x400000u) : nearest_bfloat16(x);
}
INLINE wide to_bfloat16(wide x) { return round_bfloat16(x); }

/* what a loop has collected in 16 lanes */
INLINE float total(wide x) {
  float sum = 0;
  for (int lane = 0; lane < 16; lane++) sum += x[lane];
  return sum;
}
INLINE float largest(wide x) {
  float most = x[0];
  for (int lane = 1; lane < 16; lane++) most = x[lane] > most ? x[lane] : most;
  return most;
}
INLINE float smallest(wide x) {
  float least = x[0];
  for (int lane = 1; lane < 16; lane++) least = x[lane] < least ? x[lane] : least;
  return least;
}
INLINE int32 any(wide_int mask) {
  int32 found = 0;
  for (int lane = 0; lane < 16; lane++) found |= mask[lane];
  return found;
}
#define VECTOR_FUNCTION(name) INLINE wide name##_(wide x) { return name##_of(x); }
#else
#define VECTOR_FUNCTION(name)
INLINE void finish_streams() {}
#endif
"""
