"""Rows of large tables are asked for ahead, and read as without that."""

from __future__ import annotations

import numpy as np
import pytest

from dcompile.ir.index import as_index, var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Load, Program, Store
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.harness import run
from tests.codegen.emit.loops import I0, Body, program

LARGE = 4096 * 64
"""Elements of a table of 1 MB."""


def text(made: Program) -> str:
    (loop,) = made.steps
    return cpp_kernel.emit(loop, made.table).text  # type: ignore[arg-type]


def bags(rows: int, n: int, vocabulary: int, size: int, kind: str = "int64") -> Program:
    """Rows of a table, found by checked positions that may count from the end, added up in bags of some."""
    b, i1 = Body(), var("i1")
    token = b.put(Load("t", I0, kind))
    token = b.op("cast", token, dtype="int64") if kind != "int64" else token
    low, high = (b.const(number, "int64") for number in (-vocabulary, vocabulary))
    token = b.op("within", token, low, high, dtype="int64")
    negative = b.op("lt", token, b.const(0, "int64"), dtype="bool")
    token = b.op("where", negative, b.op("add", token, high, dtype="int64"), token, dtype="int64")
    bag = b.op("within", b.put(Load("g", I0, "int64")), b.const(0, "int64"), b.const(size, "int64"), dtype="int64")
    value = b.load("w", var(f"v{token}") * n + i1)
    stores = [Store("y", var(f"v{bag}") * n + i1, value, "sum")]
    return program(
        b, (rows, n), (), stores, t=(kind, (rows,)), g=("int64", (rows,)), w=("float32", (vocabulary, n)),
        y=("float32", (size, n)),
    )  # fmt: skip


def some(made: Program, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs: positions from the table's beginning and end."""
    inputs = {}
    for name in made.inputs:
        held = made.table[name]
        if held.dtype == "float32":
            inputs[name] = rng.standard_normal(held.shape, np.float32)
        else:
            end = made.table["w"].shape[0] if name == "t" else made.table["y"].shape[0]
            inputs[name] = rng.integers(-end if name == "t" and "g" in made.inputs else 0, end, held.shape, held.dtype)
    return inputs


@pytest.mark.parametrize(("rows", "n", "kind"), [(3, 64, "int64"), (37, 64, "int32"), (37, 100, "int64")])
def test_bags_of_rows(rows: int, n: int, kind: str) -> None:
    made = bags(rows, n, LARGE // 64, 9, kind)
    assert "ask_for(&" in text(made) and f"+ 4 < {rows}" in text(made)
    given = some(made, np.random.default_rng(rows))
    (got,), (want,) = run(made, given), interpret(made, given)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_threads_that_share_rows_ask_for_their_own_columns() -> None:
    made = bags(300, 256, LARGE // 64, 64)
    assert "ask_for(&" in text(made) and "i1_low" in text(made).split("ask_for(&")[1].split(";")[0]
    given = some(made, np.random.default_rng(1))
    (got,), (want,) = run(made, given), interpret(made, given)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_an_embedding_is_the_tables_rows() -> None:
    made = loops.embedding(41, 64, LARGE // 64)
    assert "ask_for(&" in text(made)
    given = some(made, np.random.default_rng(2))
    assert np.array_equal(run(made, given)[0], given["w"][given["t"]])


def test_nothing_is_asked_for_of_small_tables_short_rows_or_rows_in_another_order() -> None:
    assert "ask_for" not in text(loops.embedding(41, 64, LARGE // 64 - 1))
    assert "ask_for" not in text(loops.embedding(41, 15, LARGE))
    b, i1 = Body(), var("i1")
    token = b.put(Load("t", as_index(40) - I0, "int64"))
    stores = [Store("y", I0 * 64 + i1, b.load("w", var(f"v{token}") * 64 + i1))]
    table = ("float32", (LARGE // 64, 64))
    backwards = program(b, (41, 64), (), stores, t=("int64", (41,)), w=table, y=("float32", (41, 64)))
    assert "ask_for" not in text(backwards)
