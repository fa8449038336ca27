"""Vectors of floats, with instructions that g++ does not find by itself, for the loops that `vectorize.py` selects.

They have sixteen elements with AVX-512, and eight with AVX2, FMA and F16C. Without these, with another compiler than
g++, or with NO_VECTORS, VECTORS is undefined, and g++ vectorizes the loops. With VECTORS_ROUND, vectors round to
bfloat16 in fewer instructions. With VECTORS_FAR, prefetching later loads pays off (`base.py`).

Two and four vectors are the wide steps of loops. NO_PAIRS leaves that part out.
"""

from __future__ import annotations

import functools

_PAIRS = r"""
#ifdef NO_PAIRS
#define PAIR_FUNCTION(name)
#define PAIR_FUNCTION_2(name)
#define PAIR_WOVEN(name)
#define QUAD_CALL(kind, name, given)
#define QUAD_CALL_2(name)
#else
/* what lies in memory as bfloat16, as many as fill a vector there: elements of even and of odd places are vectors of
   their own, which takes an instruction each, where neighbours are moved apart and together again */
#define PAIR (2 * WIDTH)
struct pair { wide even, odd; };
struct pair_int { wide_int even, odd; };
INLINE pair both(float x) { return {widen(x), widen(x)}; }
INLINE pair both(pair x) { return x; }
INLINE pair load_pair(const u16* from) {
  wide_bits x;
  __builtin_memcpy(&x, from, sizeof x);
  return {unbits(x << 16), unbits(x & 0xffff0000u)};
}
INLINE wide joined(pair x) { return unbits(masked_or(bits(x.odd), 0xffff0000u, bits(x.even) >> 16)); }
INLINE void put_pair(u16* to, pair x) { const wide y = joined(x); __builtin_memcpy(to, &y, sizeof y); }
INLINE void stream_pair(u16* to, pair x) {
  if (u64(to) % sizeof(wide)) put_pair(to, x); else past_caches((float*)to, joined(x));
}
INLINE pair_int match_pair(int32 first, int32 place) {
  const wide_int even = places(0) * 2 + first;
  return {even == place, even + 1 == place};
}
"""

_EACH = r"""
#define PAIR_OPERATOR(kind, op) \
  INLINE kind operator op(pair a, pair b) { return {a.even op b.even, a.odd op b.odd}; } \
  INLINE kind operator op(pair a, float b) { return {a.even op b, a.odd op b}; } \
  INLINE kind operator op(float a, pair b) { return {a op b.even, a op b.odd}; }
PAIR_OPERATOR(pair, +) PAIR_OPERATOR(pair, -) PAIR_OPERATOR(pair, *) PAIR_OPERATOR(pair, /)
PAIR_OPERATOR(pair_int, ==) PAIR_OPERATOR(pair_int, !=) PAIR_OPERATOR(pair_int, <) PAIR_OPERATOR(pair_int, <=)
PAIR_OPERATOR(pair_int, >) PAIR_OPERATOR(pair_int, >=)
INLINE pair operator-(pair x) { return {-x.even, -x.odd}; }
#define PAIR_LOGIC(op) \
  INLINE pair_int operator op(pair_int a, pair_int b) { return {a.even op b.even, a.odd op b.odd}; }
PAIR_LOGIC(&) PAIR_LOGIC(|) PAIR_LOGIC(^)
INLINE pair_int operator&(pair_int a, int32 b) { return {a.even & b, a.odd & b}; }
INLINE pair_int operator<(pair_int a, int32 b) { return {a.even < b, a.odd < b}; }
INLINE pair_int shr_(pair_int a, int32 b) { return {shr_(a.even, b), shr_(a.odd, b)}; }
#define PAIR_CALL(kind, name, given) INLINE kind name(given x) { return {name(x.even), name(x.odd)}; }
PAIR_CALL(pair, floor_, pair) PAIR_CALL(pair, ceil_, pair) PAIR_CALL(pair, trunc_, pair) PAIR_CALL(pair, round_, pair)
PAIR_CALL(pair, abs_, pair) PAIR_CALL(pair, sqrt_, pair) PAIR_CALL(pair, nearest_bfloat16, pair)
PAIR_CALL(pair, to_bfloat16, pair) PAIR_CALL(pair, to_float32, pair_int) PAIR_CALL(pair, from_int32, pair_int)
PAIR_CALL(pair_int, not_, pair_int) PAIR_CALL(pair_int, signbit_, pair)
#define PAIR_CALL_2(name) \
  INLINE pair name(pair a, pair b) { return {name(a.even, b.even), name(a.odd, b.odd)}; } \
  INLINE pair name(pair a, float b) { return {name(a.even, b), name(a.odd, b)}; } \
  INLINE pair name(float a, pair b) { return {name(a, b.even), name(a, b.odd)}; }
PAIR_CALL_2(min_) PAIR_CALL_2(max_)
template <class B, class C> INLINE pair fma_(pair a, B b, C c) {
  const pair y = both(b), z = both(c);
  return {fma_(a.even, y.even, z.even), fma_(a.odd, y.odd, z.odd)};
}
template <class C> INLINE pair fma_(float a, pair b, C c) { return fma_(both(a), b, c); }
INLINE pair fma_(float a, float b, pair c) { return fma_(both(a), b, c); }
INLINE pair min_number_(pair a, float b) { return {min_number_(a.even, b), min_number_(a.odd, b)}; }
INLINE pair max_number_(pair a, float b) { return {max_number_(a.even, b), max_number_(a.odd, b)}; }
template <class A, class B> INLINE pair select_(pair_int mask, A a, B b) {
  const pair x = both(a), y = both(b);
  return {select_(mask.even, x.even, y.even), select_(mask.odd, x.odd, y.odd)};
}
INLINE pair select_(bool mask, pair a, pair b) { return mask ? a : b; }
INLINE pair select_(bool mask, pair a, float b) { return mask ? a : both(b); }
INLINE pair select_(bool mask, float a, pair b) { return mask ? both(a) : b; }
"""
"""Operations on one half and then on the other."""

