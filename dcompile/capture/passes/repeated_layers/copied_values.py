"""Fake values of the operations of copied layers, which share memory as in the layer that they are copied from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.capture.passes.repeated_layers.shown_results import Place


@dataclass(frozen=True)
class MemoryOwner:
    """A value of a layer, which owns memory."""

    layer: int
    """Index among the traced layers."""
    place: Place
    number: int
    """Position among several results of one operation."""
    dtype: torch.dtype


class CopiedValues:
    """Fake values of copied nodes, which share memory with each other as those of the traced layer do."""

    def __init__(
        self,
        owners: Mapping[int, MemoryOwner | None],
        traced: Sequence[int],
        nodes: Mapping[tuple[int, Place], Node],
    ) -> None:
        """`owners`: storages of the traced graph -> who owns them. `traced`: numbers of the layers that were traced.

        `nodes`: (layer, place) -> node, of all layers, as far as they are made.
        """
        self.owners, self.traced, self.nodes = owners, traced, nodes
        self.new: dict[tuple[int, Place, int], Any] = {}
        """(layer, place, position among several results) -> its new memory."""
        self.fills: dict[tuple[Place, int], bool] = {}
        """(place, position among several results) -> whether such a value has all of its memory."""

    def of(self, value: Any, layer: int, place: Place, like: int) -> Any:
        """Return the value in `layer` that corresponds to the value at this place of the traced layer `like`."""
        if isinstance(value, tuple | list):
            items = [self._tensor(item, layer, place, like, number) for number, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return self._tensor(value, layer, place, like, 0)

    def _tensor(self, tensor: Any, layer: int, place: Place, like: int, number: int) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        owner = self.owners[compat.tensors.storage_key(tensor)]
        if owner is None:
            return tensor
        there = layer + owner.layer - like
        if self.traced[owner.layer] == there:
            return tensor  # it has the right memory already
        if (there, owner.place, owner.number) == (layer, place, number):
            return self._owner(tensor, layer, place, number)
        return compat.tensors.fake_like(tensor, self._memory(there, owner.place, owner.number))

    def _owner(self, tensor: Any, layer: int, place: Place, number: int) -> Any:
        """Return a tensor in memory of its own. With symbolic sizes it takes a third of the time if it fills that."""
        known = self.fills.get((place, number))
        if known is not False:
            made = compat.tensors.fake_like(tensor, None)
            if known is None:
                ours, theirs = made.untyped_storage().nbytes(), tensor.untyped_storage().nbytes()
                known = self.fills[place, number] = str((tensor.storage_offset(), ours)) == str((0, theirs))
            if known:
                self.new[layer, place, number] = made.untyped_storage()
                return made
        memory = self.new[layer, place, number] = compat.tensors.fake_memory(tensor.untyped_storage().nbytes())
        return compat.tensors.fake_like(tensor, memory)

    def _memory(self, layer: int, place: Place, number: int) -> Any:
        if (layer, place, number) in self.new:
            return self.new[layer, place, number]
        return list(tensors_of(self.nodes[layer, place].meta["val"]))[number].untyped_storage()


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors of a value, which may be several results."""
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, torch.Tensor) and item.layout == torch.strided:
            yield item
