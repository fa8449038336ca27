"""The functions that the text of a Triton kernel includes.

A kernel is a separate file, and the functions it uses are copied into it. They compute as eager's CUDA kernels do:
division and square root are correctly rounded, the rest is CUDA's own library, without flushing denormals.

Kernels hold 8-bit floats as bytes, as loops do, and convert them through float32. From compute capability 8.9 on, GPUs
have instructions for it. They saturate, and drop a NaN's sign, so results for large numbers and NaN are corrected.
Clamped numbers need no correction: clamping drops that sign, too. Elsewhere, and in Triton's interpreter, the code is
integer arithmetic: 13 instructions an element for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, reduce

INSTRUCTIONS = "has_instructions: tl.constexpr = "
"""Start of the lines in which the worker writes True in place of False for GPUs with such instructions."""

_FLOAT8_FUNCTIONS = r"""
@triton.jit
def pack_bytes(a, b, c, d):
    low = a.to(tl.uint8).to(tl.int32) | (b.to(tl.uint8).to(tl.int32) << 8)
    return low | (c.to(tl.uint8).to(tl.int32) << 16) | (d.to(tl.uint8).to(tl.int32) << 24)


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
"""
"""Conversions of 8-bit floats."""

_FLOAT8_FORMAT = r'''
@triton.jit
def pack_NAME(a, b, c, d):
    has_instructions: tl.constexpr = False
    if has_instructions:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; cvt.rn.satfinite.INSTRUCTION.f32 low, $2, $1;
            cvt.rn.satfinite.INSTRUCTION.f32 high, $4, $3; mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f", [a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)],
            dtype=tl.int32, is_pure=True, pack=1,
        )
    else:
        first, second = integers_to_NAME(a), integers_to_NAME(b)
        return pack_bytes(first, second, integers_to_NAME(c), integers_to_NAME(d))


@triton.jit
def clamped_to_NAME(a):
    has_instructions: tl.constexpr = False
    if has_instructions:
        return a.to(tl.float32).to(tl.TYPE).to(tl.uint8, bitcast=True)
    else:
        return integers_to_NAME(a)


@triton.jit
def to_NAME(a):
    has_instructions: tl.constexpr = False
    if has_instructions:
        number = a.to(tl.float32)
        other = ((number.to(tl.int32, bitcast=True) >> 24) & 0x80) | BEYOND
        return tl.where(tl.abs(number) INSIDE, clamped_to_NAME(number), other.to(tl.uint8))
    else:
        return integers_to_NAME(a)


@triton.jit
def integers_to_NAME(a):
    u = a.to(tl.float32).to(tl.int32, bitcast=True)
    sign, u = (u >> 24) & 0x80, u & 0x7FFFFFFF
    tiny = (tl.where(u < LEAST, u, 0).to(tl.float32, bitcast=True) + ADDED).to(tl.int32, bitcast=True)
    normal = (u - SCALE + HALF + ((u >> BITS) & 1)) >> BITS
    found = tl.where(u < LEAST, tiny - TAKEN, normal)
    NAN
    return (FOUND | sign).to(tl.uint8)
'''
"""Conversions to a format; words in capitals are columns of `_FLOAT8_FORMATS`."""
_FLOAT8_FORMATS = (
    {"NAME": "float8_e4m3fn", "INSTRUCTION": "e4m3x2", "TYPE": "float8e4nv", "BEYOND": "0x7F", "INSIDE": "<= 464.0",
     "LEAST": "0x3C800000", "TAKEN": "0x46800000", "ADDED": "16384.0", "SCALE": "0x3C000000", "HALF": "0x7FFFF",
     "BITS": "20", "    NAN\n": "", "FOUND": "tl.minimum(found, 0x7F)"},
    {"NAME": "float8_e5m2", "INSTRUCTION": "e5m2x2", "TYPE": "float8e5", "INSIDE": "< 61440.0",
     "BEYOND": "tl.where(number == number, 0x7C, 0x7F)", "LEAST": "0x38800000", "TAKEN": "0x43000000",
     "ADDED": "128.0", "SCALE": "0x38000000", "HALF": "0xFFFFF", "BITS": "21",
     "NAN": "found = tl.where(u > 0x7F800000, 0x7F, tl.minimum(found, 0x7C))", "FOUND": "found"},
)  # fmt: skip


HEADER = """\
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice
"""

AFTER = "after_others_()"
"""Call by which a kernel that starts early waits for the previous one, before it touches memory that others write.

