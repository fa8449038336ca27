"""Random bits in C++, for one element and for vectors, as defined by `ir/philox.py`."""

from __future__ import annotations

PHILOX = r"""
/* Philox4x32-10: word `draw % 4` for the counter (position, draw / 4) (ir/philox.py); no loop: g++ vectorises none that
   has one inside. Words lie in the lower halves of 64 bits, which is all that their products read; of 64 bits times 64
   AVX-512 has products, and AVX2 has not (0.5 of the time with one, 1.3 with the other, Zen 5) */
#if defined __AVX512DQ__
#define PHILOX_TYPE u64
#define PHILOX_LOW(x) (x & 0xffffffffu)
#else
#define PHILOX_TYPE u32
#define PHILOX_LOW(x) u64(x)
#endif
#define PHILOX_ROUND(n) { \
  const u64 first = 0xD2511F53ul * PHILOX_LOW(a), second = 0xCD9E8D57ul * PHILOX_LOW(c); \
  a = PHILOX_TYPE(second >> 32) ^ b ^ (k0 + n * 0x9E3779B9u); b = PHILOX_TYPE(second); \
  c = PHILOX_TYPE(first >> 32) ^ d ^ (k1 + n * 0xBB67AE85u); d = PHILOX_TYPE(first); }
INLINE int32 philox_(int64 key, int64 position, int64 draw) {
  PHILOX_TYPE a = PHILOX_TYPE(position), b = u64(position) >> 32, c = u32(draw >> 2), d = u32(u64(draw >> 2) >> 32);
  const u32 k0 = u32(key), k1 = u32(u64(key) >> 32);
  PHILOX_ROUND(0) PHILOX_ROUND(1) PHILOX_ROUND(2) PHILOX_ROUND(3) PHILOX_ROUND(4)
  PHILOX_ROUND(5) PHILOX_ROUND(6) PHILOX_ROUND(7) PHILOX_ROUND(8) PHILOX_ROUND(9)
  const int word = draw & 3;
  return int32(word == 0 ? a : word == 1 ? b : word == 2 ? c : d);
}
#ifdef VECTORS
/* the same of positions in the lanes of 64 bits: one multiplication, one shift and one sum of bits for each word that a
   round changes (0.4 of the time of g++'s loop with AVX-512, 0.33 with AVX2). Products take no notice of upper halves,
   in which anything may stand */
#define PHILOX_ROUNDS(n) { \
  const wide_long first = product(a, 0xD2511F53u), second = product(c, 0xCD9E8D57u); \
  a = (second >> 32) ^ b ^ (k0 + n * 0x9E3779B9ul & 0xffffffffu); b = second; \
  c = (first >> 32) ^ d ^ (k1 + n * 0xBB67AE85ul & 0xffffffffu); d = first; }
INLINE wide_long philox_long(int64 key, wide_long position, int64 draw) {
  const u64 k0 = u32(key), k1 = u64(key) >> 32;
  wide_long a = position, b = position >> 32;
  wide_long c = wide_long{} + u32(draw >> 2), d = wide_long{} + (u64(draw >> 2) >> 32);
  PHILOX_ROUNDS(0) PHILOX_ROUNDS(1) PHILOX_ROUNDS(2) PHILOX_ROUNDS(3) PHILOX_ROUNDS(4)
  PHILOX_ROUNDS(5) PHILOX_ROUNDS(6) PHILOX_ROUNDS(7) PHILOX_ROUNDS(8) PHILOX_ROUNDS(9)
  const int word = draw & 3;
  return word == 0 ? a : word == 1 ? b : word == 2 ? c : d;
}
/* the same for the positions `first`, `first + step` and so on, lanes of even and of odd places apart */
INLINE wide_int philox_at(int64 key, int64 first, int64 step, int64 draw) {
  const wide_long position = every_other(first, step);
  return woven(philox_long(key, position, draw), philox_long(key, position + u64(step), draw));
}
#ifndef NO_PAIRS
INLINE pair_int philox_at_two(int64 key, int64 first, int64 step, int64 draw) {
  return {philox_at(key, first, step, draw), philox_at(key, first + WIDTH * step, step, draw)};
}
INLINE pair_int philox_at_pair(int64 key, int64 first, int64 step, int64 draw) {
  return {philox_at(key, first, 2 * step, draw), philox_at(key, first + step, 2 * step, draw)};
}
INLINE quad_int philox_at_quad(int64 key, int64 first, int64 step, int64 draw) {
  return {philox_at_pair(key, first, step, draw), philox_at_pair(key, first + PAIR * step, step, draw)};
}
#endif
#endif
"""
