"""Products of one row and a matrix are recognized by what their nest reads and sums."""

from __future__ import annotations

import pytest

from benchmarks.gpu_one_row import product_program
from dcompile.codegen.nest.gpu_tiling import make_plan
from dcompile.codegen.nest.loop_nest import flatten_loop
from dcompile.codegen.nest.row_matmul import RowTile, choose_row_tile, find_row_matmul
from dcompile.ir.parse import parse

NORM = "a = cast(w[i0, j0], float32)\n y[i0] = cast(mul(row_sum(mul(a, a)), row_sum(a)), bfloat16)"
SOFTMAX = (
    "e = exp(sub(cast(w[i0, j0], float32), row_max(cast(w[i0, j0], float32))))\n y[i0] = cast(row_sum(e), bfloat16)"
)


def loop_of(body, space="[96] x [512]"):
    lines = ["program p(w)", "w: bfloat16[96, 512] on cuda", "y: bfloat16[96] on cuda", f"loop y {space}", body]
    (loop,) = parse("\n".join([*lines, "return (y)"])).steps
    return loop


@pytest.mark.parametrize(("matrices", "nbytes"), [(1, 2 * 512 * 96), (2, 4 * 512 * 96)])
def test_sizes_are_those_of_all_matrices(matrices, nbytes):
    (loop,) = product_program(matrices, 512, 96).steps
    found = find_row_matmul(flatten_loop(loop))
    assert found is not None and len(found.matrices) == matrices
    assert (found.columns, found.depth, found.nbytes) == (96, 512, nbytes)


def test_sums_of_any_single_pass_over_a_matrix_are_such():
    assert find_row_matmul(flatten_loop(loop_of(NORM))) is not None


@pytest.mark.parametrize(
    ("body", "space"),
    [
        (SOFTMAX, "[96] x [512]"),  # two passes
        ("y[i0] = cast(row_max(cast(w[i0, j0], float32)), bfloat16)", "[96] x [512]"),
        ("y[i0] = cast(row_sum(cast(w[j0, i0], float32)), bfloat16)", "[512] x [96]"),  # rows are not contiguous
        ("y[i0] = cast(row_sum(cast(w[0, j0], float32)), bfloat16)", "[96] x [512]"),  # the same row for all
        ("y[i0] = cast(row_sum(cast(w[i0, j0], float32)), bfloat16)", "[96] x [128]"),  # short ones
    ],
)
def test_other_loops_are_none(body, space):
    assert find_row_matmul(flatten_loop(loop_of(body, space))) is None


@pytest.mark.parametrize(("tile", "grid"), [(RowTile(2, 512, 4), 48), (RowTile(4, 512, 8), 24)])
def test_a_tile_is_the_plan(tile, grid):
    (loop,) = product_program(1, 512, 96).steps
    plan = make_plan(loop, tile)
    assert (plan.kind, plan.looped, plan.grid, plan.warps) == ("rows", False, grid, tile.warps)


@pytest.mark.parametrize("depth", [300, 5000, 13_824, 16_384, 20_000])
@pytest.mark.parametrize("matrices", range(1, 10))
def test_any_number_of_matrices_has_a_tile_with_warps_that_exist(matrices, depth):
    (loop,) = product_program(matrices, depth, 96).steps
    found = find_row_matmul(flatten_loop(loop))
    tile = choose_row_tile(found)
    assert (tile is None) == (depth > 16_384)
    plan = make_plan(loop, tile)
    assert plan.warps in (1, 2, 4, 8, 16, 32)
    assert tile is None or tile.depth >= depth