This is programmatic dependent launch, from compute capability 9.0 on. For other GPUs the worker removes the line, and
the kernel starts in its turn. It waits until the one before has ended, which has waited for its own predecessor. So
behind this line all earlier kernels have ended.

A kernel lets its successor start at this line, either behind its wait or in front of it. Without the line it does so
at its end. The first kernel of a program does it behind: memory that the program itself does not write may be written
by the previous program, which has ended then. `horizontal_fusion` says which others do it in front.
"""
WAIT_FIRST = """\
def after_others_():
    gdc_wait()
    gdc_launch_dependents()
"""
START_NEXT_FIRST = """\
def after_others_():
    gdc_launch_dependents()
    gdc_wait()
"""
"""The two forms of the function. In the second form, a successor that reads weights does so beside two kernels."""

PREFETCH = "prefetch_"
"""Function by which a kernel that starts early asks for constant memory: `prefetch_(addresses, bytes, mask)` brings so
many bytes from each address into the L2 cache. It exists from compute capability 9.0 on, like early starts.
"""

_FUNCTIONS = """
@triton.jit
def div_(a, b):
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def share_(a, b):
    # a / b for exponentials and their sum of at least 1, with one reciprocal for a row: no overflow, no zero divisor;
    # quotients below 2 ** -102 may be off by one unit in the last place
    r = tl.div_rn(tl.full([], 1.0, tl.float32), b)
    q = a * r
    return tl.fma(r, tl.fma(-b, q, a), q)


@triton.jit
def reciprocal_(a):
    return div_(tl.full(a.shape, 1.0, a.dtype), a)


@triton.jit
def sqrt_(a):
    if a.dtype == tl.float32:
        return tl.sqrt_rn(a)
    else:
        return libdevice.sqrt(a)


@triton.jit
def sigmoid_(a):
    return reciprocal_(1.0 + libdevice.exp(-a))


@triton.jit
def fmod_(a, b):
    if a.dtype.is_floating():
        return libdevice.fmod(a, b)
    else:
        return a % b


