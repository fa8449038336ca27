"""The C++ prelude of every kernel file: types, rounding to half precision, and functions that vectorize.

A file has as much of it as its kernels need (`compile.py`). No header is included: a kernel then costs 0.02-0.08 s of
compiler time, against seconds with the standard library's.

The float functions are branch-free polynomials rather than libm's or libmvec's. g++ calls libmvec in the vectorized
part of a loop and libm in the remainder. An element's value would then depend on its place in the loop, and fusing two
loops could change bits. Here scalar and vector code run the same operations. float64 functions without polynomials
(`math_f64.py`) are libm's, one element at a time.

In registers, bfloat16 and float16 are floats of the same value: `to_bfloat16` rounds, `store_bfloat16` packs.
"""

from __future__ import annotations

from dcompile.codegen.emit.cpp.library.math_f32 import MATH_F32, MATH_F32_RARE
from dcompile.codegen.emit.cpp.library.math_f64 import MATH_F64
from dcompile.codegen.emit.cpp.library.simd import SIMD
from dcompile.codegen.emit.float8 import FLOAT8_PRELUDE

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


_BASE = r"""
#if !defined NO_DOUBLES && !defined __clang__
/* a function of vectors is called for all lanes: not where only some of a select's ask for it, by a branch of g++'s */
#pragma GCC optimize("no-tree-sink", "no-thread-jumps")
#endif
typedef bool bool_; typedef unsigned char uint8; typedef signed char int8; typedef short int16; typedef int int32;
typedef long int64; typedef float float32; typedef double float64; typedef float bfloat16; typedef float float16;
typedef unsigned int u32; typedef unsigned short u16; typedef unsigned long u64;
#define INLINE static inline __attribute__((always_inline))
extern "C" int omp_get_max_threads() noexcept;
extern "C" int omp_get_thread_num() noexcept;
extern "C" void* aligned_alloc(u64, u64) noexcept;
extern "C" void free(void*) noexcept;
/* what a kernel returns: 0, or 1 after an integer division by zero, or 4 * position + 2 of a position that is none */
static int64 failure;
static int64 take_failure() { const int64 was = failure; failure = 0; return was; }
/* of Python's stable interface, what calls without ctypes take (runtime/program/argument_table.py); weak, for the C++
   runner loads kernels where there is no Python */
#define PYTHON extern "C" __attribute__((weak))
struct PyObject;
PYTHON PyObject* PyExc_TypeError;
PYTHON u64 PyLong_AsUnsignedLongLongMask(PyObject*) noexcept;
PYTHON PyObject* PyLong_FromLongLong(int64) noexcept;
PYTHON PyObject* PyErr_Occurred() noexcept;
PYTHON void PyErr_SetString(PyObject*, const char*) noexcept;
PYTHON PyObject* PyObject_CallMethod(PyObject*, const char*, const char*, ...) noexcept;
PYTHON void* PyEval_SaveThread() noexcept;
PYTHON void PyEval_RestoreThread(void*) noexcept;
struct Method { const char* name; void* run; int32 how; const char* doc; };
#define FASTCALL 0x80
/* writes what a call is given into its table, unless it is something else than numbers, or not as many */
static bool take_given(u64* slots, PyObject* const* given, int64 count, int64 wanted) {
  if (count != wanted) PyErr_SetString(PyExc_TypeError, "dcompile: a kernel takes another number of arguments");
  for (int64 n = 0; n < count && n < wanted; n++) slots[n] = PyLong_AsUnsignedLongLongMask(given[n]);
  return !PyErr_Occurred();
}
/* runs kernels one after another: how many arguments each has, and where these are */
struct Call { int64 (*run)(const int64* const*); int64 count; };
static int64 run_calls(const Call* calls, int64 count, const int64* const* arguments) {
  for (int64 n = 0; n < count; arguments += calls[n++].count)
    if (const int64 failed = calls[n].run(arguments)) return failed;
  return 0;
}
/* the table: how much is given, calls; what is given; calls; where arguments are */
static PyObject* call_table(PyObject* table, PyObject* const* given, int64 count) {
  u64* const words = (u64*)PyLong_AsUnsignedLongLongMask(table);
  if (!take_given(words + 2, given, count, words[0])) return 0;
  const Call* const calls = (const Call*)(words + 2 + words[0]);
  void* const lock = PyEval_SaveThread();
  const int64 failed = run_calls(calls, words[1], (const int64* const*)(calls + words[1]));
  PyEval_RestoreThread(lock);
  return PyLong_FromLongLong(failed);
}
extern "C" Method calls_from_python = {"calls", (void*)call_table, FASTCALL, 0};

INLINE u32 bits(float x) { u32 u; __builtin_memcpy(&u, &x, 4); return u; }
INLINE float unbits(u32 u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
/* one of two floats, without the branch that g++ makes of it where it has no vectors: a scatter took twice as long */
INLINE float picked(bool mask, float a, float b) {
  const u32 all = 0u - u32(mask);
  return unbits((bits(a) & all) | (bits(b) & ~all));
}
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
template <> struct Lanes<1> { typedef uint8 vector __attribute__((vector_size(8))); };
template <> struct Lanes<2> { typedef u16 vector __attribute__((vector_size(16))); };
template <> struct Lanes<4> { typedef u32 vector __attribute__((vector_size(32))); };
template <> struct Lanes<8> { typedef u64 vector __attribute__((vector_size(32))); };
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
/* four by four of 8 bytes: one shuffle within halves of registers, and one of halves */
template <class T> INLINE void turn_4(const T* from, int64 from_line, T* to, int64 to_line) {
#ifdef __clang__
  for (int r = 0; r < 4; r++) for (int c = 0; c < 4; c++) to[c * to_line + r] = from[r * from_line + c];
#else
  typedef typename Lanes<sizeof(T)>::vector vector;
  const vector even = {0, 4, 2, 6}, odd = {1, 5, 3, 7}, low = {0, 1, 4, 5}, high = {2, 3, 6, 7};
  vector a[4], b[4];
  for (int r = 0; r < 4; r++) __builtin_memcpy(&a[r], from + r * from_line, sizeof(vector));
  for (int r = 0; r < 4; r += 2) {
    b[r] = __builtin_shuffle(a[r], a[r + 1], even);
    b[r + 1] = __builtin_shuffle(a[r], a[r + 1], odd);
  }
  for (int c = 0; c < 2; c++) {
    const vector first = __builtin_shuffle(b[c], b[c + 2], low), second = __builtin_shuffle(b[c], b[c + 2], high);
    __builtin_memcpy(to + c * to_line, &first, sizeof(vector));
    __builtin_memcpy(to + (c + 2) * to_line, &second, sizeof(vector));
  }
#endif
}
template <int bytes> struct Turn { static constexpr int64 side = 8; template <class T> INLINE void
  square(const T* from, int64 from_line, T* to, int64 to_line) { turn_8(from, from_line, to, to_line); } };
template <> struct Turn<8> { static constexpr int64 side = 4; template <class T> INLINE void
  square(const T* from, int64 from_line, T* to, int64 to_line) { turn_4(from, from_line, to, to_line); } };
template <class T> INLINE void turn(const T* from, int64 from_line, T* to, int64 to_line, int64 rows, int64 columns) {
  typedef Turn<sizeof(T)> By;
  const int64 whole_rows = rows & -By::side, whole_columns = columns & -By::side;
  for (int64 r = 0; r < whole_rows; r += By::side)
    for (int64 c = 0; c < whole_columns; c += By::side)
      By::square(from + r * from_line + c, from_line, to + c * to_line + r, to_line);
  for (int64 r = 0; r < rows; r++)
    for (int64 c = r < whole_rows ? whole_columns : 0; c < columns; c++) to[c * to_line + r] = from[r * from_line + c];
}

/* what soon is read: all cache lines of a step; the same a little ahead, always or where caches are far (machine.py);
   as it is, but there alone; those of the next step, or a little further where caches are far; rows of a tile */
template <int64 bytes> INLINE void ask(const void* from) {
#pragma GCC unroll 4
  for (int64 k = 0; k < bytes; k += 64) __builtin_prefetch((const char*)from + k);
}
#ifndef CACHE_BYTES
#define CACHE_BYTES 0
#endif
#ifdef FAR_CACHES
template <int64 bytes> INLINE void ask_soon(const void* from) { ask<bytes>((const char*)from + 4096); }
template <int64 bytes> INLINE void ask_far(const void* from) { ask_soon<bytes>(from); }
template <int64 bytes> INLINE void ask_if_far(const void* from) { ask<bytes>(from); }
template <int64 bytes> INLINE void ask_next(const void* from) { ask<bytes>((const char*)from + 512); }
static constexpr bool caches_are_far = true;
#else
template <int64 bytes> INLINE void ask_soon(const void* from) { ask<bytes>((const char*)from + 1024); }
template <int64 bytes> INLINE void ask_far(const void*) {}
template <int64 bytes> INLINE void ask_if_far(const void*) {}
template <int64 bytes> INLINE void ask_next(const void* from) { ask<bytes>((const char*)from + bytes); }
static constexpr bool caches_are_far = false;
#endif
/* whether so many bytes are still in the caches (machine.py) when they are read again, beside what else is read: with
   32 MB of L3 16 MB are not (stream_stores.py), with 480 MB 64 are */
template <int64 bytes> static constexpr bool stays = 4 * bytes < CACHE_BYTES;
template <class T> INLINE void ask_for(const T* from, int64 line, int64 rows, int64 columns) {
  for (int64 r = 0; r < rows; r++)
    for (int64 c = 0; c < columns; c += 64 / sizeof(T)) __builtin_prefetch(from + r * line + c);
}

/* what a row reads where its mask is false: one select a row, where masked loads would take one each */
alignas(64) static const uint8 zeros[16384] = {};

/* memory <-> register */
/* an index that a value gives: opaque, because g++ 12 and 13 vectorise the gather wrongly, or crash, where the value
   comes from an 8-bit comparison (a bool cast to an integer); gathers of this kind are no faster as vectors */
INLINE int64 position(int64 x) { __asm__("" : "+r"(x)); return x; }
/* a number that is compared with positions below 2^31 */
INLINE int32 as_place(int64 x) { return x == int64(int32(x)) ? int32(x) : -1; }
/* a position from low (below which nothing is read) to high; any that is none fails the kernel, and reads the first */
template <class T> INLINE T within_(T x, T low, T high) {
  if (__builtin_expect(u64(x) - u64(low) < u64(high) - u64(low), 1)) return x;
  failure = int64(x) * 4 + 2;
  return T(0);
}
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
/* the same for what is no NaN with bits that bfloat16 has not (value_facts.py) */
INLINE float nearest_bfloat16(float x) {
  const u32 u = bits(x);
  return unbits((u + (0x7fff + (u >> 16 & 1))) & 0xffff0000u);
}
/* as it is, but a NaN without bits that bfloat16 has not */
INLINE float short_nan(float x) { return x != x ? __builtin_nanf("") : x; }
INLINE float round_float16(float x) {
  const u32 sign = bits(x) & 0x80000000u, u = bits(x) & 0x7fffffff;
  const u32 normal = (u + 0xfff + (u >> 13 & 1)) & 0xffffe000u;
  const u32 tiny = bits((unbits(u < 0x38800000u ? u : 0u) + 0.5f) - 0.5f);
  const u32 finite = u < 0x38800000u ? tiny : normal >= 0x47800000u ? 0x7f800000u : normal;
  return unbits(sign | (x != x ? (u & 0xffffe000u) | 0x400000u : finite));
}
template <class T> INLINE float to_bfloat16(T x) { return round_bfloat16((float)x); }
template <class T> INLINE float to_float16(T x) { return round_float16((float)x); }
INLINE float to_bfloat16(bool x) { return to_float32(x); } /* nothing to round */
INLINE float to_float16(bool x) { return to_float32(x); }

/* arithmetic whose corner cases C leaves open */
template <class T> INLINE T min_(T a, T b) { return a < b || a != a ? a : b; }
template <class T> INLINE T max_(T a, T b) { return a > b || a != a ? a : b; }
/* the same where b is no NaN; of two zeros a, as eager's relu and clamp: one instruction */
INLINE float min_number_(float a, float b) { return b < a ? b : a; }
INLINE float max_number_(float a, float b) { return b > a ? b : a; }
INLINE double min_number_(double a, double b) { return b < a ? b : a; }
INLINE double max_number_(double a, double b) { return b > a ? b : a; }
template <class T> INLINE T abs_(T x) { return x < 0 ? T(-x) : x; }
INLINE uint8 abs_(uint8 x) { return x; }
/* a function of the compiler's for either kind of float */
#define BUILTIN(name, builtin) INLINE float name##_(float x) { return __builtin_##builtin##f(x); } \
  INLINE double name##_(double x) { return __builtin_##builtin(x); }
BUILTIN(abs, fabs) BUILTIN(floor, floor) BUILTIN(ceil, ceil) BUILTIN(trunc, trunc) BUILTIN(round, rint)
BUILTIN(sqrt, sqrt)
template <class T> INLINE T sign_(T x) { return T((0 < x) - (x < 0)); }
template <class T> INLINE T divisor_(T b) { if (b == 0) failure = 1; return b == 0 ? T(1) : b; }
/* the divisor for which the least number's quotient overflows; T(-1) of an unsigned type is its largest number */
template <class T> INLINE bool is_minus_one_(T b) { return T(-1) < 0 && b == T(-1); }
template <class T> INLINE T truncdiv_(T a, T b) { b = divisor_(b); return is_minus_one_(b) ? T(-a) : T(a / b); }
template <class T> INLINE T fmod_(T a, T b) { b = divisor_(b); return is_minus_one_(b) ? T(0) : T(a % b); }
/* towards -inf, by a positive number: ~(~a / b) where a is negative. 64 bits take longer than 32 */
template <class T> INLINE T floor_by(T a, T b) {
  const T sign = a < 0 ? T(-1) : T(0), rest = T(a ^ sign);
  const bool small = sizeof(T) == 8 && !__builtin_constant_p(b) && (u64(rest) | u64(b)) >> 32 == 0;
  return T((small ? T(u32(rest) / u32(b)) : T(rest / b)) ^ sign);
}
template <class T> INLINE T mod_(T a, T b) {
  if (b > 0) return T(a - floor_by(a, b) * b);
  const T r = fmod_(a, b);
  return r > 0 ? T(r + b) : r;
}
template <class T> INLINE T floordiv_(T a, T b) {
  if (b > 0) return floor_by(a, b);
  const T q = truncdiv_(a, b), r = fmod_(a, b);
  return T(q - (r > 0));
}
template <class T> INLINE T pow_(T a, T b) {
  if (b < 0) return a == T(1) ? T(1) : is_minus_one_(a) ? (b % 2 ? T(-1) : T(1)) : T(0);
  T result = 1;
  for (; b; b /= 2, a = T(a * a)) if (b % 2) result = T(result * a);
  return result;
}
/* no quotient overflows: of signed numbers only the least stays negative in abs_, and its remainders are no -1 then */
template <class T> INLINE T gcd_(T a, T b) {
  a = abs_(a), b = abs_(b);
  while (b) { const T r = T(a % b); a = b; b = r; }
  return a;
}
INLINE float fmod_(float a, float b) { return __builtin_fmodf(a, b); }
INLINE double fmod_(double a, double b);
template <class F> INLINE F mod_float(F a, F b) {
  const F r = fmod_(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
INLINE float mod_(float a, float b) { return mod_float(a, b); }
INLINE double mod_(double a, double b) { return mod_float(a, b); }
template <class F> INLINE F floordiv_float(F a, F b) {
  const F r = fmod_(a, b), q = (a - r) / b - F(r != 0 && (b < 0) != (r < 0)), whole = floor_(q);
  const F exact = a / b; /* where q is 0, a / b is small, and times 0 a zero of its sign */
  return b == 0 ? exact : q == 0 ? exact * 0 : q - whole > F(0.5) ? whole + 1 : whole;
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
INLINE bool isinf_(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
INLINE bool isinf_(double x) { return __builtin_fabs(x) == __builtin_inf(); }
/* functions of the library's */
#define LIBM(name, builtin) INLINE double name##_(double x) { return __builtin_##builtin(x); }
#define LIBM1(name, builtin) INLINE float name##_(float x) { return __builtin_##builtin##f(x); }
"""

PRELUDE = _BASE + FLOAT8_PRELUDE + SIMD + PHILOX + MATH_F64 + MATH_F32 + MATH_F32_RARE
