"""NaNs that need no care and positions that an int32 counts: what is found, and that kernels which use it are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcompile.codegen.emit.cpp.value_facts import round_values, short_nans
from dcompile.ir.nodes import Apply, Const, IndexOf, Loop, Program, Store
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.harness import run
from tests.codegen.emit.loops import I0, J0, Body, program


def text(made: Program) -> str:
    (loop,) = made.steps
    assert isinstance(loop, Loop)
    return cpp_kernel.emit(loop, made.table).text


def test_nans_of_bfloat16_and_of_arithmetic_are_short_and_others_are_not() -> None:
    b = Body()
    half, wide = b.load("x", I0, "bfloat16"), b.load("y", I0, "float32")
    product = b.op("mul", half, half)
    mixed, rounded = b.op("mul", half, wide), b.narrow(wide, "bfloat16")
    power = b.op("pow", half, half)
    short = short_nans(tuple(b.values))
    assert {product, rounded} <= short and not {wide, mixed, power} & short


def test_values_chosen_among_rounded_ones_are_round_and_sums_are_not() -> None:
    b = Body()
    half, wide = b.load("x", I0, "bfloat16"), b.load("y", I0, "float32")
    mask = b.op("lt", half, half, dtype="bool")
    relu = b.op("max", half, b.const(0.0))
    chosen = b.op("where", mask, relu, b.const(-1.5))
    floor, label = b.op("floor", b.op("neg", chosen)), b.op("cast", mask)
    found = round_values(tuple(b.values), "bfloat16")
    assert {half, relu, chosen, floor, label} <= found
    total, other = b.op("add", half, half), b.op("max", half, b.const(1.001))
    longer, sure = b.op("where", mask, half, wide), b.reduce("max", half)
    counted = b.op("cast", b.load("n", I0, "int32"))
    found = round_values(tuple(b.values), "bfloat16")
    assert sure in found and not {wide, total, other, longer, counted} & found
    assert half not in round_values(tuple(b.values), "float16")
    assert round_values((Const(1.001, "float32"), Const(65520.0, "float32"), Const(1.5, "float32")), "float16") == {2}


@pytest.mark.parametrize("op", ["mul", "div", "sub", "max"])
def test_rounding_without_care_for_nans_is_torchs(op: str) -> None:
    """Every bfloat16, against factors that make ties, overflow, denormals, infinity and NaN of it."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for factor in (1.0078125, 0.50390625, 3e38, 1e-38, float("inf"), float("nan"), 0.0, -2.984375):
        other = torch.full_like(every, factor)
        b = Body()
        x, y = b.load("x", I0, "bfloat16"), b.load("y", I0, "bfloat16")
        made = program(
            b, (65536,), (), [Store("z", I0, b.narrow(b.op(op, x, y), "bfloat16"))],
            x=("bfloat16", (65536,)), y=("bfloat16", (65536,)), z=("bfloat16", (65536,)),
        )  # fmt: skip
        assert ("nearest_bfloat16" in text(made)) == (op != "max"), "the larger of two rounded numbers is one of them"
        (got,) = run(made, {"x": every.float().numpy(), "y": other.float().numpy()})
        torch_op = {"max": torch.maximum}.get(op) or getattr(torch, op)
        want = torch_op(every, other).float().numpy()
        assert np.array_equal(got, want, equal_nan=True), (op, factor)


def test_float32_in_memory_is_rounded_with_care() -> None:
    made = loops.unary("cast", 8, out="bfloat16")
    assert "nearest_bfloat16" not in text(made)
    given = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    (got,) = run(made, {"x": np.concatenate([given, given[:3]])})
    assert np.isnan(got).all()


def divided(*, stored: bool = False) -> Program:
    """Rows of bfloat16 over a float32 of the row, which may be stored, too."""
    b, at = Body(), I0 * 64 + J0
    x, r = b.load("x", at, "bfloat16"), b.load("r", I0)
    stores = [Store("y", at, b.narrow(b.op("div", x, r), "bfloat16"))]
    stores += [Store("z", I0, r)] if stored else []
    buffers = {"z": ("float32", (5,))} if stored else {}
    made = {"x": ("bfloat16", (5, 64)), "r": ("float32", (5,)), "y": ("bfloat16", (5, 64))}
    return program(b, (5,), (64,), stores, **made, **buffers)


def test_the_nan_of_a_rows_float_is_made_short_once() -> None:
    """Then what is made of it is rounded without care; what is stored as it is keeps its bits."""
    assert "short_nan(" in text(divided()) and "nearest_bfloat16" in text(divided())
    kept = text(divided(stored=True))
    assert "short_nan(" not in kept and "to_bfloat16" in kept
    longest = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000, 0x7FFF8000, 0x7F800000], np.uint32).view(np.float32)
    (got,) = run(divided(), {"x": np.full((5, 64), 1.5, np.float32), "r": longest})
    assert np.isnan(got[[0, 1, 3]]).all() and (got[2] == 1.5).all() and (got[4] == 0).all()


@pytest.mark.parametrize("columns", [5, 100, 9000])
def test_a_comparison_with_the_position_counts_in_32_bits(columns: int) -> None:
    """Also where the number of the row is none of its positions, in blocks of a sum, and beyond 32 bits."""
    b = Body()
    label = b.load("t", I0, "int64")
    hit = b.put(Apply("eq", (label, b.put(IndexOf(J0, "int64"))), "bool"))
    x = b.load("x", I0 * columns + J0)
    chosen = b.put(Apply("where", (hit, x, b.const(0.0)), "float32"))
    stores = [Store("y", I0 * columns + J0, chosen), Store("s", I0, b.reduce("sum", chosen))]
    made = program(
        b, (7,), (columns,), stores,
        x=("float32", (7, columns)), t=("int64", (7,)), y=("float32", (7, columns)), s=("float32", (7,)),
    )  # fmt: skip
    assert "linear(place:1)" in text(made)
    values = np.random.default_rng(0).normal(size=(7, columns)).astype(np.float32)
    labels = np.array([0, columns - 1, columns, -1, 2**32, 2**32 + 3, 2], np.int64)
    got = dict(zip((view.buffer for view in made.outputs), run(made, {"x": values, "t": labels}), strict=True))
    want = np.where(labels[:, None] == np.arange(columns), values, np.float32(0))
    assert np.array_equal(got["y"], want) and np.array_equal(got["s"], want.sum(1, dtype=np.float32))
