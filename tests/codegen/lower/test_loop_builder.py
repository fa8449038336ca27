"""Loop bodies: sharing, folding, rounding that must stay, masks."""

from __future__ import annotations

import math

import pytest
import torch

from dcompile.codegen.lower.loop_builder import Body
from dcompile.ir.index import var
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Store


def body() -> Body:
    return Body({"i0": 8})


def test_equal_values_are_one() -> None:
    b = body()
    x, again = b.load("x", var("i0"), "float32"), b.load("x", var("i0"), "float32")
    assert x == again
    assert b.apply("add", x, x) == b.apply("add", x, x)
    assert len(b.values) == 2


def test_constants_that_python_finds_equal_stay_apart() -> None:
    b = body()
    refs = {b.const(0.0, "float32"), b.const(-0.0, "float32"), b.const(True, "bool"), b.const(1, "int64")}
    assert len(refs) == 4


def test_a_narrowing_round_trip_is_kept_and_a_widening_one_is_not() -> None:
    b = body()
    wide = b.load("x", var("i0"), "float32")
    narrow = b.cast(wide, "bfloat16")
    assert b.cast(narrow, "float32") != wide
    stored = b.load("y", var("i0"), "bfloat16")
    assert b.cast(b.cast(stored, "float32"), "bfloat16") == stored
    integer = b.load("n", var("i0"), "int64")
    assert b.cast(b.cast(integer, "float64"), "int64") != integer, "a float64 does not hold every int64"


def test_a_16_bit_constant_is_rounded_while_compiling() -> None:
    b = body()
    back = b.values[b.cast(b.const(0.3, "bfloat16"), "float32")]
    assert back == Const(0.30078125, "float32")
    assert b.values[b.const(0.3, "float32")] == Const(0.30000001192092896, "float32")


def test_constants_and_indices_are_folded() -> None:
    b = body()
    two = b.const(2, "int64")
    assert b.values[b.apply("add", b.index(var("i0")), two)] == IndexOf(var("i0") + 2)
    assert b.values[b.apply("mul", two, b.const(3, "int64"))] == Const(6, "int64")
    assert b.values[b.cast(b.index(var("i0")), "int32")] == IndexOf(var("i0"), "int32")
    x = b.load("x", var("i0"), "float32")
    assert b.apply("mul", x, b.const(1, "float32")) == x
    assert b.apply("sub", x, b.const(0, "float32")) == x
    assert b.apply("add", x, b.const(0, "float32")) != x, "-0.0 + 0.0 is 0.0"
    assert b.apply("sub", x, b.const(-0.0, "float32")) != x
    assert b.apply("where", b.const(True, "bool"), x, b.const(0, "float32")) == x
    negative, no, yes = b.apply("lt", x, b.const(0, "float32")), b.const(False, "bool"), b.const(True, "bool")
    assert b.apply("xor", no, negative) == b.apply("xor", negative, no) == negative
    assert b.apply("xor", yes, negative) == b.apply("xor", negative, yes) == b.apply("not", negative)


def test_integer_division_by_zero_is_left_to_run_time() -> None:
    b = body()
    ref = b.apply("floordiv", b.const(1, "int64"), b.const(0, "int64"))
    assert isinstance(b.values[ref], Apply)


def test_masks_reach_every_load_inside() -> None:
    b = body()
    first, second = b.load("p", var("i0"), "bool"), b.load("q", var("i0"), "bool")
    with b.masked(first):
        outer = b.load("x", var("i0"), "float32")
        with b.masked(second):
            inner = b.load("x", var("i0"), "float32")
    assert len({outer, inner, b.load("x", var("i0"), "float32")}) == 3
    assert b.values[outer] == Load("x", var("i0"), "float32", first)
    both = b.values[inner]
    assert isinstance(both, Load) and b.values[both.mask or 0] == Apply("and", (first, second), "bool")


def test_dead_values_are_dropped_and_runtime_indices_renamed() -> None:
    b = body()
    b.load("unused", var("i0"), "float32")
    row = b.as_index(b.load("rows", var("i0"), "int64"), 5)
    x = b.load("x", row * 4, "float32")
    values, stores = b.finish((Store("y", var("i0"), x),))
    assert [v.buffer for v in values if isinstance(v, Load)] == ["rows", "x"]
    assert values[1] == Load("x", var("v0") * 4, "float32") and stores[0].value == 1


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e30, -1e30])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_a_number_that_no_integer_holds_becomes_what_it_does_in_eager(number: float, dtype: str) -> None:
    """T5 takes the logarithm of a distance of 0 and makes an integer of it, which it does not use."""
    b = body()
    found = b.values[b.cast(b.const(number, "float32"), dtype)]
    assert found == Const(int(torch.full((8,), number).to(getattr(torch, dtype))[0]), dtype)