_MORE = r"""
#define PAIR_FUNCTION(name) PAIR_CALL(pair, name##_, pair)
#define PAIR_FUNCTION_2(name) PAIR_CALL_2(name##_)
PAIR_CALL(pair, to_float16, pair)
#define PAIR_CALL_BOTH(name) INLINE pair name(pair a, pair b) { return {name(a.even, b.even), name(a.odd, b.odd)}; }
PAIR_CALL_BOTH(copysign_) PAIR_CALL_BOTH(greater) PAIR_CALL_BOTH(lesser)
INLINE void operator+=(pair& to, pair x) { to = to + x; }
INLINE void operator|=(pair_int& to, pair_int x) { to = to | x; }
INLINE pair scale_(pair r, pair t, pair x) { return {scale_(r.even, t.even, x.even), scale_(r.odd, t.odd, x.odd)}; }
INLINE pair scale_down_(pair r, pair t) { return {scale_down_(r.even, t.even), scale_down_(r.odd, t.odd)}; }
INLINE pair power_(pair t) { return {unbits(bits(t.even) << 23), unbits(bits(t.odd) << 23)}; }
INLINE float total(pair x) { return total(x.even + x.odd); }
INLINE float largest(pair x) { return largest(greater(x.even, x.odd)); }
INLINE float smallest(pair x) { return smallest(lesser(x.even, x.odd)); }
INLINE int32 any(pair_int mask) { return any(mask.even | mask.odd); }
INLINE void fill(pair (&x)[2], float value) { x[0] = x[1] = both(value); }
INLINE float total(const pair (&x)[2]) { return total(x[0] + x[1]); }
INLINE float largest(const pair (&x)[2]) { return largest(greater(x[0], x[1])); }
INLINE float smallest(const pair (&x)[2]) { return smallest(lesser(x[0], x[1])); }
INLINE int32 any(const pair_int (&x)[2]) { return any(x[0] | x[1]); }
/* one operation on both, then the next: a polynomial's wait for each other */
#define PAIR_WOVEN(name) INLINE pair name##_(pair x) { return name##_of(x); }
/* two vectors that lie one behind the other: `even` comes first */
#define TWO(type, memory, kind) \
  INLINE kind load_two_##type(const memory* from) { return {load_##type(from), load_##type(from + WIDTH)}; } \
  INLINE void put_two_##type(memory* to, kind x) { put_##type(to, x.even); put_##type(to + WIDTH, x.odd); }
#define STREAM_TWO(type, memory, packed) INLINE void stream_two_##type(memory* to, pair x) { \
  if (u64(to) % (WIDTH * sizeof *to)) put_two_##type(to, x); \
  else { past_caches(to, packed(x.even)); past_caches(to + WIDTH, packed(x.odd)); } }
INLINE pair_int places_two(int32 first) { return {places(first), places(first + WIDTH)}; }
INLINE pair_int match_two(int32 first, int32 place) {
  return {places(first) == place, places(first + WIDTH) == place};
}
TWO(float32, float, pair) TWO(bfloat16, u16, pair) TWO(float16, u16, pair) TWO(bool, uint8, pair_int)
TWO(bool, bool, pair_int)
INLINE void add_two_float64(double* to, pair x) { add_float64(to, x.even); add_float64(to + WIDTH, x.odd); }
STREAM_TWO(float32, float, widen) STREAM_TWO(bfloat16, u16, narrowed) STREAM_TWO(float16, u16, half)
"""

