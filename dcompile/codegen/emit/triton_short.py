"""What Triton kernels do with values that bfloat16 holds, in PTX: two or four at a time, with eager's bits.

Left to Triton, a rounding is an instruction of its own for each element, on the unit that also serves divisions and
roots, at an eighth of the others' rate; and a division or a root ends in a branch, one after another. AdamW of bfloat16
(6 roundings, 3 divisions and a root that count) waited for that unit longer than for memory: 13 of its 79 instructions
for an element went there, now 2.5 of 65 (sm_90, Triton 3.6).

A quotient of numbers of 8 bits, or of 8 bits by 24, is right after one correction of an approximate one: all of them
were tried. Where an exponent is out of the range in which that holds, the four are divided as usual.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dcompile.ir.analysis import operands, store_operands
from dcompile.ir.nodes import Apply, Ref, Store, Value

PAIR = 2
FOUR = 4
_ROUND = "cvt.rn.bf16x2.f32 t, {1}, {0}; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;"
_LARGEST = 120
"""Exponent of a quotient above which something may have overflowed; there is no telling where from."""


def _power(exponent: int) -> str:
    """A power of two, as a constant of PTX."""
    return f"0f{exponent + 127 << 23:08X}"


def _below(exponent: int) -> int:
    """Where the numbers below a power of two end if they are compared as 2 * bits - 1: zero is the largest so."""
    return 2 * (exponent + 127 << 23) - 1


def _quotients(by_one: bool) -> str:
    """Four quotients; `by_one` number, whose reciprocal is given too, and is no number where that is out of range.

    The remainder has to be exact, and the quotient no denormal number: for divisors of 24 bits between 2^-60 and 2^60,
    for numerators of at least 2^-64; for divisors of 8 bits between 2^-28 and 2^28, for numerators of at least 2^-97.
    """
    lines = ["{ .reg .pred p; .reg .f32 q, e, r; .reg .b32 u;"]
    for n in range(FOUR):
        a, b, r = f"${FOUR + n}", f"${2 * FOUR + n}", f"${3 * FOUR + n}" if by_one else "r"
        lines.append(f"shl.b32 u, {a}, 1; sub.u32 u, u, 1;")
        least = _below(-64 if by_one else -97)
        lines.append(f"setp.lt.or.u32 p, u, {least}, p;" if n else f"setp.lt.u32 p, u, {least};")
        if not by_one:
            lines.append(f"abs.f32 e, {b}; setp.lt.or.f32 p, e, {_power(-28)}, p;")
            lines.append(f"setp.gtu.or.f32 p, e, {_power(28)}, p; rcp.approx.ftz.f32 r, {b};")
        lines.append(f"mul.rn.f32 q, {a}, {r}; neg.f32 e, q; fma.rn.f32 e, e, {b}, {a}; fma.rn.f32 e, e, {r}, q;")
        lines.append(f"copysign.f32 ${n}, q, e; abs.f32 e, e; setp.gtu.or.f32 p, e, {_power(_LARGEST)}, p;")
    lines.append("@!p bra done;")
    lines += [f"div.rn.f32 ${n}, ${FOUR + n}, ${2 * FOUR + n};" for n in range(FOUR)]
    return " ".join([*lines, "done: }"])


def _call(text: str, outputs: int, inputs: int, given: str, pack: int, read: str = "f") -> str:
    """The expression that runs PTX on every `pack` elements."""
    constraints = ",".join(["=&f"] * outputs + [read] * inputs)
    options = f"dtype=tl.float32, is_pure=True, pack={pack}"
    return f'tl.inline_asm_elementwise(\n        "{text}",\n        "{constraints}", [{given}], {options},\n    )'


FUNCTIONS = f"""
@triton.jit
def round_bfloat16_(a):
    a = a.to(tl.float32)
    return {_call("{ .reg .b32 t; " + _ROUND.format("$2", "$3") + " }", 2, 2, "a", PAIR)}


@triton.jit
def from_bfloat16_(a):
    return {_call("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", 2, 1, "a", PAIR, read="r")}


@triton.jit
def root_bfloat16_(a):
    # an approximate root of 8 bits is rounded to 8 as the right one is: none lies near the middle of two
    return {
    _call(
        "{ .reg .f32 x, y; .reg .b32 t; sqrt.approx.f32 x, $2; sqrt.approx.f32 y, $3; "
        + _ROUND.format("x", "y")
        + " }",
        2,
        2,
        "a",
        PAIR,
    )
}


@triton.jit
def short_div_(a, b):
    # both of 8 bits
    return {_call(_quotients(False), FOUR, 2 * FOUR, "a, b", FOUR)}


@triton.jit
def short_over_(a, b):
    # of 8 bits, by one number
    inside = (tl.abs(b) >= {2.0**-60!r}) & (tl.abs(b) <= {2.0**60!r})
    r = tl.where(inside, tl.div_rn(tl.full([], 1.0, tl.float32), b), float("nan"))
    return {_call(_quotients(True), FOUR, 3 * FOUR, "a, b, r", FOUR)}
"""


def is_short(body: Sequence[Value], ref: Ref) -> bool:
    """Does bfloat16 hold a value?"""
    match body[ref]:
        case Apply("cast", (arg,), "float32"):
            return is_short(body, arg)
        case value:
            return value.dtype == "bfloat16"


def roots(body: Sequence[Value], live: Collection[Ref]) -> dict[Ref, Ref]:
    """Values that are rounded roots of what bfloat16 holds -> what that is."""
    found: dict[Ref, Ref] = {}
    for ref in live:
        match body[ref]:
            case Apply("cast", (root,), "bfloat16"):
                match body[root]:
                    case Apply("sqrt", (arg,), "float32") if is_short(body, arg):
                        found[ref] = arg
    return found


def written(body: Sequence[Value], stores: Sequence[Store], rounded: Mapping[Ref, Ref]) -> dict[Ref, Ref]:
    """Values that are rounded to bfloat16 as they are written, which packs them too -> what they are before."""
    found: dict[Ref, Ref] = {}
    for store in stores:
        match body[store.value]:
            case Apply("cast", (arg,), "bfloat16") if store.mode == "set" and store.value not in rounded:
                found[store.value] = arg
    return found


def unnamed(
    body: Sequence[Value], stores: Sequence[Store], rounded: Mapping[Ref, Ref], rounds: Mapping[Ref, Ref]
) -> frozenset[Ref]:
    """Roots that nothing but their rounding needs, and roundings that nothing but a store does."""
    named = {arg for ref, value in enumerate(body) if ref not in rounded for arg in operands(value)}
    for store in stores:
        named.update(arg for arg in store_operands(store) if arg != store.value or arg not in rounds)
    return frozenset(arg for ref in rounded for arg in operands(body[ref])).union(rounds) - named
