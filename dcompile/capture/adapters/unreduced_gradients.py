"""Gradients in .grad that no compiled program has reduced: other code has added them, or an earlier no_sync step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

ParameterRefs: TypeAlias = Mapping[int, Callable[[], Any]]
"""Number of a parameter -> weak reference to it."""


def differs(refs: ParameterRefs, number: int, address: int) -> bool:
    """Is a parameter's .grad another tensor than the one at `address`?"""
    parameter = refs[number]()
    return parameter is not None and parameter.grad is not None and parameter.grad.data_ptr() != address


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