_QUADS = r"""
/* twice as many, each operation on one half and then on the other: what waits for a result has something else to do
   (AdamW took 0.8 of the time, with AVX-512 0.93) */
#define QUAD (2 * PAIR)
struct quad { pair one, two; };
struct quad_int { pair_int one, two; };
INLINE quad twice(float x) { return {both(x), both(x)}; }
INLINE quad twice(quad x) { return x; }
INLINE quad load_quad(const u16* from) { return {load_pair(from), load_pair(from + PAIR)}; }
INLINE void put_quad(u16* to, quad x) { put_pair(to, x.one); put_pair(to + PAIR, x.two); }
INLINE void stream_quad(u16* to, quad x) { stream_pair(to, x.one); stream_pair(to + PAIR, x.two); }
INLINE quad_int match_quad(int32 first, int32 place) {
  return {match_pair(first, place), match_pair(first + PAIR, place)};
}
"""


def _of_quads(pairs: str) -> str:
    """Return the definitions for quads that correspond to those for pairs."""
    words = ("PAIR", "QUAD"), ("pair", "quad"), (".even", ".one"), (".odd", ".two"), ("both(", "twice(")
    return functools.reduce(lambda text, word: text.replace(*word), words, pairs)


SIMD_BF16 = _PAIRS + _EACH + _MORE + _QUADS + _of_quads(_EACH) + "#endif\n"


_SHIFT = r"""
/* added to a small float, it rounds that to a whole number, plus 254, in the lowest bits */
static constexpr float SHIFT = 12582912.f + 254.f;
"""

