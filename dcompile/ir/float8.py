"""Conversions between 8-bit floats, held as bytes, and float32, in NumPy.

Loops hold such values as bytes: they load, store and cast them. Casts go through float32, like ATen's. Too large
numbers become NaN, or infinity in float8_e5m2, which has one. Where ATen saturates, lowering clamps numbers first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
"""Dtypes that loops can cast."""
OPAQUE = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")
"""Dtypes that loops only copy as bytes."""
BYTES = frozenset((*FLOAT8, *OPAQUE))
"""Dtypes whose values are held as bytes."""
MAX_FLOAT8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Largest number of each dtype that has a sign."""

_FRACTION = {"float8_e4m3fn": 3, "float8_e5m2": 2}
_BIAS = {"float8_e4m3fn": 7, "float8_e5m2": 15}
_OVERFLOW = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
"""Byte of a number that is too large, without its sign."""
_NAN = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7D}
"""Smallest byte of a NaN, without its sign."""


def to_bytes(x: Array, dtype: str) -> Array:
    """Round a float32 array to a dtype's nearest numbers, ties to even, and return their bytes."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if dtype == "float8_e8m0fnu":
        return _to_exponents(magnitude)
    fraction, bias = _FRACTION[dtype], _BIAS[dtype]
    small = magnitude < np.uint32((128 - bias) << 23)  # subnormal numbers, with fewer digits
    # adding a number whose last digit is the dtype's smallest step rounds to that step
    least = np.uint32((151 - bias - fraction) << 23)
    tiny = (np.where(small, magnitude, np.uint32(0)).view(np.float32) + least.view(np.float32)).view(np.uint32) - least
    normal = np.where(small, np.uint32(0), magnitude) - np.uint32((127 - bias) << 23)
    found = np.where(small, tiny, _round_bits(normal, 23 - fraction))
    found = np.minimum(found, np.uint32(_OVERFLOW[dtype]))
    found = np.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7F), found)
    raw: Array = (found | ((bits >> np.uint32(24)) & np.uint32(0x80))).astype(np.uint8)
    return raw


def _round_bits(magnitude: Array, digits: int) -> Array:
    """Round away the last `digits` binary digits: to nearest, ties to even."""
    odd = (magnitude >> np.uint32(digits)) & np.uint32(1)
    found: Array = (magnitude + odd + np.uint32((1 << (digits - 1)) - 1)) >> np.uint32(digits)
    return found


def _to_exponents(magnitude: Array) -> Array:
    """Round to the nearest powers of two. Signs are dropped; a tie rounds up, except for the smallest number."""
    exponent, fraction = magnitude >> np.uint32(23), magnitude & np.uint32(0x7FFFFF)
    half = np.uint32(0x400000)
    up = (fraction > half) | ((fraction == half) & (exponent > 0))
    return np.where(exponent == 255, exponent, exponent + up).astype(np.uint8)


def from_bytes(raw: Array, dtype: str) -> Array:
    """Convert bytes of a dtype to float32."""
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
