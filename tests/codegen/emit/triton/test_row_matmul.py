"""Text of products of one row: what they ask for before their turn."""

from __future__ import annotations

import pytest

from benchmarks.gpu_one_row import product_program
from dcompile.codegen.emit.triton import kernel as triton_kernel
from dcompile.codegen.nest.row_matmul import RowTile
from dcompile.codegen.nest.tile_plan import power_of_two

WEIGHTS = frozenset(("w0", "w1"))


def body(tile, matrices=1, depth=4096, constant=WEIGHTS):
    made = product_program(matrices, depth, 6144)
    (loop,) = made.steps
    text = triton_kernel.emit(loop, made.table, constant, tile).text
    return [line.strip() for line in text[text.rindex("def ") :].splitlines()[1:]]


def test_whole_rows_are_read_and_those_of_later_programs_prefetched():
    lines = body(RowTile(2, 4096, 8, ahead=500))
    assert lines[:5] == [
        "piece = tl.arange(0, 256)",
        "px = (tl.program_id(0) + 500) * 2 + piece // 4",
        "pi0 = px",
        "pj0 = piece % 4 * 1024",
        "prefetch_(a0 + (pj0 + pi0 * 4096), 2048, (piece < 8) & (px < 6144) & (tl.program_id(0) < 500))",
    ]
    waits = lines.index("after_others_()")
    assert "tl.load(a0" in lines[waits - 1] and "tl.load(a1" in lines[waits + 1]


def test_rows_in_steps_are_prefetched_from_their_start():
    lines = body(RowTile(4, 1024, 4, 3, early_bytes=4096), matrices=2, depth=14336)
    asked = [line for line in lines if line.startswith("prefetch_")]
    assert asked == [f"prefetch_({a} + (pj0 + pi0 * 14336), 2048, (piece < 8) & (px < 6144))" for a in ("a0", "a1")]
    assert lines.index(asked[-1]) < lines.index("after_others_()")
    assert "for r0 in tl.range(0, 14336, 1024, num_stages=3):" in lines


@pytest.mark.parametrize(("depth", "pieces", "nbytes"), [(7168, 7, 2048), (3000, 3, 2000), (296, 1, 592)])
def test_pieces_never_reach_beyond_a_row(depth, pieces, nbytes):
    lines = body(RowTile(1, power_of_two(depth), 4, ahead=1), depth=depth)
    (asked,) = (line for line in lines if line.startswith("prefetch_"))
    assert (
        asked
        == f"prefetch_(a0 + (pj0 + pi0 * {depth}), {nbytes}, (piece < {pieces}) & (px < 6144) & (tl.program_id(0) < 1))"
    )
    assert pieces * nbytes <= 2 * depth
    assert not any("prefetch_" in line for line in body(RowTile(1, 512, 4, ahead=1), depth=300))  # no whole 16 bytes


def test_kernels_that_start_in_turn_prefetch_nothing():
    assert not any("prefetch_" in line for line in body(RowTile(1, 4096, 8, ahead=500), constant=None))


def test_streamed_matrices_give_way_in_caches():
    lines = body(RowTile(1, 4096, 8, streams=True))
    assert [("evict_first" in line) for line in lines if "tl.load(" in line] == [True, False]
