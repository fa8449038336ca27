"""Text of products of one row: what they read before their turn."""

from __future__ import annotations

from benchmarks.gpu_one_row import product_program
from dcompile.codegen.emit.triton import kernel as triton_kernel
from dcompile.codegen.nest.row_matmul import RowTile

WEIGHTS = frozenset(("w0", "w1"))


def body(tile, matrices=1, depth=4096, constant=WEIGHTS):
    made = product_program(matrices, depth, 6144)
    (loop,) = made.steps
    text = triton_kernel.emit(loop, made.table, constant, tile).text
    return [line.strip() for line in text[text.rindex("def ") :].splitlines()[1:]]


def test_whole_rows_are_read_before_the_kernels_turn():
    lines = body(RowTile(2, 4096, 8))
    waits = lines.index("after_others_()")
    assert "tl.load(a0" in lines[waits - 1] and "tl.load(a1" in lines[waits + 1]


def test_kernels_that_start_in_turn_do_not_wait():
    assert "after_others_()" not in body(RowTile(1, 4096, 8), constant=None)


def test_matrices_are_read_once_and_give_way_in_caches():
    lines = body(RowTile(1, 4096, 8))
    assert [("evict_first" in line) for line in lines if "tl.load(" in line] == [True, False]
