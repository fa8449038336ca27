"""8-bit floats in Triton: kernels hold them as bytes, as loops do, and convert them through float32.

From compute capability 8.9 on, GPUs have instructions for it. They saturate, and drop a NaN's sign, so results for
large numbers and NaN are corrected. Clamped numbers need no correction: clamping drops that sign, too. Elsewhere, and
in Triton's interpreter, the code is integer arithmetic: 13 instructions an element for one.
"""

from __future__ import annotations

INSTRUCTIONS = "has_instructions: tl.constexpr = "
"""Start of the lines in which the worker writes True in place of False for GPUs with such instructions."""

FLOAT8_FUNCTIONS = r'''
@triton.jit
def pack_bytes(a, b, c, d):
    low = a.to(tl.uint8).to(tl.int32) | (b.to(tl.uint8).to(tl.int32) << 8)
    return low | (c.to(tl.uint8).to(tl.int32) << 16) | (d.to(tl.uint8).to(tl.int32) << 24)


@triton.jit
def pack_float8_e4m3fn(a, b, c, d):
    has_instructions: tl.constexpr = False
    if has_instructions:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f", [a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)],
            dtype=tl.int32, is_pure=True, pack=1,
        )
    else:
        first, second = integers_to_float8_e4m3fn(a), integers_to_float8_e4m3fn(b)
        return pack_bytes(first, second, integers_to_float8_e4m3fn(c), integers_to_float8_e4m3fn(d))


@triton.jit
def pack_float8_e5m2(a, b, c, d):
    has_instructions: tl.constexpr = False
    if has_instructions:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f", [a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)],
            dtype=tl.int32, is_pure=True, pack=1,
        )
    else:
        first, second = integers_to_float8_e5m2(a), integers_to_float8_e5m2(b)
        return pack_bytes(first, second, integers_to_float8_e5m2(c), integers_to_float8_e5m2(d))


@triton.jit
def clamped_to_float8_e4m3fn(a):
    has_instructions: tl.constexpr = False
    if has_instructions:
        return a.to(tl.float32).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return integers_to_float8_e4m3fn(a)


@triton.jit
def clamped_to_float8_e5m2(a):
    has_instructions: tl.constexpr = False
    if has_instructions:
        return a.to(tl.float32).to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return integers_to_float8_e5m2(a)


@triton.jit
def to_float8_e4m3fn(a):
    has_instructions: tl.constexpr = False
    if has_instructions:
        number = a.to(tl.float32)
        other = ((number.to(tl.int32, bitcast=True) >> 24) & 0x80) | 0x7F
        return tl.where(tl.abs(number) <= 464.0, clamped_to_float8_e4m3fn(number), other.to(tl.uint8))
    else:
        return integers_to_float8_e4m3fn(a)


@triton.jit
def to_float8_e5m2(a):
    has_instructions: tl.constexpr = False
    if has_instructions:
        number = a.to(tl.float32)
        other = ((number.to(tl.int32, bitcast=True) >> 24) & 0x80) | tl.where(number == number, 0x7C, 0x7F)
        return tl.where(tl.abs(number) < 61440.0, clamped_to_float8_e5m2(number), other.to(tl.uint8))
    else:
        return integers_to_float8_e5m2(a)


@triton.jit
def integers_to_float8_e4m3fn(a):
    u = a.to(tl.float32).to(tl.int32, bitcast=True)
    sign, u = (u >> 24) & 0x80, u & 0x7FFFFFFF
    tiny = (tl.where(u < 0x3C800000, u, 0).to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    normal = (u - 0x3C000000 + 0x7FFFF + ((u >> 20) & 1)) >> 20
    found = tl.where(u < 0x3C800000, tiny - 0x46800000, normal)
    return (tl.minimum(found, 0x7F) | sign).to(tl.uint8)


@triton.jit
def integers_to_float8_e5m2(a):
    u = a.to(tl.float32).to(tl.int32, bitcast=True)
    sign, u = (u >> 24) & 0x80, u & 0x7FFFFFFF
    tiny = (tl.where(u < 0x38800000, u, 0).to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True)
    normal = (u - 0x38000000 + 0xFFFFF + ((u >> 21) & 1)) >> 21
    found = tl.where(u < 0x38800000, tiny - 0x43000000, normal)
    found = tl.where(u > 0x7F800000, 0x7F, tl.minimum(found, 0x7C))
    return (found | sign).to(tl.uint8)


@triton.jit
def to_float8_e8m0fnu(a):
    u = a.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    rounded = (u + tl.where(u < 0x800000, 0x3FFFFF, 0x400000)) >> 23
    return tl.where(u >= 0x7F800000, 0xFF, rounded).to(tl.uint8)


@triton.jit
def from_float8_e4m3fn(a):
    sign, u = (a.to(tl.int32) & 0x80) << 24, a.to(tl.int32) & 0x7F
    tiny = (u.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    normal = tl.where(u == 0x7F, 0x7FF00000, (u << 20) + 0x3C000000)
    return (tl.where(u < 8, tiny, normal) | sign).to(tl.float32, bitcast=True)


@triton.jit
def from_float8_e5m2(a):
    sign, u = (a.to(tl.int32) & 0x80) << 24, a.to(tl.int32) & 0x7F
    tiny = (u.to(tl.float32) * 0.0000152587890625).to(tl.int32, bitcast=True)
    special = tl.where(u > 0x7C, 0x7FC00000, tl.where(u == 0x7C, 0x7F800000, 0))
    normal = ((u << 21) + 0x38000000) | special
    return (tl.where(u < 4, tiny, normal) | sign).to(tl.float32, bitcast=True)


@triton.jit
def from_float8_e8m0fnu(a):
    u = a.to(tl.int32)
    bits = tl.where(u == 0, 0x400000, tl.where(u == 0xFF, 0x7F800001, u << 23))
    return bits.to(tl.float32, bitcast=True)
'''
"""Functions of kernels, in the form of `library.py`."""
