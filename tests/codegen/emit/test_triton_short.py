"""The PTX for what bfloat16 holds has eager's bits, whatever a GPU's approximate reciprocals and roots are."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dcompile.codegen.emit import triton
from dcompile.codegen.emit.triton_prelude import functions
from dcompile.ir.interpret import to_bfloat16
from dcompile.ir.nodes import Store
from tests.codegen.emit import loops, ptx

EDGES = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x3F80, 0x2280, 0x227F]
"""Zeros, denormal numbers, the largest, infinities, no number, one, and about what least numerators are."""


def short(*patterns: object) -> np.ndarray:
    return np.concatenate([np.asarray(p, np.uint32).reshape(-1) for p in patterns]) << 16


def asm(name: str) -> str:
    return re.findall(r'"([^"]*;[^"]*)"', functions()[name])[0]


def moved(value: np.ndarray, ulps: int) -> np.ndarray:
    """A result that is off by some units in its last place, as approximate ones are."""
    ordinary = (value & 0x7F800000 != 0x7F800000) & (value & 0x7F800000 != 0)
    return np.where(ordinary, value + np.uint32(ulps & 0xFFFFFFFF), value)


@pytest.fixture(params=[-2, -1, 0, 1, 2])
def off(request, monkeypatch):
    for name in ("rcp.approx.ftz.f32", "sqrt.approx.f32"):
        right = ptx.OPERATIONS[name]
        monkeypatch.setitem(ptx.OPERATIONS, name, lambda a, right=right: moved(right(a), request.param))


def quotients(name: str, a: np.ndarray, b: np.ndarray, *more: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return ptx.elementwise(asm(name), "=&f,=&f,=&f,=&f", [a, b, *more], 4)


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return ptx.OPERATIONS["div.rn.f32"](a, b)


def test_quotients_of_all_significands(off):
    a, b = (short(0x3F80 + n) for n in np.meshgrid(np.arange(128), np.arange(128)))
    np.testing.assert_array_equal(quotients("short_div_", a, b), divided(a, b))


def test_quotients_of_all_sizes(off):
    draw = np.random.default_rng(0)
    a, b = (short(n) for n in np.meshgrid([*EDGES, *draw.integers(0, 1 << 16, 300)], draw.integers(0, 1 << 16, 300)))
    np.testing.assert_array_equal(quotients("short_div_", a, b), divided(a, b))
    a, b = (short(n) for n in np.meshgrid(draw.integers(0, 1 << 16, 300), EDGES))
    np.testing.assert_array_equal(quotients("short_div_", a, b), divided(a, b))


NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.0316069, -0.0009989, 2.0**-60, -(2.0**60), 2.0**61, 1e-38, 3e38, np.inf, np.nan]


@pytest.mark.parametrize("number", [*NUMBERS, *np.random.default_rng(1).standard_normal(8)])
def test_quotients_by_one_number(number):
    """All that bfloat16 holds; a reciprocal that cannot be relied on is no number."""
    with np.errstate(all="ignore"):
        inside, one = 2.0**-60 <= abs(number) <= 2.0**60, np.float32(1) / np.float32(number)
    a = short(np.arange(1 << 16))
    b, r = (np.full(a.shape, ptx.bits(np.float32(x))) for x in (number, one if inside else np.nan))
    np.testing.assert_array_equal(quotients("short_over_", a, b, r), divided(a, b))


def test_all_rounded_roots(off):
    a = short(np.arange(1 << 16))
    with np.errstate(all="ignore"):
        right = to_bfloat16(ptx.f32(ptx.bits(np.sqrt(ptx.f32(a)))))
        found = ptx.elementwise(asm("root_bfloat16_"), "=&f,=&f", [a], 2)
    np.testing.assert_array_equal(found >> 16, right)


def test_values_go_into_bfloat16_and_back():
    draw = np.random.default_rng(2)
    a = np.concatenate([short(np.arange(1 << 16)), draw.integers(0, 1 << 32, 10000, np.uint32)])
    rounded = ptx.elementwise(asm("round_bfloat16_"), "=&f,=&f", [a], 2)
    np.testing.assert_array_equal(rounded >> 16, to_bfloat16(ptx.f32(a)))
    packed = (rounded >> 16).astype(np.uint16)
    np.testing.assert_array_equal(ptx.elementwise(asm("from_bfloat16_"), "=&f,=&f", [packed], 2), rounded)


def text(*, root: bool = False, by: str = "y", narrow: bool = True, kept: bool = False) -> str:
    """What a kernel does that divides x, or its rounded root, by y or by a number; the root itself may be `kept`."""
    b = loops.Body()
    x = found = b.load("x", loops.I0, "bfloat16" if narrow else "float32")
    if root:
        found = b.op("sqrt", x)
        x = b.op("cast", b.narrow(found, "bfloat16"))
    y = b.load("y", loops.I0, "bfloat16") if by == "y" else b.load("n", loops.as_index(0))
    stores = [Store("out", loops.I0, b.op("div", x, y))]
    stores += [Store("roots", loops.I0, found)] if kept else []
    buffers = {
        "x": ("bfloat16" if narrow else "float32", (4096,)),
        "y": ("bfloat16", (4096,)),
        "n": ("float32", (1,)),
        "out": ("float32", (4096,)),
        "roots": ("float32", (4096,)),
    }
    program = loops.program(b, (4096,), (), stores, **buffers)
    return triton.emit(program.steps[0], program.table).text.split("def dcompile")[1]


def test_what_bfloat16_holds_is_divided_so():
    assert "short_div_(" in text()
    assert "short_over_(" in text(by="n")
    assert not re.search("short_", text(narrow=False))


def test_only_a_rounded_root_is_approximate():
    assert "root_bfloat16_" in text(root=True) and "sqrt_(" not in text(root=True)
    assert "sqrt_(" in text(root=True, kept=True)
    assert "root_bfloat16_" not in text(root=True, narrow=False)


def rounding(divided: bool) -> str:
    """What a kernel does that writes products as bfloat16, one of them rounded for other use too."""
    b = loops.Body()
    x = b.load("x", loops.I0, "bfloat16")
    once, twice = (b.narrow(b.op("mul", x, b.const(factor)), "bfloat16") for factor in (2.0, 3.0))
    last = b.op("cast", twice)
    stores = [Store("y", loops.I0, once), Store("z", loops.I0, twice)]
    stores.append(Store("w", loops.I0, b.op("div", last, x) if divided else last))
    buffers = {"x": "bfloat16", "y": "bfloat16", "z": "bfloat16", "w": "float32"}
    program = loops.program(b, (4096,), (), stores, **{name: (dtype, (4096,)) for name, dtype in buffers.items()})
    return triton.emit(program.steps[0], program.table).text.split("def dcompile")[1]


def test_what_is_only_written_is_rounded_by_the_store():
    text = rounding(divided=True)
    assert text.count("round_bfloat16_(") == 1 and text.count(".to(tl.float32).to(tl.bfloat16))") == 2


def test_without_divisions_rounding_is_tritons():
    text = rounding(divided=False)
    assert text.count("to_bfloat16(") == 2 and not re.search("round_bfloat16_|from_bfloat16_", text)
