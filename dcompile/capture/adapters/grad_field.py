"""The field `.grad` where several parties add to it: other programs of one backward, and code outside compiled graphs.

Gradients from several programs of one backward are summed in the memory of the first one. Autograd would sum them into
new memory, together with gradients from outside of the programs, which nothing has reduced. In the first program's
memory such an addition shows: `.grad` is then another tensor than that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dcompile.capture.services import ReducedGradients


class MergedGradients:
    """Reduced gradients of all programs that have run in one backward."""

    def __init__(self) -> None:
        self._first: dict[int, ReducedGradients] = {}
        self._later: dict[int, list[ReducedGradients]] = {}
        """Parameter -> runs whose gradients autograd adds, as it had added another one to the first run's before."""

    def add(self, run: ReducedGradients, results: list[Any], grads: Iterable[tuple[int, int]]) -> None:
        """Add a run's results to earlier ones and replace them by None, where possible, before autograd gets them.

        `grads`: (position of a result, parameter number).
        """
        grads = [(place, number) for place, number in grads if number in run and results[place] is not None]
        run.lay_out(results, [(place, number) for place, number in grads if number not in self._first])
        again: dict[int, list[tuple[int, int]]] = {}
        for place, number in grads:
            first = self._first.setdefault(number, run)
            if first is not run:
                again.setdefault(id(first), []).append((place, number))
        for pairs in again.values():
            first = self._first[pairs[0][1]]
            intact = first.intact(number for _, number in pairs)
            for place, number in pairs:
                if number in intact and number not in self._later:
                    first.gradient(number).add_(results[place])
                    results[place] = None
                else:
                    self._later.setdefault(number, []).append(run)
        run.hand_on()

    def outside(self, differs: Callable[[int, int], bool], but: Collection[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the parameters to which something else was added, with the sum of their reduced gradients.

        `differs`: whether a parameter's `.grad` is another tensor than the one at an address. `but`: numbers to skip.
        """
        for number, first in self._first.items():
            if number in but:
                continue
            if number in self._later:
                yield number, sum((run.gradient(number) for run in self._later[number]), first.gradient(number))
            elif differs(number, first.address(number)):
                yield number, first.gradient(number)


ParameterRefs: TypeAlias = Mapping[int, Callable[[], Any]]
"""Number of a parameter -> weak reference to it."""


def differs(refs: ParameterRefs, number: int, address: int) -> bool:
    """Is a parameter's .grad another tensor than the one at `address`?"""
    parameter = refs[number]()
    gradient = None if parameter is None else parameter.grad
    return gradient is not None and gradient.data_ptr() != address


def is_contiguous(refs: ParameterRefs, number: int) -> bool:
    """Is this a contiguous parameter? Its `.grad` then may be a view of a bucket."""
    parameter = refs[number]()
    return parameter is not None and parameter.is_contiguous()


@dataclass(frozen=True, slots=True)
class OutsidePart:
    """What code outside the compiled graphs has added to a gradient that a program has reduced."""

    number: int
    parameter: Any
    reduced: torch.Tensor
    rest: torch.Tensor
    """The parameter's .grad without the reduced gradient."""

    def add_rest(self) -> None:
        """Write the reduced gradient and the rest, which ranks have averaged by now, to .grad."""
        self.parameter.grad.copy_(self.reduced + self.rest)


def outside_parts(refs: ParameterRefs, reduced: Mapping[int, torch.Tensor]) -> list[OutsidePart]:
    """Return what was added to each of these reduced gradients, in the order of parameters."""
    parameters = ((number, refs[number](), view) for number, view in sorted(reduced.items()))
    return [OutsidePart(number, p, view, p.grad.detach() - view) for number, p, view in parameters]


def present_gradients(refs: ParameterRefs, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
    """Return .grad of those of these parameters that are alive and have one, in order."""
    parameters = ((number, refs[number]()) for number in sorted(numbers))
    return {number: p.grad for number, p in parameters if p is not None and p.grad is not None}
