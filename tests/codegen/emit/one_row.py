"""Products of one row with tiles of all kinds, for Triton's interpreter."""

from __future__ import annotations

from benchmarks.gpu_one_row import product_program
from dcompile.codegen.nest.row_matmul import RowTile
from dcompile.ir.nodes import Program

CASES = {
    "whole rows": (1, 512, 20, RowTile(1, 512, 4)),
    "rows with a rest, several at a time": (1, 448, 21, RowTile(2, 512, 8)),
    "two matrices": (2, 448, 21, RowTile(4, 512, 2)),
}
"""Name -> matrices, depth, columns, tile."""


def case(name: str) -> Program:
    """The program of a case."""
    matrices, depth, columns, _ = CASES[name]
    return product_program(matrices, depth, columns)
