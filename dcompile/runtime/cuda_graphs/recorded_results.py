"""Classify the results of a recorded run: inputs, their slots, gradient buckets, or memory of the recording's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dcompile.runtime.cuda_graphs.collectives import RecordedCall
from dcompile.runtime.cuda_graphs.recording import (
    COPY_BYTES,
    CopiedInput,
    RecordedResult,
    ResultMemory,
    ResultRetention,
)


class ResultSorter:
    """Classify the results of a recorded run, and collect their memory.

    `stay`: positions of the fixed inputs whose memory was not freed during the run. Freed memory may hold a result now.
    """

    def __init__(
        self, stay: Sequence[int], args: Sequence[Any], slots: Sequence[CopiedInput], pool: int, call: RecordedCall
    ) -> None:
        self._pool = pool
        self._buckets = {memory.flat.untyped_storage().data_ptr(): name for name, memory in call.memories.items()}
        self._inputs = {args[i].untyped_storage().data_ptr(): i for i in reversed(stay)}
        self._args = args
        self._by_address: dict[int, ResultMemory] = {}
        self._slots = {slot.tensor.untyped_storage().data_ptr(): slot for slot in slots}
        self._virtual = {id(args[i]): i for i in stay if is_virtual(args[i])}
        self._seen: dict[ResultMemory, None] = {}

    @property
    def memories(self) -> tuple[ResultMemory, ...]:
        """Memory that the caller may come to hold."""
        return tuple(self._seen)

    def settle(self) -> None:
        """Note reference counts, once nothing else holds the results of the recorded run."""
        for memory in self._by_address.values():
            memory.settle()

    def result(self, value: Any, kept: ResultRetention | None, earlier: int | None) -> RecordedResult:
        """Describe a result. `kept`: what is known of its users, if it has any; `earlier`: position of the same one."""
        if not isinstance(value, torch.Tensor):
            return RecordedResult("value", value)
        if earlier is not None:
            return RecordedResult("again", earlier)
        storage = value.untyped_storage()
        position = self._inputs.get(storage.data_ptr()) if storage.nbytes() else self._virtual.get(id(value))
        if position is not None:
            return _view_of(position, self._args[position], value)
        slot = self._slots.get(storage.data_ptr()) if storage.nbytes() else None
        if slot is not None and kept is not None:  # a saved one is read from the slot
            return _view_of(slot.position, slot.tensor, value)
        bucket = self._buckets.get(storage.data_ptr())
        if bucket is not None:
            return RecordedResult("bucket", bucket, 0, tuple(value.shape), value.stride(), int(value.storage_offset()))
        # empty results have no address that they could share
        address = storage.data_ptr() if storage.nbytes() else -1 - len(self._by_address)
        memory = self._by_address.get(address)
        if memory is None:
            memory = self._by_address[address] = ResultMemory(storage, self._pool, pinned=slot is not None)
        if kept is not None and storage.nbytes() <= COPY_BYTES:
            return RecordedResult("copy", memory, memory.add(value))
        self._seen[memory] = None
        memory.kept = memory.kept or kept
        return RecordedResult("memory", memory, memory.add(value), kept=kept)


def position_in_results(results: Sequence[Any], number: int, users: int) -> int | None:
    """Position of an earlier user result that is the same tensor, or None."""
    earlier = range(number) if number < users else ()
    return next((place for place in earlier if results[place] is results[number]), None)


def _view_of(position: int, source: torch.Tensor, value: torch.Tensor) -> RecordedResult:
    """Result that is a view of `source`: the input at this position, or the slot that holds its copy."""
    offset = value.storage_offset() - source.storage_offset()
    return RecordedResult("input", position, 0, tuple(value.shape), value.stride(), int(offset))


def is_virtual(tensor: torch.Tensor) -> bool:
    """Whether it represents a sharded parameter: full shape, without memory."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
