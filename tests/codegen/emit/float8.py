"""Programs that convert and copy 8-bit floats, for every emitter."""

from __future__ import annotations

import numpy as np

from dcompile.ir.float8 import BYTES, FLOAT8, MAX_FLOAT8
from dcompile.ir.interpret import from_bfloat16
from dcompile.ir.nodes import Const, Load, Program, Store
from tests.codegen.emit import loops

SOURCES = ("float32", "bfloat16", "float16", "float64", "int64", "bool")
TARGETS = ("float32", "bfloat16", "float16", "float64", "int32", "bool")
ENCODED = [(source, target) for source in SOURCES for target in FLOAT8]
DECODED = [(source, target) for source in FLOAT8 for target in TARGETS]
BETWEEN = [(source, target) for source in FLOAT8 for target in FLOAT8 if source != target]


def bfloat16s() -> np.ndarray:
    """All numbers of bfloat16."""
    return from_bfloat16(np.arange(1 << 16, dtype=np.uint16))


def borders() -> np.ndarray:
    """Numbers of float32 that lie around halfway between neighbours among 8-bit floats, and around their ends."""
    near = np.arange(-2, 3, dtype=np.int64)
    digits = np.concatenate([np.arange(1 << 12, dtype=np.int64) << 19, np.arange(1 << 13, dtype=np.int64) << 18])
    bits = (digits[:, None] + near).ravel()
    numbers = (bits[(bits >= 0) & (bits < 1 << 31)]).astype(np.uint32).view(np.float32)
    return np.concatenate([numbers, -numbers])


def values(source: str) -> np.ndarray:
    """What is converted from a dtype."""
    if source in BYTES:
        return np.arange(256, dtype=np.uint8)
    if source == "bool":
        return np.arange(64) % 2 == 1
    if source == "int64":
        return np.arange(-600, 600, dtype=np.int64) * 7
    if source == "bfloat16":
        return bfloat16s()
    if source == "float16":
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):
        return np.concatenate([bfloat16s(), borders()]).astype(source)


def conversion(source: str, target: str, every: int = 1) -> tuple[Program, dict[str, np.ndarray]]:
    """Every number converted, by way of float32 as lowering writes it, but truth values to one.

    Where that is what is converted in the end, of other floats one of `every` so many will do.
    """
    x = values(source)
    x = x[::every] if source in ("bfloat16", "float16", "float64") else x
    if target == "int32":
        x = x[:0x78] if source != "float8_e8m0fnu" else x[:0x90]
    body = loops.Body()
    ref = body.put(Load("x", loops.I0, source))
    if target in FLOAT8 and source != "float32":
        ref = body.op("cast", ref)
    stores = [Store("y", loops.I0, body.op("cast", ref, dtype=target))]
    return loops.program(body, x.shape, (), stores, x=(source, x.shape), y=(target, x.shape)), {"x": x}


def clamped(body: loops.Body, x: int, dtype: str) -> int:
    """A float32 within the range of a dtype, or NaN."""
    least, most = (body.put(Const(limit, "float32")) for limit in (-MAX_FLOAT8[dtype], MAX_FLOAT8[dtype]))
    return body.op("min", body.op("max", x, least), most)


def clamped_conversion(dtype: str, every: int = 1) -> tuple[Program, dict[str, np.ndarray]]:
    """One of `every` so many numbers, clamped and converted. NaN has no sign, which GPUs drop."""
    x = values("float32")[::every]
    x = np.abs(x, where=np.isnan(x), out=x)
    body = loops.Body()
    stores = [Store("y", loops.I0, body.op("cast", clamped(body, body.load("x", loops.I0), dtype), dtype=dtype))]
    return loops.program(body, x.shape, (), stores, x=("float32", x.shape), y=(dtype, x.shape)), {"x": x}


def turned(rows: int, columns: int, dtype: str, *, clamps: bool = False) -> Program:
    """Rows scaled and rounded to 8 bits, and their columns one after another as well."""
    body = loops.Body()
    x = body.load("x", loops.I0 * columns + loops.J0, "bfloat16")
    number = body.op("mul", x, body.load("s", loops.I0 * 0))
    ref = body.op("cast", clamped(body, number, dtype) if clamps else number, dtype=dtype)
    stores = [Store("y", loops.I0 * columns + loops.J0, ref), Store("z", loops.J0 * rows + loops.I0, ref)]
    shape = (rows, columns)
    buffers = {"y": (dtype, shape), "z": (dtype, shape, (1, rows))}
    return loops.program(body, shape[:1], shape[1:], stores, x=("bfloat16", shape), s=("float32", ()), **buffers)


def copied(rows: int, columns: int, dtype: str) -> Program:
    """The same bytes in another order."""
    body = loops.Body()
    ref = body.put(Load("x", loops.I0 * columns + loops.J0, dtype))
    stores = [Store("y", loops.J0 * rows + loops.I0, ref)]
    buffers = {"x": (dtype, (rows, columns)), "y": (dtype, (rows, columns), (1, rows))}
    return loops.program(body, (rows,), (columns,), stores, **buffers)


def programs(every: int = 1) -> dict[str, tuple[Program, dict[str, np.ndarray]]]:
    """Name -> program, and its inputs."""
    rng = np.random.default_rng(3)
    made = {f"{a} to {b}": conversion(a, b, every) for a, b in (*ENCODED, *DECODED, *BETWEEN)}
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        x = from_bfloat16(rng.integers(0, 1 << 16, (48, 80)).astype(np.uint16))
        scale = np.float32(3.7).reshape(())
        made[f"turned {dtype}"] = turned(48, 80, dtype), {"x": x, "s": scale}
        made[f"turned clamped {dtype}"] = turned(48, 80, dtype, clamps=True), {"x": np.nan_to_num(x), "s": scale}
        made[f"clamped {dtype}"] = clamped_conversion(dtype, every)
    made["copied by words"] = copied(68, 70, "float8_e5m2"), {"x": rng.integers(0, 256, (68, 70)).astype(np.uint8)}
    for dtype in sorted(BYTES):
        made[f"copied {dtype}"] = copied(33, 70, dtype), {"x": rng.integers(0, 256, (33, 70)).astype(np.uint8)}
    return made


def differs(want: np.ndarray, got: np.ndarray) -> str:
    """Where results have other bits, numbers that are none apart; empty if nowhere."""
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"{got.dtype} {got.shape}, not {want.dtype} {want.shape}"
    kind = f"u{want.dtype.itemsize}"
    same = want.view(kind) == got.view(kind)
    if want.dtype.kind == "f":
        same |= np.isnan(want) & np.isnan(got)
    wrong = np.flatnonzero(~same)
    return f"{len(wrong)} differ, as {want.flat[wrong[0]]} and {got.flat[wrong[0]]}" if len(wrong) else ""
