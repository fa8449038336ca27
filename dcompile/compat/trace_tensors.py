"""Rebuild the fake tensors of a cached trace from rows of their layouts.

Arithmetic on symbolic sizes makes a fake tensor slow: 1.1 ms in a storage that others share, 0.3 ms in its own (CPU
time, torch 2.13). A graph of 16 layers has 3000 symbolic tensors with 25 layouts. Inside a graph, no stage after
partitioning asks which tensors share memory, so one tensor stands for all of a layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from dcompile.compat.tensors import fake_copy, fake_memory, fake_tensor, meta_tensor
from dcompile.compat.trace_expressions import Record
from dcompile.ir.index import element_span


class FakeTensors:
    """The fake tensors of one record, made at their first use. Use it outside fake tensor modes.

    `rows`: (storage, dtype, device, shape, strides, offset) of each. `storages`: bytes of each storage. `number`
    returns the number that a record stands for. `boundary`: storages of inputs and results, which stay apart; None
    for all.
    """

    def __init__(
        self,
        mode: Any,
        rows: Sequence[Record],
        storages: Sequence[Record],
        number: Callable[[Record], Any],
        boundary: Collection[int] | None,
    ) -> None:
        self._mode, self._rows, self._bytes, self._number = mode, rows, storages, number
        self._boundary = range(len(storages)) if boundary is None else boundary
        self._holders = Counter(row[0] for row in rows)
        self._storages: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._prototypes: dict[str, tuple[Any, bool]] = {}
        self._inside: dict[str, Any] = {}
        """Layout -> the tensor that stands for all of it inside the graph."""

    def tensor(self, number: int, dtype: torch.dtype) -> Any:
        """Return a fake tensor, the same one for equal numbers."""
        if number not in self._made:
            self._made[number] = self._make(self._rows[number], dtype)
        return self._made[number]

    def _make(self, row: Record, dtype: torch.dtype) -> Any:
        if row[0] in self._boundary:
            return self._separate_tensor(row, dtype)
        layout = self._layout_key(row)
        if layout not in self._inside:
            prototype, _ = self._prototype(row, dtype)
            self._inside[layout] = fake_copy(self._mode, prototype, torch.device(row[2]))
        return self._inside[layout]

    def _layout_key(self, row: Record) -> str:
        return repr((row[1:], self._bytes[row[0]]))

    def _separate_tensor(self, row: Record, dtype: torch.dtype) -> Any:
        """Return a tensor that shares memory with those alone with which it was recorded."""
        storage, _, device, shape, strides, offset = row
        nbytes, place = self._bytes[storage], torch.device(device)
        if not all(isinstance(number, int) for number in (nbytes, offset, *shape, *strides)):
            _, fills = self._prototype(row, dtype)
        else:
            fills = offset == 0 and nbytes == element_span(shape, strides) * dtype.itemsize
        alone = fills and self._holders[storage] == 1  # half the time if nothing shares the storage
        if not alone and storage not in self._storages:
            self._storages[storage] = fake_memory(self._number(nbytes))
        memory = None if alone else self._storages[storage]
        return fake_tensor(self._mode, dtype, place, memory, *self._layout(row))

    def _layout(self, row: Record) -> tuple[Any, list[Any], list[Any]]:
        _, _, _, shape, strides, offset = row
        return self._number(offset), [*map(self._number, shape)], [*map(self._number, strides)]

    def _prototype(self, row: Record, dtype: torch.dtype) -> tuple[Any, bool]:
        """Return a meta tensor of a row's layout, and whether it spans its storage."""
        nbytes = self._bytes[row[0]]
        key = self._layout_key(row)
        if key not in self._prototypes:
            offset, shape, strides = self._layout(row)
            whole, known = meta_tensor(dtype, None, 0, shape, strides), self._number(nbytes)
            fills = row[-1] == 0 and str(whole.untyped_storage().nbytes()) == str(known)
            made = whole if fills else meta_tensor(dtype, fake_memory(known), offset, shape, strides)
            self._prototypes[key] = made, fills
        return self._prototypes[key]
