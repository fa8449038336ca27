"""Column reductions: in what blocks of rows they are added up, and which are collected in the result itself."""

from __future__ import annotations

import math

from dcompile.ir.index import Size

SCRATCH_BYTES = 1 << 20
"""Largest column reduction that each thread does in memory of its own."""
SPARSE = 1
"""Elements that blocks of rows may have to be added up, for each that is taken in: bags of embeddings, of which there
were four, took 2.6 times as long as in place (1 MB)."""


def rows_of_block(rows: int) -> int:
    """How many rows are added up before they are added to the others."""
    return max(min(max(64, math.isqrt(rows)), rows // 64), 1)


def collects_in_place(rows: Size, points: Size, count: Size, itemsize: int) -> bool:
    """Is a result of `count` elements too large for memory of each thread, or for the points that are added to it?

    To add up blocks of rows would then take longer than the rows: a scatter of 1 MB into as much took 5 times as long.
    """
    if not isinstance(count, int) or count * itemsize > SCRATCH_BYTES:
        return True
    if not isinstance(rows, int) or not isinstance(points, int) or not rows:
        return False
    return math.ceil(rows / rows_of_block(rows)) * count > SPARSE * points
