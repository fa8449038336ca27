"""Two and four vectors of floats, the wide steps of loops (`vectorize.py`). NO_PAIRS leaves this part out."""

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
template <class B, class C> INLINE pair fma_(pair a, B b, C c) {
  const pair y = both(b), z = both(c);
  return {fused(a.even, y.even, z.even), fused(a.odd, y.odd, z.odd)};
}
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
