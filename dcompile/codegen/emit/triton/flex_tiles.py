"""Which tiles FlexAttention's kernels have, by the width of a head and by what memory a GPU's multiprocessor has.

On an H100, 2 x 4096 positions, 1024 elements in all heads, a window of 1024: the forward and both parts of the backward
take 124, 122 and 181 us for heads of 64, 104, 124 and 167 us for heads of 128, 104, 154 and 310 us for heads of 256.
Other tiles took up to four times as long. Tiles for other GPUs need at most 99 KiB, and spill next to no registers; no
such GPU has run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlexTile:
    """Queries and keys of a tile, warps of a program, and steps whose keys are prefetched."""

    queries: int
    keys: int
    warps: int
    stages: int


Tiles = Mapping[int, tuple[FlexTile, FlexTile, FlexTile]]
"""Widest head -> tiles of the forward, of the gradients of queries, and of those of keys and values."""
_HOPPER: Tiles = {
    64: (FlexTile(64, 64, 4, 3), FlexTile(64, 64, 4, 3), FlexTile(64, 64, 4, 3)),
    128: (FlexTile(64, 64, 4, 3), FlexTile(128, 64, 8, 3), FlexTile(64, 64, 4, 2)),
    256: (FlexTile(128, 64, 8, 2), FlexTile(128, 32, 8, 2), FlexTile(64, 64, 8, 2)),
}
_OTHERS: Tiles = {
    64: (FlexTile(64, 64, 4, 3), FlexTile(64, 64, 4, 2), FlexTile(64, 64, 4, 2)),
    128: (FlexTile(64, 64, 4, 2), FlexTile(64, 64, 4, 2), FlexTile(32, 64, 4, 2)),
    256: (FlexTile(64, 32, 8, 2), FlexTile(32, 32, 4, 2), FlexTile(32, 32, 8, 2)),
}
_HAVE_MORE = (9, 10)
"""Major compute capabilities with at least 227 KiB of shared memory for a program."""


def tiles_of(width: int, arch: int | None) -> tuple[FlexTile, FlexTile, FlexTile]:
    """Return the three tiles for heads of this width. `arch`: compute capability, as 90 for 9.0; None where unknown."""
    table = _HOPPER if arch is None or arch // 10 in _HAVE_MORE else _OTHERS
    return next(tiles for widest, tiles in table.items() if width <= widest)
