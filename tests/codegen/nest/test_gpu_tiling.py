"""Tiles of GPU loops: neighbours in memory are threads side by side."""

from __future__ import annotations

import pytest

from dcompile.codegen.nest.gpu_tiling import make_plan
from dcompile.ir.index import var
from dcompile.ir.nodes import Store
from tests.codegen.emit import loops


def test_few_channels_of_a_group_lie_side_by_side():
    """An image of 128 channels, channels-last, less a mean for each group of 4: pixels are 128 apart."""
    body = loops.Body()
    place = var("i0") * 4 + var("i1") * 128 + var("i2")
    x, mean = body.load("x", place), body.load("mean", var("i0"))
    store = Store("y", place, body.op("sub", x, mean))
    whole, groups = ("float32", (4096 * 128,)), ("float32", (32,))
    program = loops.program(body, (32, 4096, 4), (), [store], x=whole, y=whole, mean=groups)
    plan = make_plan(program.steps[0])
    assert plan.kind == "flat"
    assert [axis.size for axis in plan.dims[0].axes] == [4096, 32, 4], "by addresses"


@pytest.mark.parametrize("positions", [3, 9])
def test_short_runs_are_transposed_in_tiles_of_all_of_them(positions):
    plan = make_plan(loops.channels_last(40, 200, positions).steps[0])
    y, x = plan.dims
    assert plan.kind == "turn" and [axis.size for axis in (*plan.batch, *y.axes, *x.axes)] == [40, positions, 200]
    assert y.block >= positions and y.block * x.block <= 2048


def test_short_runs_apart_stay_in_address_order():
    """Pairs, long runs and a few channels are other cases."""
    assert make_plan(loops.channels_last(40, 200, 2).steps[0]).kind == "flat"
    assert make_plan(loops.channels_last(40, 32, 9).steps[0]).kind == "flat"
    assert make_plan(loops.channels_last(40, 200, 16).steps[0]).dims[0].block == 16


def test_columns_of_a_transposed_matrix_are_tiled_for_both():
    """Rows are neighbours where the matrix is read, and columns where it is stored."""
    (loop,) = loops.transposed_sum(4096, 1152, "bfloat16").steps
    x, r = make_plan(loop).dims
    assert (x.block, r.block) == (32, 64)


@pytest.mark.parametrize(("function", "rows"), [("exp", 16), ("tanh", 8)])
def test_threads_have_fewer_elements_where_functions_are_long(function, rows):
    """384 columns are three tiles of 128: two of 256 would leave a quarter of the threads without work."""
    plan = make_plan(loops.scaled_images(4, 1024, 384, function=function).steps[0])
    assert ([dim.block for dim in plan.dims], plan.warps) == ([rows, 128], 4)


@pytest.mark.parametrize(("width", "columns"), [(96, 32), (64, 64), (768, 256), (25, 128), (288, 32)])
def test_columns_of_a_tile_are_of_one_piece(width, columns):
    """Its program then tests once which of the stacked tensors it reads."""
    plan = make_plan(loops.stacked_sum(4096, 3, width).steps[0])
    assert (plan.kind, plan.dims[1].block) == ("columns", columns)
