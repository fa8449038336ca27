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
from dataclasses import dataclass, field

from dcompile.ir.analysis import operands, store_operands
from dcompile.ir.nodes import Apply, Load, Ref, Store, Value

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


@dataclass(frozen=True, slots=True)
class Short:
    """Which values of a loop the functions above compute."""

    calls: Mapping[Ref, tuple[str, tuple[Ref, ...]]] = field(default_factory=dict)
    """Value -> function and its arguments."""
    loads: frozenset[Ref] = frozenset()
    """Loads that are made float32 in pairs."""
    written: Mapping[Ref, Ref] = field(default_factory=dict)
    """Values that are rounded to bfloat16 as they are written, which packs them too -> what they are before."""
    unnamed: frozenset[Ref] = frozenset()
    """Roots that nothing but their rounding needs, and roundings that nothing but a store does."""


def short(body: Sequence[Value], stores: Sequence[Store], tiles: Collection[Ref]) -> Short:
    """What to write so, of a loop of which `tiles` are the values that are needed and are no scalars to Triton.

    Beside divisions and roots alone: else Triton multiplies pairs as they are, in half the registers (SwiGLU's backward
    154 us for 188, RMSNorm 31.8 for 32.5; H200).
    """
    roots = {ref: ("root_bfloat16_", (arg,)) for ref in tiles if (arg := _rooted(body, ref)) is not None}
    quotients = {ref: (name, operands(body[ref])) for ref in tiles if (name := _quotient(body, ref, tiles))}
    if not roots and not quotients:
        return Short()
    rounded = {
        ref: ("round_bfloat16_", operands(body[ref])) for ref in tiles if _is_rounded(body[ref]) and ref not in roots
    }
    stored = {store.value for store in stores}
    loads = {ref for ref in tiles if isinstance(body[ref], Load) and body[ref].dtype == "bfloat16"} - stored
    written = {
        store.value: operands(body[store.value])[0]
        for store in stores
        if store.mode == "set" and store.value not in roots and _is_rounded(body[store.value])
    }
    unnamed = _unnamed(body, stores, frozenset(roots), written)
    return Short({**rounded, **roots, **quotients}, frozenset(loads), written, unnamed)


def is_short(body: Sequence[Value], ref: Ref) -> bool:
    """Does bfloat16 hold a value?"""
    match body[ref]:
        case Apply("cast", (arg,), "float32"):
            return is_short(body, arg)
        case value:
            return value.dtype == "bfloat16"


def _is_rounded(value: Value) -> bool:
    return isinstance(value, Apply) and value.op == "cast" and value.dtype == "bfloat16"


def _rooted(body: Sequence[Value], ref: Ref) -> Ref | None:
    """What bfloat16 holds and a value is the rounded root of."""
    match body[ref]:
        case Apply("cast", (root,), "bfloat16"):
            match body[root]:
                case Apply("sqrt", (arg,), "float32") if is_short(body, arg):
                    return arg
    return None


def _quotient(body: Sequence[Value], ref: Ref, tiles: Collection[Ref]) -> str:
    """The function that divides what bfloat16 holds by such, or by one number; none for another value."""
    match body[ref]:
        case Apply("div", (a, b), "float32") if a in tiles and is_short(body, a):
            if b not in tiles:
                return "short_over_"
            return "short_div_" if is_short(body, b) else ""
    return ""


def _unnamed(
    body: Sequence[Value], stores: Sequence[Store], roots: frozenset[Ref], written: Mapping[Ref, Ref]
) -> frozenset[Ref]:
    named = {arg for ref, value in enumerate(body) if ref not in roots for arg in operands(value)}
    for store in stores:
        named.update(arg for arg in store_operands(store) if arg != store.value or arg not in written)
    return frozenset(arg for ref in roots for arg in operands(body[ref])).union(written) - named
