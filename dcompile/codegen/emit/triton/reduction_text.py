"""Triton's text of reductions, scans and combinations of partial results."""

from __future__ import annotations

from dcompile.codegen.emit.triton.ops import SPELLING, literal, register_type
from dcompile.ir.ops import REDUCTIONS, SCANS

COMBINE = {"prod": "mul_", "max": "max_", "min": "min_", "logsumexp": "logaddexp_"}
"""The kernel function that combines two partial results."""


def identity_text(op: str, dtype: str) -> str:
    """The value that changes no result."""
    return literal((REDUCTIONS.get(op) or SCANS[op]).identity(dtype), dtype)


def reduced(op: str, dtype: str, value: str, axis: int) -> str:
    """Reduce a tensor along one axis."""
    kind = register_type(dtype)
    if dtype == "bool":
        how = "max" if op in ("max", "any") else "min"
        return f"(tl.{how}({value}.to(tl.int32), {axis}) != 0)"
    if op in ("prod", "logsumexp") or (op in ("max", "min") and dtype.startswith("float")):
        return f"tl.reduce({value}, {axis}, {COMBINE[op]})"
    return f"tl.{op}({value}, {axis}).to(tl.{kind})"


def scanned(op: str, dtype: str, value: str, axis: int) -> str:
    """Scan a tensor along one axis."""
    if op == "sum":
        return f"tl.cumsum({value}, {axis}).to(tl.{register_type(dtype)})"
    return f"tl.associative_scan({value}, {axis}, {COMBINE[op]})"


def combine(op: str, a: str, b: str, dtype: str) -> str:
    """Combine two partial results."""
    if dtype == "bool":
        return f"{a} {'|' if op in ('max', 'any') else '&'} {b}"
    how = (REDUCTIONS.get(op) or SCANS[op]).combine
    assert how is not None
    text = SPELLING[how].format(a, b, dtype=dtype)
    return f"({text}).to(tl.{dtype})" if dtype in ("int8", "int16", "uint8") else text