@triton.jit
def mod_(a, b):
    r = fmod_(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floordiv_(a, b):
    if a.dtype.is_floating():
        r = libdevice.fmod(a, b)
        q = div_(a - r, b)
        q = tl.where((r != 0) & ((b < 0) != (r < 0)), q - 1.0, q)
        whole = libdevice.floor(q)
        whole = tl.where(q - whole > 0.5, whole + 1.0, whole)
        exact = div_(a, b)  # where q is 0, it is small, and times 0 a zero of its sign
        return tl.where(b == 0, exact, tl.where(q == 0, exact * 0.0, whole))
    else:
        r = a % b
        return a // b - ((r != 0) & ((r < 0) != (b < 0))).to(a.dtype)


@triton.jit
def min_(a, b):
    if a.dtype.is_floating():
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif a.dtype == tl.int1:
        return a & b
    else:
        return tl.minimum(a, b)


@triton.jit
def max_(a, b):
    if a.dtype.is_floating():
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif a.dtype == tl.int1:
        return a | b
    else:
        return tl.maximum(a, b)


@triton.jit
def pow_(a, b):
    if a.dtype.is_floating():
        return libdevice.pow(a, b)
    else:
        a, b = tl.broadcast(a, b)  # one of them may be a single number: in a loop, shapes stay
        left = tl.where(b < 0, 0, b).to(a.dtype)
        base = a
        result = tl.full(a.shape, 1, a.dtype)
        for _ in range(a.dtype.primitive_bitwidth):
            result = tl.where(left & 1 != 0, result * base, result).to(a.dtype)
            base = (base * base).to(a.dtype)
            left = left >> 1
        if a.dtype.is_int_signed():  # unsigned numbers have no negative powers, and no -1
            inverse = tl.where(a == 1, 1, tl.where(a == -1, tl.where(b & 1 != 0, -1, 1), 0)).to(a.dtype)
            result = tl.where(b < 0, inverse, result)
        return result


@triton.jit
def gcd_(a, b):
    a, b = tl.broadcast(tl.abs(a), tl.abs(b))
    for _ in range(92):  # Euclid's steps for 64 bits: Fibonacci numbers take the most
        rest = tl.where(b != 0, a % tl.where(b != 0, b, 1), 0).to(a.dtype)
        a = tl.where(b != 0, b, a)
        b = rest
    return a


@triton.jit
def logaddexp_(a, b):
    larger, smaller = max_(a, b), min_(a, b)
    apart = larger + libdevice.log1p(libdevice.exp(smaller - larger))
    return tl.where((a == b) & (tl.abs(a) == float("inf")), a, apart)


@triton.jit
def online_(s, m, h, e):
    # sums of exponentials below m become such below h, and those of e join them; the fast exponential, in which a term
    # is off by 6e-8 of itself for each unit that it lies below the largest
    low = tl.where(h == float("-inf"), 0.0, h)  # nothing so far: nothing to add
    return s * tl.exp(m - low) + tl.sum(tl.exp(e - low[:, None]), 1)


@triton.jit
def philox_(key, position, draw):
    # Philox4x32-10, as ir/philox.py
    k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32 & 0xFFFFFFFF).to(tl.uint32)
    a, b = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32 & 0xFFFFFFFF).to(tl.uint32)
    c, d = (draw >> 2 & 0xFFFFFFFF).to(tl.uint32), (draw >> 34 & 0xFFFFFFFF).to(tl.uint32)
    first, second = tl.full([], 0xD2511F53, tl.uint32), tl.full([], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        was_a, was_c = a, c
        a = tl.umulhi(was_c, second) ^ b ^ k0
        b = was_c * second
        c = tl.umulhi(was_a, first) ^ d ^ k1
        d = was_a * first
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    word = draw & 3
    chosen = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    return chosen.to(tl.int32, bitcast=True)


@triton.jit
def after_others_():
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def prefetch_(p, n, inside):
    tl.inline_asm_elementwise(
        "{ .reg .pred q; setp.ne.b32 q, $3, 0; @q cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [p, tl.full([], n, tl.int32), inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def quotient_(a, n):
    if a.dtype == tl.int64:
        return (a.to(tl.uint64) // n).to(tl.int64)
    else:
        return (a.to(tl.uint32) // n).to(tl.int32)


@triton.jit
def remainder_(a, n):
    if a.dtype == tl.int64:
        return (a.to(tl.uint64) % n).to(tl.int64)
    else:
        return (a.to(tl.uint32) % n).to(tl.int32)


@triton.jit
def mul_(a, b):
    return a * b


@triton.jit
def neg_(a):
    # -a is 0 - a to Triton, which is +0 where a is
    if a.dtype.is_floating():
        return a * -1.0
    else:
        return -a


@triton.jit
def sign_(a):
    return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)


@triton.jit
def isinf_(a):
    return tl.abs(a) == float("inf")


@triton.jit
def signbit_(a):
    if a.dtype == tl.float32:
        return a.to(tl.int32, bitcast=True) < 0
    else:
        return a.to(tl.int64, bitcast=True) < 0


@triton.jit
def raised_(a):
    # denormals made larger, so that they have all digits
    if a.dtype == tl.float32:
        return tl.where(tl.abs(a) < 1.1754943508222875e-38, a * 4294967296.0, a).to(tl.int32, bitcast=True)
    else:
        return tl.where(tl.abs(a) < 2.2250738585072014e-308, a * 1152921504606846976.0, a).to(tl.int64, bitcast=True)


@triton.jit
def exponent_(a):
    if a.dtype == tl.float32:
        above = raised_(a) >> 23 & 255
        found = above - tl.where(tl.abs(a) < 1.1754943508222875e-38, 158, 126)
    else:
        above = raised_(a) >> 52 & 2047
        found = above - tl.where(tl.abs(a) < 2.2250738585072014e-308, 1082, 1022)
    return tl.where((a == 0) | (a - a != 0), 0, found).to(tl.int32)


@triton.jit
def mantissa_(a):
    if a.dtype == tl.float32:
        found = (raised_(a) & ~(255 << 23) | 126 << 23).to(tl.float32, bitcast=True)
    else:
        found = (raised_(a) & ~(2047 << 52) | 1022 << 52).to(tl.float64, bitcast=True)
    return tl.where((a == 0) | (a - a != 0), a, found)


@triton.jit
def not_(a):
    if a.dtype == tl.int1:
        return a == 0
    else:
        return ~a


@triton.jit
def within_(x, low, high):
    # a library call before has found what lies outside (lower/rules/indexing.py), but for functions of FlexAttention
    return tl.where((x >= low) & (x < high), x, 0)


@triton.jit
def shl_(a, b):
    inside = (b >= 0) & (b < a.dtype.primitive_bitwidth)
    return tl.where(inside, a << tl.where(inside, b, 0), 0).to(a.dtype)


@triton.jit
def shr_(a, b):
    most = a.dtype.primitive_bitwidth - 1
    inside = (b >= 0) & (b <= most)
    beyond = tl.where(a < 0, -1, 0).to(a.dtype)
    return tl.where(inside, a >> tl.where(inside, b, 0).to(a.dtype), beyond)


@triton.jit
def to_bool(a):
    return a != 0
"""


_CAST = """
@triton.jit
def to_{0}(a):
    return a{1}.to(tl.{0}){1}
"""
_SHORT_CAST = """
@triton.jit
def to_{0}(a):
    if a.dtype.is_floating():
        return a.to(tl.{1}).to(tl.{0})
    else:
        return a.to(tl.{0})
"""


@lru_cache(maxsize=1)
def functions() -> Mapping[str, str]:
    """Return name -> text of each function that kernels may use."""
    whole = _FUNCTIONS + _FLOAT8_FUNCTIONS
    whole += "".join(_CAST.format(dtype, "") for dtype in ("int32", "int64", "float32", "float64"))
    whole += "".join(_CAST.format(dtype, ".to(tl.float32)") for dtype in ("bfloat16", "float16"))
    whole += "".join(_SHORT_CAST.format(*pair) for pair in (("uint8", "int64"), ("int8", "int32"), ("int16", "int32")))
    for words in _FLOAT8_FORMATS:
        whole += reduce(lambda text, word: text.replace(*word), words.items(), _FLOAT8_FORMAT)
    texts = [f"@triton.jit{text.rstrip()}\n" for text in whole.split("@triton.jit")[1:]]
    return {text.split("def ", 1)[1].split("(", 1)[0]: text for text in texts}


def used_functions(text: str) -> str:
    """Return the functions that `text` calls, directly or indirectly, each after those that it needs."""
    found: dict[str, str] = {}

    def visit(where: str) -> None:
        for name in re.findall(r"\b([a-z]\w*)\b", where):
            if name in functions() and name not in found and functions()[name] is not where:
                visit(functions()[name])
                found.setdefault(name, functions()[name])

    visit(text)
    return "\n\n".join(found.values())
