"""A softmax divides by multiplications with one reciprocal for each row, to the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dcompile.codegen.emit.triton import kernel as triton_kernel
from dcompile.codegen.emit.triton.library import functions
from dcompile.ir.index import var
from dcompile.ir.nodes import Store
from tests.codegen.emit import loops
from tests.codegen.emit.loops import Body, program

I0, J0 = var("i0"), var("j0")


def emitted(made):
    (loop,) = made.steps
    text = triton_kernel.emit(loop, made.table).text
    return text[text.rindex("def ") :]


@pytest.mark.parametrize("width", [1000, 1024, 65536])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_of_a_softmax_are_not_divided(width, dtype):
    text = emitted(loops.softmax(64, width, dtype))
    assert "share_(" in text and "div_(" not in text


def divided(shift: str, dtype: str = "float32"):
    """Exponentials over their sum, of elements minus a row's `shift`."""
    b = Body()
    x = b.load("x", I0 * 1024 + J0, dtype)
    e = b.op("exp", b.op("sub", x, b.reduce(shift, x)), dtype=dtype)
    y = b.op("div", e, b.reduce("sum", e), dtype=dtype)
    shape = (64, 1024)
    return program(b, (64,), (1024,), [Store("y", I0 * 1024 + J0, y)], x=(dtype, shape), y=(dtype, shape))


def test_sums_that_may_be_zero_divide():
    assert "div_(" in emitted(divided("min")) and "share_(" in emitted(divided("max"))


def share(a, b):
    """The library's function, on NumPy arrays: an fma in 64 bits is exact but for its rounding."""

    def fma(x, y, z):
        x, y, z = (np.asarray(value, np.longdouble) for value in (x, y, z))
        return (x * y + z).astype(np.float32)

    text = functions()["share_"].replace("@triton.jit", "")
    tl = SimpleNamespace(fma=fma, div_rn=np.divide, full=lambda _, value, dtype: dtype(value), float32=np.float32)
    names = {"tl": tl}
    exec(text, names)
    return names["share_"](a, b)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs an emulated fma")
def test_quotients_are_rounded_as_by_a_division():
    random = np.random.default_rng(0)
    sums = (1 + random.random(1 << 20) * 2.0 ** random.integers(0, 14, 1 << 20)).astype(np.float32)
    exponentials = np.exp(-random.random(1 << 20) * 60).astype(np.float32)
    for a in (exponentials, np.float32(1) / sums, np.minimum(sums / np.float32(1 << 14), np.float32(1))):
        np.testing.assert_array_equal(share(a, sums), a / sums)
    near = near_midpoints(np.arange(1 << 23, 1 << 24, 101, dtype=np.int64) | 1)
    np.testing.assert_array_equal(share(*near), near[0] / near[1])
    assert len(near[0]) > 10_000


def near_midpoints(divisors):
    """Pairs with a quotient that nearly halves the distance of two float32: A 2**25 = M B + 1 for an odd M."""
    inverse = divisors.copy()
    for _ in range(5):
        inverse = inverse * (2 - divisors * inverse) % (1 << 25)
    middle = -inverse % (1 << 25)
    dividend = (middle * divisors + 1) >> 25
    kept = (middle >= 1 << 24) & (dividend >= 1 << 23)
    return (dividend[kept] / 2.0**24).astype(np.float32), (divisors[kept] / 2.0**23).astype(np.float32)


@pytest.mark.parametrize("value", [0.0, float("nan"), 1.0])
def test_special_exponentials(value):
    a, b = np.float32([value]), np.float32([1.0])
    np.testing.assert_array_equal(share(a, b), a / b)
