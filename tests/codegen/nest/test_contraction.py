"""Which loops are products of few rows, and the tiles that they get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dcompile.codegen.nest import contraction
from dcompile.codegen.nest.contraction import candidate_tiles, choose_tile, find_contraction, multiplies_few_rows
from dcompile.codegen.nest.loop_nest import flatten_loop
from dcompile.ir.nodes import Load, Loop
from dcompile.ir.parse import parse


def loop(rows: int = 8, columns: int = 512, depth: int = 256, dtype: str = "bfloat16", total: str = "row_sum") -> Loop:
    """A product of few rows, whose matrix has a row for each column of the result."""
    program = parse(f"""
        program p(x, w)
          x: {dtype}[{rows}, {depth}] on cuda
          w: {dtype}[{columns}, {depth}] on cuda
          y: {dtype}[{rows}, {columns}] on cuda
        loop y [{rows}, {columns}] x [{depth}]
          y[i0, i1] = cast({total}(mul(cast(x[i0, j0], float32), cast(w[i1, j0], float32))), {dtype})
        return (y)
    """)
    (step,) = program.steps
    assert isinstance(step, Loop)
    return step


def test_rows_columns_and_depth_are_found_whatever_the_order_of_factors() -> None:
    found = find_contraction(flatten_loop(loop(8, 512, 256)))
    assert found is not None and (found.row_count, found.column_count, found.depth) == (8, 512, 256)
    (product,) = found.products
    nest = flatten_loop(loop(8, 512, 256))
    left, right = nest.body[product.left], nest.body[product.right]
    assert isinstance(left, Load) and isinstance(right, Load) and (left.buffer, right.buffer) == ("x", "w")
    assert product.dtype == "bfloat16"


@pytest.mark.parametrize(
    "other",
    [
        loop(rows=1),
        loop(rows=17),
        loop(columns=16),
        loop(depth=128),
        loop(depth=252),
        loop(dtype="float32"),
        loop(total="row_max"),
    ],
    ids=["one row", "many rows", "few columns", "short", "no whole 16 bytes", "float32", "maximum"],
)
def test_other_loops_are_none(other: Loop) -> None:
    assert not multiplies_few_rows(other)


def test_loads_along_another_axis_are_none() -> None:
    made = loop()
    turned = parse("""
        program p(x, w)
          x: bfloat16[8, 256] on cuda
          w: bfloat16[256, 512] on cuda
          y: bfloat16[8, 512] on cuda
        loop y [8, 512] x [256]
          y[i0, i1] = cast(row_sum(mul(cast(x[i0, j0], float32), cast(w[j0, i1], float32))), bfloat16)
        return (y)
    """)
    assert multiplies_few_rows(made) and not any(multiplies_few_rows(s) for s in turned.steps if isinstance(s, Loop))


def test_products_of_different_dtypes_are_none() -> None:
    program = parse("""
        program p(x, w, z, v)
          x: bfloat16[8, 256] on cuda
          w: bfloat16[512, 256] on cuda
          z: float16[8, 256] on cuda
          v: float16[512, 256] on cuda
          y: float32[8, 512] on cuda
        loop y [8, 512] x [256]
          a = row_sum(mul(cast(x[i0, j0], float32), cast(w[i1, j0], float32)))
          y[i0, i1] = add(a, row_sum(mul(cast(z[i0, j0], float32), cast(v[i1, j0], float32))))
        return (y)
    """)
    assert not any(multiplies_few_rows(step) for step in program.steps if isinstance(step, Loop))


def test_a_batch_is_tiled_if_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse("""
        program p(q, k)
          q: bfloat16[64, 4, 128] on cuda
          k: bfloat16[64, 1024, 128] on cuda
          y: float32[64, 4, 1024] on cuda
        loop y [64, 4, 1024] x [128]
          y[i0, i1, i2] = row_sum(mul(cast(q[i0, i1, j0], float32), cast(k[i0, i2, j0], float32)))
        return (y)
    """)
    (step,) = program.steps
    assert isinstance(step, Loop)
    found = find_contraction(flatten_loop(step))
    assert found is not None and [axis.size for axis in found.batch] == [64] and found.programs(64) == 1024
    monkeypatch.setattr(contraction, "MIN_BATCH_PROGRAMS", 1025)
    assert find_contraction(flatten_loop(step)) is None


@pytest.mark.parametrize("rows", [4, 11])
def test_candidates_begin_with_the_usual_tile_and_fit_shared_memory(rows: int) -> None:
    found = find_contraction(flatten_loop(loop(rows, 4096, 4096)))
    assert found is not None
    first, *others = candidate_tiles(found)
    assert first == choose_tile(found) and first not in others
    for tile in (first, *others):
        assert tile.rows >= rows
        assert tile.stages * tile.depth * (tile.columns + tile.rows) * 2 <= contraction.STAGE_BYTES
    assert replace(loop(), tile=first).tile == first
