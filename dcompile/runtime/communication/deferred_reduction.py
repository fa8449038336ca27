"""Keep gradients of sharded parameters that one backward, or one program, leaves for a later one to reduce."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from dcompile.collectives.contract import ShardUnit
from dcompile.compat.autograd import backward_task
from dcompile.errors import DcompileError


@dataclass(eq=False)
class DeferredGradients:
    """Unreduced gradients by unit: padded sums on this rank, in the dtype of the reduction."""

    units: Mapping[int, ShardUnit]
    whole: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Whole units from backwards that did not reduce them."""
    partial: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """Shards that are reduced among the ranks of a shard group, but not yet among replicas."""
    real: set[int] = field(init=False, default_factory=set)
    """Units of which a kept sum contains a gradient, and not only the zeros of an absent one."""
    _begun: dict[tuple[int, int], torch.Tensor] = field(init=False, default_factory=dict)
    """(backward, unit) -> the sum so far, to which another program of the same backward adds."""
    _given_back: bool = field(init=False, default=False)

    def keep(self, full: Mapping[int, torch.Tensor], later: Collection[int] = (), absent: Collection[int] = ()) -> None:
        """Accumulate gradients that are not reduced yet.

        `later`: units of which this backward computes more. `absent`: units whose gradients are only zeros.
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
        """Add all kept sums of a unit to a gradient before its reduction, this backward's first, as autograd does."""
        self.real.discard(number)
        self._with_begun(number, tensor)
        if number in self.whole:
            tensor.add_(self.whole.pop(number))

    def _with_begun(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """Add this backward's sum so far, and round the result as autograd would."""
        begun, dtype = self._begun.pop((backward_task(), number), None), self.units[number].dtype
        if begun is not None:
            tensor.add_(begun)
            if dtype != tensor.dtype:
                tensor.copy_(tensor.to(dtype))
        return tensor

    def end(self) -> None:
        """End a backward: its sums so far are complete."""
        task = backward_task()
        numbers = [number for of, number in self._begun if of == task]
        absent = [number for number in numbers if number not in self.real]
        self.keep({number: self._begun.pop((task, number)) for number in numbers}, absent=absent)
        if self._given_back:
            self.give_back()

    def holds(self, numbers: Iterable[int]) -> bool:
        """Whether gradients of any of these units are kept."""
        kept = {number for _, number in self._begun} | self.whole.keys() | self.partial.keys()
        return any(number in kept for number in numbers)

    def forget_failed(self) -> None:
        """Drop partial sums of backwards that ended with an error. Has an effect only outside of any backward."""
        if backward_task() < 0:
            self._begun.clear()
            self.real &= self.whole.keys()

    def give_back(self) -> None:
        """Pass all kept gradients to FSDP, and those that later backwards keep.

        Raises DcompileError for partly reduced ones.
        """
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
