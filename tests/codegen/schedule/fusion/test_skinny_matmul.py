"""Choices for products of few rows: tiles, and the library's calls with a loop that uses their results."""

from __future__ import annotations

import numpy as np
import pytest

from dcompile.codegen.lower.rules import small_matmul as rule
from dcompile.codegen.schedule.fusion.matmul_epilogue import (
    LIBRARY,
    choose_skinny_matmuls,
    kind_of,
    library_form,
    skinny_loops,
)
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Extern, Loop, Tile
from dcompile.ir.verify import verify
from tests.codegen.emit import products, skinny


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "MIN_TILED_ELEMENTS", 0)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("two rows", [Extern]),
        ("residual", [Extern, Loop]),
        ("gate and up", [Extern, Extern, Loop]),
        ("two inputs", [Extern, Extern, Loop]),
        ("a part of wider rows", [Extern]),
    ],
)
def test_the_library_computes_the_same(name, kinds):
    before = skinny.case(name)
    chosen = dict.fromkeys(skinny_loops(before), LIBRARY)
    after = choose_skinny_matmuls(before, chosen)
    verify(after)
    assert [type(step) for step in after.steps] == kinds
    given = products.inputs(before)
    (want,), (got,) = (interpret(program, given, products.MEANINGS) for program in (before, after))
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1.6e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["bias and gelu", "by heads"])
def test_what_would_be_rounded_twice_or_has_no_rows_stays_a_loop(name):
    (loop,) = skinny.case(name).steps
    assert library_form(loop, skinny.case(name).table) is None


def test_a_tile_is_chosen_by_what_a_loop_computes_whatever_its_names_and_tile():
    before = skinny.case("gate and up")
    (loop,) = before.steps
    tile = Tile(8, 16, 64, 4, 5)
    after = choose_skinny_matmuls(before, {kind_of(loop): tile})
    assert after.steps[0].tile == tile and kind_of(after.steps[0]) == kind_of(loop)
    assert choose_skinny_matmuls(before, {}) is before
