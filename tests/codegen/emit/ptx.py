"""Runs the PTX that Triton kernels have inside, on NumPy arrays: as much of the language as they use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from dcompile.ir.interpret import to_bfloat16

QUIET = np.uint32(0x7FFFFFFF)
"""The NaN of CUDA's arithmetic."""


def f32(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def bits(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value, np.float32)
    return np.where(np.isnan(value), QUIET, value.view(np.uint32))


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded to 64 bits, then to 24: wrong only where those lie on the middle of two, and other bits followed."""
    wide = np.longdouble
    return bits((f32(a).astype(wide) * f32(b).astype(wide) + f32(c).astype(wide)).astype(np.float32))


def _flushed(value: np.ndarray) -> np.ndarray:
    return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value)


def _rounded(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return to_bfloat16(f32(high)).astype(np.uint32) << 16 | to_bfloat16(f32(low)).astype(np.uint32)


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "sub.u32": lambda a, b: a - b,
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "neg.f32": lambda a: a ^ np.uint32(0x80000000),
    "copysign.f32": lambda sign, a: (a & np.uint32(0x7FFFFFFF)) | (sign & np.uint32(0x80000000)),
    "mul.rn.f32": lambda a, b: bits(f32(a) * f32(b)),
    "div.rn.f32": lambda a, b: bits(f32(a) / f32(b)),
    "fma.rn.f32": _fma,
    "sqrt.approx.f32": lambda a: bits(np.sqrt(f32(a))),
    "rcp.approx.ftz.f32": lambda a: bits(_flushed(np.float32(1) / _flushed(f32(a)))),
    "cvt.rn.bf16x2.f32": _rounded,
}
COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "lt.u32": lambda a, b: a < b,
    "lt.f32": lambda a, b: f32(a) < f32(b),
    "gtu.f32": lambda a, b: ~(f32(a) <= f32(b)),
}


def run(text: str, inputs: Sequence[np.ndarray], outputs: int) -> list[np.ndarray]:
    """What PTX leaves in its first `outputs` registers, given the bits of those behind them."""
    registers = {f"${outputs + n}": value for n, value in enumerate(inputs)}
    size = len(inputs[0])
    active = np.ones(size, bool)

    def read(name: str) -> np.ndarray:
        if name[0] in "0123456789":
            return np.uint32(int(name[2:], 16) if name[:2] == "0f" else int(name, 0))
        return registers[name]

    for statement in re.sub(r"[{}]|\.reg [^;]*;|\b(\w+):", "", text).split(";"):
        if not (words := statement.split(None, 1)):
            continue
        if words[0].startswith("@!"):
            assert words[1].split()[0] == "bra", "only the end of a text is jumped to"
            active = active & registers[words[0][2:]]
            continue
        target, *names = (name.strip() for name in words[1].split(","))
        if words[0].startswith("setp."):
            kind, _, how = words[0][5:].partition(".")
            value = COMPARISONS[f"{kind}.{how.removeprefix('or.')}"](*map(read, names[:2]))
            value = value | registers[names[2]] if how.startswith("or.") else value
        else:
            value = OPERATIONS[words[0]](*map(read, names))
        registers[target] = np.where(active, value, registers.get(target, value))
    return [np.broadcast_to(registers[f"${n}"], size).astype(np.uint32) for n in range(outputs)]


def elementwise(text: str, constraints: str, inputs: Sequence[np.ndarray], pack: int) -> np.ndarray:
    """The bits of what PTX on every `pack` elements gives; elements of 16 bits share registers."""
    padded = [np.pad(x.reshape(-1), (0, -x.size % pack)).reshape(-1, pack) for x in inputs]
    given: list[np.ndarray] = []
    for x in padded:
        wide = (
            x.view(np.uint32) if x.itemsize == 4 else x.astype(np.uint32)[:, ::2] | x.astype(np.uint32)[:, 1::2] << 16
        )
        given += list(wide.T)
    found = run(text, given, sum(item.startswith("=") for item in constraints.split(",")))
    return np.stack(found, 1).reshape(-1)[: inputs[0].size].reshape(inputs[0].shape)
