"""Unshare gradients that a program returns in the same memory: one parameter's `.grad` would change with another's.

The terms of a sum (`x + a + b`) have equal gradients, which a program returns as views of one memory. Autograd makes
each tensor `.grad` that has no other reference, without regard to shared memory. The next backward then adds to the
same memory twice, and clipping scales it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

Run = Callable[[list[Any]], list[Any]]
Pair = tuple[int, int, bool]


class UnshareGradients:
    """Unshares the gradients of a graph's programs; the first call of each program finds which of them share memory."""

    def __init__(self) -> None:
        self._shared: dict[Hashable, tuple[Pair, ...]] = {}

    def of(self, program: Hashable, gradients: list[Any]) -> list[Any]:
        """Return the gradients that this program has returned, unshared."""
        if program not in self._shared:
            self._shared[program] = shared_pairs(gradients)
        return keep_apart(gradients, self._shared[program])

    def around(self, program: Hashable, run: Run) -> Run:
        """Return `run` with unshared gradients, for a program that was called before."""
        pairs = self._shared[program]
        return (lambda args: keep_apart(run(args), pairs)) if pairs else run


def shared_pairs(gradients: Sequence[Any]) -> tuple[Pair, ...]:
    """Return (position, another position, are they the same view) of gradients that share memory."""
    spans = sorted((*_span(x), place) for place, x in enumerate(gradients) if _has_memory(x))
    found, near, reach = list[Pair](), list[int](), 0
    for begin, end, place in spans:
        x = gradients[place]
        near = [] if begin >= reach else near
        holder = next((n for n in near if _overlap(gradients[n], x)), None)
        if holder is None:
            near.append(place)
        elif x is not gradients[holder]:
            found.append((place, holder, _same(x, gradients[holder])))
        reach = max(reach, end)
    return tuple(found)


def keep_apart(gradients: list[Any], pairs: Sequence[Pair]) -> list[Any]:
    """Unshare in place: equal views become one object, which autograd copies itself; others are cloned."""
    for place, other, same in pairs:
        if gradients[place] is None or gradients[other] is None:  # added to that of an earlier program
            continue
        gradients[place] = gradients[other] if same else gradients[place].clone()
    return gradients


def _has_memory(x: Any) -> bool:
    return type(x) is torch.Tensor and x.layout == torch.strided and not x.is_meta and x.numel() > 0


def _span(x: torch.Tensor) -> tuple[int, int]:
    begin = x.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (reach + 1) * x.element_size()


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """May an element of `y`, whose address is that of `x` or higher, be an element of `x`?

    Parts of one tensor, such as gradients of a concatenation's inputs, have equal strides. The offset of `y` then is a
    number of steps in each dimension. They are disjoint if it reaches the size of `x` in one. Others may overlap.
    """
    if y.data_ptr() >= _span(x)[1]:
        return False
    if x.dtype != y.dtype or x.stride() != y.stride():
        return True
    left, within, apart = (y.data_ptr() - x.data_ptr()) // x.element_size(), 1, False
    order = sorted(range(x.dim()), key=lambda dim: x.stride(dim))
    ahead = [0] * x.dim()
    for dim in reversed(order):
        if x.stride(dim):
            ahead[dim], left = divmod(left, x.stride(dim))
    for dim in order:
        size = max(x.shape[dim], ahead[dim] + y.shape[dim])
        if size > 1 and x.stride(dim) < within:
            return True  # rows reach into one another
        within += (size - 1) * x.stride(dim)
        apart |= ahead[dim] >= x.shape[dim]
    return not apart or left > 0


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    known = ((z.data_ptr(), z.dtype, z.shape, z.stride()) for z in (x, y))
    return next(known) == next(known)
