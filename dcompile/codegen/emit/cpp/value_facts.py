"""Facts about values that shorten loops: int32 counters, NaNs that survive rounding, exactly representable values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dcompile.ir.analysis import operands
from dcompile.ir.index import var
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Reduce, Ref, Scan, Store, Value
from dcompile.ir.ops import DTYPES, OPS


def short_nans(body: tuple[Value, ...], made: frozenset[Ref] = frozenset()) -> frozenset[Ref]:
    """Return float values whose NaNs, if any, have no bits beyond those of bfloat16; `made`: values assumed to be such.

    These are bfloat16 loads, results of arithmetic, and values that it passes on. Rounding adds to the lower half and
    carries. Without bits there nothing is carried, and a NaN needs no care: 5 instructions rather than 8.
    """
    short: set[Ref] = set()
    for ref, value in enumerate(body):
        match value:
            case Load(_, _, dtype, _):
                known = ref in made or dtype == "bfloat16" or DTYPES[dtype] != "float"
            case Apply("cast", (arg,), dtype):
                known = arg in short or dtype == "bfloat16" or DTYPES[body[arg].dtype] != "float"
            case Apply(op, args, _):
                known = OPS[op].keeps_nan and all(arg in short for arg in args)
            case Reduce(_, arg, _) | Scan(_, arg, _):
                known = arg in short
            case Const() | IndexOf():
                known = True
        if known:
            short.add(ref)
    return frozenset(short)


def to_shorten(body: tuple[Value, ...], element: tuple[bool, ...], stores: Iterable[Store]) -> frozenset[Ref]:
    """Return float32 row loads whose NaN is shortened at the load, so that rounding their elements needs no care.

    None that is stored unchanged.
    """
    stored = {store.value for store in stores}
    read = frozenset(
        ref
        for ref, value in enumerate(body)
        if isinstance(value, Load) and value.dtype == "float32" and not element[ref] and ref not in stored
    )
    gained = short_nans(body, read) - short_nans(body) if read else frozenset[Ref]()
    rounded = (
        value.args[0]
        for ref, value in enumerate(body)
        if element[ref] and isinstance(value, Apply) and (value.op, value.dtype) == ("cast", "bfloat16")
    )
    return read if any(arg in gained for arg in rounded) else frozenset()


def round_values(body: tuple[Value, ...], narrow: str) -> frozenset[Ref]:
    """Return float values that bfloat16 or float16 represents exactly: rounding to it changes nothing.

    These are loaded or rounded values, and selections among them: a ReLU of a rounded sum needs no rounding.
    """
    found: set[Ref] = set()
    for ref, value in enumerate(body):
        match value:
            case Const(number, dtype):
                known = DTYPES[dtype] == "float" and _is_round(number, narrow)
            case Load(_, _, dtype, _):
                known = dtype == narrow
            case Apply("cast", (arg,), dtype):
                source = body[arg].dtype
                known = dtype == narrow or (
                    dtype == "float32" and (arg in found or source in ("bool", "int8", "uint8"))
                )
            case Apply("where", (_, one, other), _):
                known = one in found and other in found
            case Apply(op, args, _):
                known = OPS[op].keeps_bits and all(arg in found for arg in args)
            case Reduce("max" | "min", arg, _):
                known = arg in found
            case _:
                known = False
        if known:
            found.add(ref)
    return frozenset(found)


def _is_round(number: float, narrow: str) -> bool:
    with np.errstate(over="ignore"):
        if narrow == "float16":
            return float(np.float16(number)) == number
        single = np.float32(number)
    return float(single) == number and int(single.view(np.uint32)) & 0xFFFF == 0


@dataclass(frozen=True, slots=True)
class PositionCounter:
    """The values that an int32 counter of a loop replaces, next to the 64-bit loop variable that addresses need.

    Vectors of 64-bit integers hold half as many elements. `positions` are the variable as an int32. `matches` compare
    it with a number of the row: that number's ref.
    """

    positions: frozenset[Ref]
    matches: Mapping[Ref, Ref]

    def __bool__(self) -> bool:
        return bool(self.positions or self.matches)


def count_in_int32(
    body: tuple[Value, ...], needed: Iterable[Ref], element: tuple[bool, ...], name: str
) -> PositionCounter:
    """Return which of `needed` an int32 counter can replace; the loop's variable `name` stays below 2**31."""
    counts = {ref for ref, value in enumerate(body) if isinstance(value, IndexOf) and value.index == var(name)}
    positions, matches = set[Ref](), {}
    for ref in needed:
        value = body[ref]
        if ref in counts and value.dtype == "int32":
            positions.add(ref)
        if isinstance(value, Apply) and value.op == "eq" and len(counts & {*operands(value)}) == 1:
            (other,) = {*value.args} - counts
            if not element[other] and body[other].dtype == "int64" and not isinstance(body[other], Const):
                matches[ref] = other
    return PositionCounter(frozenset(positions), matches)
