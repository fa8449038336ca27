"""Gradients of sharded parameters that are still to be reduced: kept by one backward, or one program, for the next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from dcompile.collectives.contract import ShardUnit
from dcompile.compat.tensors import backward_task
from dcompile.errors import DcompileError


@dataclass(eq=False)
class DeferredGradients:
    """By unit: sums on this rank, with their padding, in the dtype that they are reduced in."""

    units: Mapping[int, ShardUnit]
    whole: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Of backwards that were not to reduce them."""
    partial: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Shards that have been reduced, but not among replicas yet."""
    real: set[int] = field(init=False, default_factory=set)
    """Units of which there is a gradient among what is kept, not only zeros for one that is absent."""
    _begun: dict[tuple[int, int], torch.Tensor] = field(init=False, default_factory=dict)
    """(backward, unit) -> what it has come to so far, to which another program of it is going to add."""
    _given_back: bool = field(init=False, default=False)

    def keep(self, full: Mapping[int, torch.Tensor], later: Collection[int] = (), absent: Collection[int] = ()) -> None:
        """Add up gradients that are not to be reduced yet. To those of units in `later`, this backward has more.

        There are none of those in `absent`: they are zeros.
        """
        self.real.update(number for number in full if number not in absent)
        for number, tensor in full.items():
            own = self._with_begun(number, tensor.clone())
            if number in later:
                self._begun[backward_task(), number] = own
            else:
                kept = self.whole.get(number)
                self.whole[number] = own if kept is None else kept.add_(own)

    def add_to(self, number: int, tensor: torch.Tensor) -> None:
        """Add all that is kept of a unit to a gradient to be reduced: as autograd, this backward's first."""
        self.real.discard(number)
        self._with_begun(number, tensor)
        if number in self.whole:
            tensor.add_(self.whole.pop(number))

    def _with_begun(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Add what the backward has come to so far, and round the sum as autograd would."""
        begun, dtype = self._begun.pop((backward_task(), number), None), self.units[number].dtype
        if begun is not None:
            tensor.add_(begun)
            if dtype != tensor.dtype:
                tensor.copy_(tensor.to(dtype))
        return tensor

    def end(self) -> None:
        """A backward is through: what it has begun is all that there is."""
        task = backward_task()
        numbers = [number for of, number in self._begun if of == task]
        absent = [number for number in numbers if number not in self.real]
        self.keep({number: self._begun.pop((task, number)) for number in numbers}, absent=absent)
        if self._given_back:
            self.give_back()

    def holds(self, numbers: Iterable[int]) -> bool:
        """Whether something of these units is kept."""
        kept = {number for _, number in self._begun} | self.whole.keys() | self.partial.keys()
        return any(number in kept for number in numbers)

    def forget_failed(self) -> None:
        """Outside of any backward: drop what those have begun that ended with an error."""
        if backward_task() < 0:
            self._begun.clear()
            self.real &= self.whole.keys()

    def give_back(self) -> None:
        """Leave FSDP all of it, and what backwards that are still to come keep."""
        self._given_back = True
        if self.partial:
            names = ", ".join(self.units[number].name for number in sorted(self.partial))
            raise DcompileError(
                f"dcompile: FSDP is to reduce gradients itself from here on, and those of {names} are summed up among "
                "some ranks only (set_requires_all_reduce); give this model options={'distributed': 'stock'}"
            )
        while self.whole:
            number, whole = self.whole.popitem()
            if number in self.real:
                self.units[number].take_back(whole)