_AVX512 = r"""
#if defined __clang__ || defined NO_VECTORS
#elif defined __AVX512F__ && defined __AVX512BW__ && defined __AVX512DQ__
#define VECTORS
#define VECTORS_ROUND
#ifdef FAR_CACHES
#define VECTORS_FAR
#endif
#define WIDTH 16
typedef float wide __attribute__((vector_size(64))); typedef int32 wide_int __attribute__((vector_size(64)));
typedef u32 wide_bits __attribute__((vector_size(64))); typedef int16 halves __attribute__((vector_size(32)));
typedef char bytes __attribute__((vector_size(16))); typedef u64 wide_long __attribute__((vector_size(64)));
INLINE wide_bits bits(wide x) { return (wide_bits)x; }
INLINE wide unbits(wide_bits u) { return (wide)u; }
/* a & b | c, which g++ writes as two instructions where floats are involved */
INLINE wide_bits masked_or(wide_bits a, u32 b, wide_bits c) {
  const wide_bits mask = wide_bits{} + b;
  return (wide_bits)__builtin_ia32_pternlogd512_mask((wide_int)a, (wide_int)mask, (wide_int)c, 0xea, u16(-1));
}
INLINE wide fused(wide a, wide b, wide c) { return __builtin_ia32_vfmaddps512_mask(a, b, c, u16(-1), 4); }
INLINE wide scale_(wide r, wide t, wide) {
  return __builtin_ia32_scalefps512_mask(r, t - SHIFT, r, u16(-1), 4);
}
INLINE wide scale_down_(wide r, wide t) { return scale_(r, t, r); }
INLINE wide sqrt_(wide x) { return __builtin_ia32_sqrtps512_mask(x, x, u16(-1), 4); }
#define ROUNDED(name, how) \
  INLINE wide name(wide x) { return __builtin_ia32_rndscaleps_mask(x, how, x, u16(-1), 4); }
INLINE wide lesser(wide a, wide b) { return __builtin_ia32_minps512_mask(a, b, a, u16(-1), 4); }
INLINE wide greater(wide a, wide b) { return __builtin_ia32_maxps512_mask(a, b, a, u16(-1), 4); }
INLINE wide_int places(int32 first) { return first + wide_int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
/* of the lower halves of 64 bits; places of even lanes; lower halves in even lanes and in odd ones */
INLINE wide_long product(wide_long a, u32 b) {
  typedef long long longs __attribute__((vector_size(64)));
  return (wide_long)__builtin_ia32_pmuludq512_mask((wide_int)a, (wide_int)(wide_long{} + b), longs{}, uint8(-1));
}
INLINE wide_long every_other(u64 first, u64 step) { return first + step * wide_long{0, 2, 4, 6, 8, 10, 12, 14}; }
INLINE wide_int woven(wide_long a, wide_long b) {
  return (wide_int)__builtin_ia32_blendmd_512_mask((wide_int)a, (wide_int)(b << 32), 0xaaaa);
}

/* memory <-> register; g++ 12 widens vectors in two parts where it is left to convert them itself */
INLINE wide load_bfloat16(const u16* from) {
  halves x;
  __builtin_memcpy(&x, from, 32);
  return unbits((wide_bits)__builtin_ia32_pmovzxwd512_mask(x, wide_int{}, u16(-1)) << 16);
}
INLINE halves narrowed(wide x) {
  return (halves)__builtin_ia32_pmovdw512_mask((wide_int)(bits(x) >> 16), halves{}, u16(-1));
}
INLINE wide single(halves x) { return __builtin_ia32_vcvtph2ps512_mask(x, wide{}, u16(-1), 4); }
INLINE halves half(wide x) { return __builtin_ia32_vcvtps2ph512_mask(x, 0, halves{}, u16(-1)); }
INLINE wide_int load_bool(const uint8* from) {
  bytes x;
  __builtin_memcpy(&x, from, 16);
  return __builtin_ia32_pmovzxbd512_mask(x, wide_int{}, u16(-1)) != 0;
}
INLINE void put_bool(uint8* to, wide_int mask) {
  const bytes x = __builtin_ia32_pmovdb512_mask(mask & 1, bytes{}, u16(-1));
  __builtin_memcpy(to, &x, 16);
}
/* a bit for each lane that is true */
INLINE u32 holding(wide_int mask) { return __builtin_ia32_cvtd2mask512(mask); }
INLINE void past_caches(float* to, wide x) { __builtin_ia32_movntps512(to, x); }
INLINE void past_caches(u16* to, halves x) {
  typedef long long quarters __attribute__((vector_size(32)));
  __builtin_ia32_movntdq256((quarters*)to, (quarters)x);
}
INLINE void add_float64(double* to, wide x) {
  typedef double doubles __attribute__((vector_size(64)));
  typedef float eight __attribute__((vector_size(32)));
  eight y[2];
  doubles low, high;
  __builtin_memcpy(y, &x, sizeof x);
  __builtin_memcpy(&low, to, sizeof low); __builtin_memcpy(&high, to + 8, sizeof high);
  low += __builtin_ia32_cvtps2pd512_mask(y[0], doubles{}, uint8(-1), 4);
  high += __builtin_ia32_cvtps2pd512_mask(y[1], doubles{}, uint8(-1), 4);
  __builtin_memcpy(to, &low, sizeof low); __builtin_memcpy(to + 8, &high, sizeof high);
}
"""

