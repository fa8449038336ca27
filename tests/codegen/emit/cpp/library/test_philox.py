"""Random bits in vectors are those of `ir/philox.py`, wherever an element lies and whatever is made of them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dcompile.ir.index import Index, as_index
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import IndexOf, Load, Program, Store
from dcompile.ir.philox import philox
from tests.codegen.emit import loops
from tests.codegen.emit.cpp.test_avx512 import assembly
from tests.codegen.emit.cpp.test_vectorize import bits, both, kernels_of, source_of
from tests.codegen.emit.harness import run, together
from tests.codegen.emit.loops import I0, J0, Body, program

KEYS = (-(2**62) + 0x123456789ABCDE, 5)


def dropped(rows: int, n: int, dtype: str = "float32", at: Index | None = None, draw: int = 0) -> Program:
    """x * mask * 1.5, where a word of the element's block says whether the mask is 1, and the mask."""
    b, place = Body(), I0 * n + J0
    position = b.put(IndexOf(place if at is None else at, "int64"))
    key = b.put(Load("key", as_index(0), "int64"))
    word = b.op("philox", key, position, b.const(draw, "int64"), dtype="int32")
    kept = b.op("lt", word, b.const(700_000_000, "int32"), dtype="bool")
    y = b.op("mul", b.op("mul", b.load("x", place, dtype), b.op("cast", kept)), b.const(1.5))
    stores = [Store("y", place, b.narrow(y, dtype))] + [Store("m", place, kept)] * (dtype == "float32")
    masks = {"m": ("bool", (rows, n))} if dtype == "float32" else {}
    return program(
        b, (rows,), (n,), stores, x=(dtype, (rows, n)), key=("int64", (1,)), y=(dtype, (rows, n)), **masks
    )  # fmt: skip


def uniform(n: int, digits: int, dtype: str, draws: tuple[int, ...]) -> Program:
    """Numbers of some bits each, from 0 to 1."""
    b, key = Body(), Load("key", as_index(0), "int64")
    source, position = b.put(key), b.put(IndexOf(as_index(I0), "int64"))
    total = b.const(0.0)
    for draw in draws:
        word = b.op("philox", source, position, b.const(draw, "int64"), dtype="int32")
        word = b.op("shr", word, b.const(32 - digits, "int32"), dtype="int32")
        word = b.op("and", word, b.const((1 << digits) - 1, "int32"), dtype="int32")
        total = b.op("add", total, b.op("mul", b.op("cast", word), b.const(2.0**-digits)))
    return program(b, (n,), (), [Store("y", I0, b.narrow(total, dtype))], key=("int64", (1,)), y=(dtype, (n,)))


def keyed(key: int) -> np.ndarray:
    return np.array([key], np.int64)


@together(lambda dtype, n, **_: kernels_of(dropped(3, n, dtype)))
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("dtype", "n", "many"),
    [("float32", 96, "two"), ("float32", 1003, "two"), ("bfloat16", 96, "pair"), ("bfloat16", 1000, "quad"),
     ("float16", 200, "two")],
)  # fmt: skip
def test_dropout_is_the_plain_loops_and_the_references(dtype: str, n: int, many: str, key: int) -> None:
    made, x = dropped(3, n, dtype), np.random.default_rng(n).normal(size=(3, n)).astype(np.float16)
    assert f"philox_at_{many}(" in source_of(made).text
    given = {"x": x.astype(np.float32) if dtype != "float16" else x, "key": keyed(key)}
    got, want = both(made, given)
    asked = interpret(made, given)
    for one, plain, meant in zip(got, want, asked, strict=True):
        assert np.array_equal(one, plain) and np.array_equal(one.astype(np.float32), np.asarray(meant, np.float32))


@together(lambda at, draw: kernels_of(dropped(3, 1003, at=at, draw=draw)))
@pytest.mark.parametrize("draw", [0, 2, 4 * 2**33 + 3])
@pytest.mark.parametrize(
    "at", [I0 * 1003 + J0 * 3 + (2**32 - 500), J0 * 7 - I0 + 2**40, I0 * -2000 - J0 + 2**33], ids=str
)
def test_positions_in_any_steps_and_beyond_32_bits(at: Index, draw: int) -> None:
    made = dropped(3, 1003, at=at, draw=draw)
    x = np.ones((3, 1003), np.float32)
    got, want = both(made, {"x": x, "key": keyed(KEYS[0])})
    i, j = np.meshgrid(np.arange(3), np.arange(1003), indexing="ij")
    where = sum(c * {"i0": i, "j0": j}[m[0].name] if m else c for m, c in at.terms)  # type: ignore[union-attr]
    mask = philox(KEYS[0], where, draw) < 700_000_000
    assert np.array_equal(got[1], mask) and np.array_equal(got[0], mask * np.float32(1.5))
    assert all(np.array_equal(one, other) for one, other in zip(got, want, strict=True))


@together(lambda digits, dtype: kernels_of(uniform(1000, digits, dtype, (0, 1))))
@pytest.mark.parametrize(("digits", "dtype"), [(24, "float32"), (8, "bfloat16"), (11, "float16")])
def test_uniform_numbers_of_two_words_of_one_block(digits: int, dtype: str) -> None:
    made = uniform(1000, digits, dtype, (0, 1))
    assert re.search("philox_at_(two|quad)", source_of(made).text)
    (got,), (want,) = both(made, {"key": keyed(KEYS[1])})
    (meant,) = interpret(made, {"key": keyed(KEYS[1])})
    assert np.array_equal(bits(got.astype(np.float32)), bits(want.astype(np.float32)))
    assert np.array_equal(got.astype(np.float32), np.asarray(meant, np.float32))


def test_what_is_the_same_for_a_whole_row_or_no_float_takes_the_plain_loop() -> None:
    """A number for each channel; the words themselves, and numbers read by them."""
    made = dropped(4, 256, at=I0)
    assert "philox_at" not in source_of(made).text
    x = np.ones((4, 256), np.float32)
    (_, mask) = run(made, {"x": x, "key": keyed(9)})
    assert np.array_equal(mask[:, 0], philox(9, np.arange(4), 0) < 700_000_000) and (mask == mask[:, :1]).all()
    words = loops.random_words(1000, (0, 5))
    assert "philox_at" not in source_of(words).text
    for got, draw in zip(run(words, {"key": keyed(9)}), (0, 5), strict=True):
        assert np.array_equal(got, philox(9, np.arange(1000), draw))


def test_a_round_is_two_products_two_shifts_and_two_sums_of_three() -> None:
    made = assembly(dropped(64, 1024))
    counts = [len(re.findall(rf"\t{name}.*%zmm", made)) for name in ("vpmuludq", "vpsrlq", "vpternlog", "vpmullq")]
    products = counts[0]
    assert products % 4 == 0 and products <= 80 and counts[1] <= products and counts[2] <= products and not counts[3]
