"""Operations on the numbers at the ends of each dtype, and what eager gives for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from dcompile.ir.index import contiguous_strides
from dcompile.ir.nodes import Load, Program, Store
from dcompile.ir.ops import DTYPES, OPS
from tests.codegen.emit import loops

INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float32", "float64")
QUOTIENTS = ("floordiv", "truncdiv", "mod", "fmod")


def _remainder(a: np.ndarray, b: np.ndarray, op: str) -> np.ndarray:
    """Exact remainders: those of eager's vectors are NaN where the quotient overflows, those of its scalars are not."""
    with np.errstate(all="ignore"):
        left = np.fmod(a, b)
        return left if op == "fmod" else np.where((left != 0) & ((left < 0) != (b < 0)), left + b, left)


EAGER: Mapping[str, Callable[..., torch.Tensor]] = {
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.remainder, "fmod": torch.fmod, "min": torch.minimum, "max": torch.maximum,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype),
    "mantissa": lambda x: torch.frexp(x)[0], "exponent": lambda x: torch.frexp(x)[1],
}  # fmt: skip
"""Of operations that torch calls by another name."""
EXACT = frozenset((
    "add", "sub", "mul", "div", "floordiv", "mod", "fmod", "min", "max", "neg", "abs", "sign", "reciprocal", "sqrt",
    "nextafter", "mantissa", "exponent", "floor", "ceil", "trunc", "round", "where",
))  # fmt: skip
"""Operations on floats whose results are eager's bit for bit; those that give integers are always."""
NOWHERE: Mapping[str, Callable[..., np.ndarray]] = {
    "sinh": lambda x: np.abs(x) > 87, "cosh": lambda x: np.abs(x) > 87,
    "log1p": lambda x: (x != 0) & (np.abs(x) < 1e-37),
}  # fmt: skip
"""Where eager's own results are off: infinite for 88.8, or 0 for the least numbers."""


def numbers(dtype: str) -> np.ndarray:
    """The ends of a dtype, what lies beside them, and small numbers."""
    if DTYPES[dtype] == "int":
        info = np.iinfo(dtype)
        edges = {info.max, info.max - 1, info.max // 2, info.max // 2 + 1, info.max // 3, 0, 1, 2, 3, 7, 64, 100}
        below = {-1, -2, -7, -100, info.min, info.min + 1, info.min // 2} if info.min else set()
        return np.array(sorted(edges | below), dtype)
    limits = np.finfo(dtype)
    sizes = [0.0, 1.0, 0.5, 2.0, 2.5, 3.0, 7.0, 11.0, 88.8, 1e-3, math.inf, float(limits.max), float(limits.tiny)]
    sizes += [float(limits.tiny) / 2, float(limits.smallest_subnormal), float(limits.eps)]
    return np.array([*sizes, *(-size for size in sizes), math.nan], dtype)


def operations(dtypes: tuple[str, ...]) -> list[tuple[str, str]]:
    """(operation, dtype) of the table; what torch does not have has tests of its own."""
    names = [name for name in OPS if name not in ("cast", "within", "philox", "one_plus_erf")]
    return [(name, dtype) for dtype in dtypes for name in names if DTYPES[dtype] in OPS[name].kinds]


def operands(op: str, dtype: str) -> dict[str, np.ndarray]:
    """All numbers, or all pairs of them that eager takes: it ends, or the processor does, where a quotient is none."""
    every = numbers(dtype)
    if OPS[op].arity == 1:
        return {"x0": every}
    a, b = (np.ascontiguousarray(side) for side in np.array([(a, b) for a in every for b in every], dtype).T)
    keep = np.ones(len(a), bool)
    if DTYPES[dtype] == "int":
        least = np.iinfo(dtype).min if dtype in ("int32", "int64") else None
        if op in QUOTIENTS:
            keep = (b != 0) & ~((a == least) & (b == -1))
        elif op == "gcd":
            keep = (a != least) & (b != least)
    if op == "fma":  # a sum that cancels has any error where the product is rounded first, as Triton's interpreter does
        return {"x0": a, "x1": b, "x2": np.copysign(b[::-1], np.sign(a) * np.sign(b)).astype(dtype)}
    pair = {"x0": a[keep], "x1": b[keep]}
    return {"x0": pair["x0"] > pair["x1"], "x1": pair["x0"], "x2": pair["x1"]} if op == "where" else pair


def program(op: str, dtype: str) -> Program:
    """The operation on every one of its operands."""
    body, given = loops.Body(), operands(op, dtype)
    args = [body.put(Load(name, loops.I0, array.dtype.name)) for name, array in given.items()]
    out, shape = result_dtype(op, dtype), given["x0"].shape
    stores = [Store("y", loops.I0, body.op(op, *args, dtype=out))]
    inputs = {name: (array.dtype.name, shape, contiguous_strides(shape)) for name, array in given.items()}
    return loops.program(body, shape, (), stores, **inputs, y=(out, shape))


def result_dtype(op: str, dtype: str) -> str:
    rule = OPS[op].rule
    return rule if rule in ("bool", "int32") else dtype


def eager(op: str, dtype: str) -> np.ndarray:
    """What torch gives."""
    given = operands(op, dtype).values()
    if op in ("mod", "fmod") and DTYPES[dtype] == "float":
        return _remainder(*given, op)
    if op == "sqrt":  # eager's of float64 are off by one unit on some of Intel's processors
        with np.errstate(all="ignore"):
            return np.sqrt(*given)
    found: torch.Tensor = (EAGER.get(op) or getattr(torch, op))(*map(torch.from_numpy, given))
    return found.numpy()


def difference(op: str, dtype: str, got: np.ndarray) -> str:
    """What is wrong with results; empty if they are eager's."""
    want, given = eager(op, dtype), operands(op, dtype)
    if got.dtype != want.dtype:
        return f"{got.dtype} in place of {want.dtype}"
    wrong = got != want
    if DTYPES[dtype] == "float" and want.dtype.kind == "f":
        near = np.zeros(len(want), bool)
        if op not in EXACT:
            with np.errstate(all="ignore"):
                tolerance, tiny = {"float32": 3e-6, "float64": 1e-13}[dtype], np.finfo(dtype).tiny
                near = np.isfinite(want) & (np.abs(got - want) <= tolerance * np.abs(want) + 2 * tiny)
        turned = (got == 0) & (want == 0) & (np.signbit(got) != np.signbit(want))
        wrong = (wrong & ~near & ~(np.isnan(got) & np.isnan(want))) | turned
        if op in NOWHERE:
            wrong &= ~NOWHERE[op](given["x0"])
    first = np.flatnonzero(wrong)[:4]
    shown = [(*(array[n] for array in given.values()), f"want {want[n]}", f"got {got[n]}") for n in first]
    return f"{wrong.sum()} wrong: {shown}" if len(first) else ""