_AVX2 = r"""
#elif defined __AVX2__ && defined __FMA__ && defined __F16C__
#define VECTORS
#define WIDTH 8
typedef float wide __attribute__((vector_size(32))); typedef int32 wide_int __attribute__((vector_size(32)));
typedef u32 wide_bits __attribute__((vector_size(32))); typedef int16 halves __attribute__((vector_size(16)));
typedef char bytes __attribute__((vector_size(16))); typedef u64 wide_long __attribute__((vector_size(32)));
INLINE wide_bits bits(wide x) { return (wide_bits)x; }
INLINE wide unbits(wide_bits u) { return (wide)u; }
INLINE wide_bits masked_or(wide_bits a, u32 b, wide_bits c) { return (a & b) | c; }
INLINE wide fused(wide a, wide b, wide c) { return __builtin_ia32_vfmaddps256(a, b, c); }
/* by way of 2^64 or 2^-64, whichever the sign of x asks for: the lower bits of t move to the exponent's place */
INLINE wide scale_(wide r, wide t, wide x) {
  const wide rest = __builtin_ia32_blendvps256(wide{} + 0x1p64f, wide{} + 0x1p-64f, x);
  return r * unbits((bits(t) << 23) - bits(rest)) * rest;
}
INLINE wide scale_down_(wide r, wide t) { return r * unbits((bits(t) << 23) - bits(0x1p-64f)) * 0x1p-64f; }
INLINE wide sqrt_(wide x) { return __builtin_ia32_sqrtps256(x); }
#define ROUNDED(name, how) INLINE wide name(wide x) { return __builtin_ia32_roundps256(x, how); }
INLINE wide lesser(wide a, wide b) { return __builtin_ia32_minps256(a, b); }
INLINE wide greater(wide a, wide b) { return __builtin_ia32_maxps256(a, b); }
INLINE wide_int places(int32 first) { return first + wide_int{0, 1, 2, 3, 4, 5, 6, 7}; }
INLINE wide_long product(wide_long a, u32 b) {
  return (wide_long)__builtin_ia32_pmuludq256((wide_int)a, (wide_int)(wide_long{} + b));
}
INLINE wide_long every_other(u64 first, u64 step) { return first + step * wide_long{0, 2, 4, 6}; }
INLINE wide_int woven(wide_long a, wide_long b) {
  return (wide_int)__builtin_ia32_pblendd256((wide_int)a, (wide_int)(b << 32), 0xaa);
}

INLINE wide load_bfloat16(const u16* from) {
  halves x;
  __builtin_memcpy(&x, from, 16);
  return unbits((wide_bits)__builtin_ia32_pmovzxwd256(x) << 16);
}
/* integers below 65536 */
INLINE halves packed(wide_int x) {
  return __builtin_ia32_packusdw128(__builtin_ia32_vextractf128_si256(x, 0), __builtin_ia32_vextractf128_si256(x, 1));
}
INLINE halves narrowed(wide x) { return packed((wide_int)(bits(x) >> 16)); }
INLINE wide single(halves x) { return __builtin_ia32_vcvtph2ps256(x); }
INLINE halves half(wide x) { return __builtin_ia32_vcvtps2ph256(x, 0); }
INLINE wide_int load_bool(const uint8* from) {
  bytes x = {};
  __builtin_memcpy(&x, from, 8);
  return __builtin_ia32_pmovzxbd256(x) != 0;
}
INLINE void put_bool(uint8* to, wide_int mask) {
  const bytes x = __builtin_ia32_packuswb128(packed(mask & 1), halves{});
  __builtin_memcpy(to, &x, 8);
}
INLINE u32 holding(wide_int mask) { return __builtin_ia32_movmskps256(unbits((wide_bits)mask)); }
INLINE void past_caches(float* to, wide x) { __builtin_ia32_movntps256(to, x); }
INLINE void past_caches(u16* to, halves x) {
  typedef long long eighths __attribute__((vector_size(16)));
  __builtin_ia32_movntdq((eighths*)to, (eighths)x);
}
INLINE void add_float64(double* to, wide x) {
  typedef double doubles __attribute__((vector_size(32)));
  doubles low, high;
  __builtin_memcpy(&low, to, sizeof low); __builtin_memcpy(&high, to + 4, sizeof high);
  low += __builtin_ia32_cvtps2pd256(__builtin_ia32_vextractf128_ps256(x, 0));
  high += __builtin_ia32_cvtps2pd256(__builtin_ia32_vextractf128_ps256(x, 1));
  __builtin_memcpy(to, &low, sizeof low); __builtin_memcpy(to + 4, &high, sizeof high);
}
"""

