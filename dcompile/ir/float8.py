"""Floats of 8 bits, in NumPy: what number a byte is, and which byte a number becomes.

Loops hold such values as their bytes: they load, store and cast them, casts by way of float32, as ATen's do. What is
too large becomes NaN, or infinity in float8_e5m2, which has one; where ATen saturates, lowering bounds numbers first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
"""Those that are numbers to loops."""
OPAQUE = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
"""Those that are bytes to loops, which copy them and nothing more."""
BYTES = frozenset((*FLOAT8, *OPAQUE))
"""Dtypes whose values are held as bytes."""
MAX_E4M3FN = 448.0
"""The largest number of float8_e4m3fn."""

_FRACTION = {"float8_e4m3fn": 3, "float8_e5m2": 2}
_BIAS = {"float8_e4m3fn": 7, "float8_e5m2": 15}
_OVERFLOW = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
"""The byte of what is too large, without its sign."""
_NAN = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7D}
"""The least byte of a NaN, without its sign."""


def to_bytes(x: Array, dtype: str) -> Array:
    """The bytes of the nearest numbers of a dtype to those of a float32 array, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if dtype == "float8_e8m0fnu":
        return _to_exponents(magnitude)
    fraction, bias = _FRACTION[dtype], _BIAS[dtype]
    small = magnitude < np.uint32((128 - bias) << 23)  # what has fewer digits
    # adding a number whose last digit is the dtype's least rounds to that
    least = np.uint32((151 - bias - fraction) << 23)
    tiny = (np.where(small, magnitude, np.uint32(0)).view(np.float32) + least.view(np.float32)).view(np.uint32) - least
    normal = np.where(small, np.uint32(0), magnitude) - np.uint32((127 - bias) << 23)
    found = np.where(small, tiny, _round_bits(normal, 23 - fraction))
    found = np.minimum(found, np.uint32(_OVERFLOW[dtype]))
    found = np.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7F), found)
    raw: Array = (found | ((bits >> np.uint32(24)) & np.uint32(0x80))).astype(np.uint8)
    return raw


def _round_bits(magnitude: Array, digits: int) -> Array:
    """Without so many binary digits at the end: to the nearest, ties to even."""
    odd = (magnitude >> np.uint32(digits)) & np.uint32(1)
    found: Array = (magnitude + odd + np.uint32((1 << (digits - 1)) - 1)) >> np.uint32(digits)
    return found


def _to_exponents(magnitude: Array) -> Array:
    """The nearest powers of two; signs are dropped, and halfway goes up, but for the least number."""
    exponent, fraction = magnitude >> np.uint32(23), magnitude & np.uint32(0x7FFFFF)
    half = np.uint32(0x400000)
    up = (fraction > half) | ((fraction == half) & (exponent > 0))
    return np.where(exponent == 255, exponent, exponent + up).astype(np.uint8)


def from_bytes(raw: Array, dtype: str) -> Array:
    """The float32 of each number given by its byte."""
    wide = np.asarray(raw, np.uint8).astype(np.uint32)
    if dtype == "float8_e8m0fnu":
        bits = np.where(wide == 0, np.uint32(0x400000), wide << np.uint32(23))
        bits = np.where(wide == 255, np.uint32(0x7F800001), bits)
        return bits.view(np.float32)
    fraction, bias, magnitude = _FRACTION[dtype], _BIAS[dtype], wide & np.uint32(0x7F)
    tiny = magnitude.astype(np.float32) * np.float32(2.0 ** (1 - bias - fraction))
    normal = (magnitude << np.uint32(23 - fraction)) + np.uint32((127 - bias) << 23)
    bits = np.where(magnitude < np.uint32(1 << fraction), tiny.view(np.uint32), normal)
    if dtype == "float8_e5m2":
        bits = np.where(magnitude == np.uint32(0x7C), np.uint32(0x7F800000), bits)
    bits = np.where(magnitude >= np.uint32(_NAN[dtype]), normal | np.uint32(0x7FC00000), bits)
    numbers: Array = (bits | ((wide & np.uint32(0x80)) << np.uint32(24))).view(np.float32)
    return numbers
