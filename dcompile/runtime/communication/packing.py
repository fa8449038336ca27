"""Pack small units of a bucket into one message, and unpack them after the collective."""

from __future__ import annotations

import torch

from dcompile.ir.buffers import Bucket


def in_order(bucket: Bucket) -> list[int]:
    """Places of a bucket's units in the order of a rank's reduced shards: packed units come last, contiguously."""
    return sorted(range(len(bucket.units)), key=lambda place: (place in bucket.packed, place))


class PackedUnits:
    """Units in one message: `whole` holds, rank by rank, the rank's parts of all of them, end to end."""

    def __init__(self, units: list[torch.Tensor], ranks: int) -> None:
        self._rows = [unit.view(ranks, -1) for unit in units]
        self.whole = units[0].new_empty(sum(unit.numel() for unit in units))

    def pack(self) -> None:
        """Copy the units into the message."""
        torch.cat(self._rows, 1, out=self.whole.view(len(self._rows[0]), -1))

    def unpack(self) -> None:
        """Copy the units out of the message."""
        widths = [rows.shape[1] for rows in self._rows]
        torch.split_with_sizes_copy(self.whole.view(len(self._rows[0]), -1), widths, 1, out=self._rows)