_BOTH = r"""
#endif
#ifdef VECTORS
INLINE wide widen(float x) { return x - wide{}; }
INLINE wide widen(wide x) { return x; }
ROUNDED(floor_, 9) ROUNDED(ceil_, 10) ROUNDED(trunc_, 11) ROUNDED(round_, 8)
template <class A, class B, class C> INLINE wide fma_(A a, B b, C c) { return fused(widen(a), widen(b), widen(c)); }
INLINE wide abs_(wide x) { return unbits(bits(x) & 0x7fffffffu); }
INLINE wide copysign_(wide x, wide sign) { return unbits((bits(x) & 0x7fffffffu) | (bits(sign) & 0x80000000u)); }
INLINE wide min_number_(wide a, float b) { return lesser(widen(b), a); }
INLINE wide max_number_(wide a, float b) { return greater(widen(b), a); }
INLINE wide min_(wide a, float b) { return min_(a, widen(b)); }
INLINE wide min_(float a, wide b) { return min_(widen(a), b); }
INLINE wide max_(wide a, float b) { return max_(a, widen(b)); }
INLINE wide max_(float a, wide b) { return max_(widen(a), b); }
template <class A, class B> INLINE wide select_(wide_int mask, A a, B b) { return mask ? widen(a) : widen(b); }
template <class A, class B> INLINE wide select_(bool mask, A a, B b) { return mask ? widen(a) : widen(b); }
/* whether `place` is one of the `count` from `first` on: in nearly all steps it is not */
template <int count> INLINE bool holds(int32 first, int32 place) { return u32(place) - u32(first) < count; }
struct some_ { static constexpr bool any = true; };
struct none_ { static constexpr bool any = false; };
/* which of the positions from `first` on is `place` */
INLINE wide_int match(int32 first, int32 place) { return places(first) == place; }
INLINE wide to_float32(wide_int mask) { return mask ? 1.f : 0.f; }
INLINE wide from_int32(wide_int x) { return __builtin_convertvector(x, wide); }
INLINE wide_int shr_(wide_int x, int32 by) { return x >> by; }
INLINE wide_int signbit_(wide x) { return (wide_int)bits(x) < 0; }
INLINE wide_int not_(wide_int mask) { return ~mask; }
INLINE wide as_number(wide_bits u) { return __builtin_convertvector((wide_int)u, wide); }
INLINE wide_bits as_integer(wide x) { return (wide_bits)__builtin_convertvector(x, wide_int); }

INLINE wide load_float32(const float* from) { wide x; __builtin_memcpy(&x, from, sizeof x); return x; }
INLINE void put_float32(float* to, wide x) { __builtin_memcpy(to, &x, sizeof x); }
INLINE void put_bfloat16(u16* to, wide x) {
  const halves y = narrowed(x);
  __builtin_memcpy(to, &y, sizeof y);
}
/* to the nearest float16, of two the even one */
INLINE wide load_float16(const u16* from) { halves x; __builtin_memcpy(&x, from, sizeof x); return single(x); }
INLINE void put_float16(u16* to, wide x) {
  const halves y = half(x);
  __builtin_memcpy(to, &y, sizeof y);
}
INLINE wide to_float16(wide x) { return single(half(x)); }
/* past the caches; before other threads may read what was written so, finish_streams */
INLINE void stream_float32(float* to, wide x) {
  if (u64(to) % sizeof x) put_float32(to, x); else past_caches(to, x);
}
INLINE void stream_bfloat16(u16* to, wide x) {
  if (u64(to) % sizeof(halves)) put_bfloat16(to, x); else past_caches(to, narrowed(x));
}
INLINE void stream_float16(u16* to, wide x) {
  if (u64(to) % sizeof(halves)) put_float16(to, x); else past_caches(to, half(x));
}
/* whole cache lines: parts of them take up to 1.3 times as long as without. Short rows go by where they begin. */
INLINE void stream_bytes(void* target, const void* source, int64 count) {
  char* to = (char*)target;
  const char* from = (const char*)source;
  const int64 head = count < 4096 ? 0 : -u64(to) % 64, end = u64(to + head) % 64 ? 0 : head + ((count - head) & -64);
  __builtin_memcpy(to, from, end ? head : count);
  for (int64 at = head; at < end; at += sizeof(wide)) {
    wide x;
    __builtin_memcpy(&x, from + at, sizeof x);
    past_caches((float*)(to + at), x);
  }
  if (end) __builtin_memcpy(to + end, from + end, count - end);
}
INLINE void finish_streams() { __builtin_ia32_sfence(); }
/* with VNNI: the sum of the upper half's last bit, 0x7fff and the float's bits by one multiplication of 16-bit halves
   with 1, 3 instructions in place of 5. (vcvtneps2bf16 would be one, but takes denormal numbers for zero.) */
INLINE wide nearest_bfloat16(wide x) {
#if WIDTH == 16 && defined __AVX512VNNI__
  const wide_bits added = masked_or(bits(x), 0x10000u, wide_bits{} + 0x7fffu), ones = wide_bits{} + 0x10001u;
  const wide_int sum = __builtin_ia32_vpdpwssd_v16si((wide_int)x, (wide_int)added, (wide_int)ones);
  return unbits((wide_bits)sum & 0xffff0000u);
#else
  return unbits((bits(x) + (0x7fffu + (bits(x) >> 16 & 1u))) & 0xffff0000u);
#endif
}
INLINE wide_int load_bool(const bool* from) { return load_bool((const uint8*)from); }
INLINE void put_bool(bool* to, wide_int mask) { put_bool((uint8*)to, mask); }
INLINE wide round_bfloat16(wide x) {
  return x != x ? unbits((bits(x) & 0xffff0000u) | 0x400000u) : nearest_bfloat16(x);
}
INLINE wide to_bfloat16(wide x) { return round_bfloat16(x); }

/* what a loop has collected in its lanes */
typedef float four __attribute__((vector_size(16)));
template <int lanes> struct Four { four at[lanes / 4]; };
INLINE Four<WIDTH> fours(wide x) { Four<WIDTH> y; __builtin_memcpy(&y, &x, sizeof x); return y; }
INLINE float total(wide x) {
  const Four<WIDTH> y = fours(x);
  four sum = y.at[0];
  for (int k = 1; k < WIDTH / 4; k++) sum += y.at[k];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
INLINE float largest(wide x) {
  float most = x[0];
  for (int lane = 1; lane < WIDTH; lane++) most = x[lane] > most ? x[lane] : most;
  return most;
}
INLINE float smallest(wide x) {
  float least = x[0];
  for (int lane = 1; lane < WIDTH; lane++) least = x[lane] < least ? x[lane] : least;
  return least;
}
INLINE int32 any(wide_int mask) { return holding(mask) != 0; }
static __attribute__((noinline)) wide by_library(wide x, wide near, u32 lanes, float (*library)(float)) {
  for (; lanes; lanes &= lanes - 1) near[__builtin_ctz(lanes)] = library(x[__builtin_ctz(lanes)]);
  return near;
}
INLINE wide beyond_(wide x, wide near, float (*library)(float)) {
  const u32 lanes = holding(abs_(x) > 100000.f);
  return __builtin_expect(lanes != 0, 0) ? by_library(x, near, lanes, library) : near;
}
/* the same of several accumulators */
INLINE void fill(wide (&x)[4], float value) { x[0] = x[1] = x[2] = x[3] = widen(value); }
INLINE float total(const wide (&x)[4]) { return total((x[0] + x[1]) + (x[2] + x[3])); }
INLINE float largest(const wide (&x)[4]) {
  return largest(greater(greater(x[0], x[1]), greater(x[2], x[3])));
}
INLINE float smallest(const wide (&x)[4]) {
  return smallest(lesser(lesser(x[0], x[1]), lesser(x[2], x[3])));
}
INLINE int32 any(const wide_int (&x)[4]) { return any(x[0] | x[1] | x[2] | x[3]); }
"""

_FUNCTIONS = r"""
#define VECTOR_FUNCTION(name) \
  INLINE wide name##_(wide x) { return name##_of(x); } PAIR_FUNCTION(name) QUAD_CALL(quad, name##_, quad)
#define VECTOR_WOVEN(name) \
  INLINE wide name##_(wide x) { return name##_of(x); } PAIR_WOVEN(name) QUAD_CALL(quad, name##_, quad)
#define VECTOR_FUNCTION_2(name) \
  INLINE wide name##_(wide a, wide b) { return name##_of(a, b); } \
  INLINE wide name##_(wide a, float b) { return name##_of(a, widen(b)); } \
  INLINE wide name##_(float a, wide b) { return name##_of(widen(a), b); } PAIR_FUNCTION_2(name) QUAD_CALL_2(name##_)
#else
#define VECTOR_FUNCTION(name)
#define VECTOR_FUNCTION_2(name)
#define VECTOR_WOVEN(name)
INLINE void stream_bytes(void* to, const void* from, int64 count) { __builtin_memcpy(to, from, count); }
INLINE void finish_streams() {}
#endif
"""

SIMD = _SHIFT + _AVX512 + _AVX2 + _BOTH + SIMD_BF16 + _FUNCTIONS
