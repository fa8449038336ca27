"""Sum a parameter's gradients from several programs of one backward in the memory of the first one.

Autograd would sum them into new memory, together with gradients from outside of the programs, which nothing has
reduced. In the first program's memory such an addition shows: `.grad` is then another tensor than that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

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
            gradient = first.gradient(number)
            if number in self._later:
                yield number, sum((run.gradient(number) for run in self._later[number]), gradient)
            elif differs(number, gradient.data_ptr()):
                yield number, gradient
