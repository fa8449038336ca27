"""8-bit floats in C++: kernels hold them as bytes, as loops do, and convert them through float32.

The code is integer arithmetic and selects, which g++ vectorizes. It uses no conversion instructions, since few
processors have them.
"""

from __future__ import annotations

from dcompile.ir.float8 import FLOAT8

FLOAT8_PRELUDE = r"""
typedef uint8 float8_e4m3fn; typedef uint8 float8_e5m2; typedef uint8 float8_e8m0fnu;
typedef uint8 float8_e4m3fnuz; typedef uint8 float8_e5m2fnuz; typedef uint8 float4_e2m1fn_x2;
/* what has fewer digits than others is rounded by adding a number whose last digit is the least one */
INLINE uint8 nearest_float8_e4m3fn(float x) {
  const int32 sign = int32(bits(x) >> 24 & 0x80), u = int32(bits(x) & 0x7fffffff);
  const int32 tiny = int32(bits(unbits(u32(u < 121 << 23 ? u : 0)) + 16384.f)) - (141 << 23);
  const int32 normal = (u - (120 << 23) + 0x7ffff + (u >> 20 & 1)) >> 20, found = u < 121 << 23 ? tiny : normal;
  return uint8(sign | (found < 0x7f ? found : 0x7f));
}
INLINE uint8 nearest_float8_e5m2(float x) {
  const int32 sign = int32(bits(x) >> 24 & 0x80), u = int32(bits(x) & 0x7fffffff);
  const int32 tiny = int32(bits(unbits(u32(u < 113 << 23 ? u : 0)) + 128.f)) - (134 << 23);
  const int32 normal = (u - (112 << 23) + 0xfffff + (u >> 21 & 1)) >> 21, found = u < 113 << 23 ? tiny : normal;
  return uint8(sign | (found < 0x7c ? found : 0x7c) | (u > 0x7f800000 ? 0x7f : 0));
}
/* powers of two: no sign, and halfway goes up, but for the least number */
INLINE uint8 nearest_float8_e8m0fnu(float x) {
  const u32 u = bits(x) & 0x7fffffff, rounded = (u + (u < 1u << 23 ? 0x3fffffu : 0x400000u)) >> 23;
  return uint8(u >= 0x7f800000u ? 0xffu : rounded);
}
INLINE float from_float8_e4m3fn(uint8 x) {
  const u32 u = x & 0x7f, normal = u == 0x7f ? 0x7ff00000u : (u << 20) + (120u << 23);
  return unbits((u < 8 ? bits(float(int32(u)) * 0x1p-9f) : normal) | u32(x & 0x80) << 24);
}
INLINE float from_float8_e5m2(uint8 x) {
  const u32 u = x & 0x7f, special = u > 0x7c ? 0x7fc00000u : u == 0x7c ? 0x7f800000u : 0u;
  const u32 normal = ((u << 21) + (112u << 23)) | special;
  return unbits((u < 4 ? bits(float(int32(u)) * 0x1p-16f) : normal) | u32(x & 0x80) << 24);
}
INLINE float from_float8_e8m0fnu(uint8 x) {
  return unbits(x == 0 ? 0x400000u : x == 0xff ? 0x7f800001u : u32(x) << 23);
}
template <class T> INLINE uint8 to_float8_e4m3fn(T x) { return nearest_float8_e4m3fn((float)x); }
template <class T> INLINE uint8 to_float8_e5m2(T x) { return nearest_float8_e5m2((float)x); }
template <class T> INLINE uint8 to_float8_e8m0fnu(T x) { return nearest_float8_e8m0fnu((float)x); }
"""


def decoded(text: str, dtype: str) -> str:
    """Return a cast's operand as kernels of either language write it: the decoded number for a byte, else the value."""
    return f"from_{dtype}({text})" if dtype in FLOAT8 else text
