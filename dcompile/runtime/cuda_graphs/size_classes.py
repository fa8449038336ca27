"""Which sizes of a program have a CUDA graph, where sizes vary: one of each class."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Sequence

MAX_CLASSES = 8
"""Classes of one program that have graphs under `auto`, which has no largest class."""
MIN_CALLS_TO_REPLACE = 8
"""Calls after which a size takes the place of another of its class that did not come meanwhile."""


class SizeClasses:
    """The classes of one program's sizes. `bounds`: the largest size of each, ascending; none: powers of two."""

    def __init__(self, bounds: Sequence[int] = ()) -> None:
        self._bounds = sorted(bounds)
        self._limit = len(bounds) or MAX_CLASSES
        self._recorded: dict[tuple[int, ...], Hashable] = {}
        """Class -> the key of the calls that have its graphs."""
        self._others: dict[tuple[int, ...], Counter[Hashable]] = {}
        """Class -> keys of other calls, with how often they came since the one that has graphs did."""

    def bound(self, size: int) -> int | None:
        """The largest size of the class that a size is in; None if it is larger than all."""
        if not self._bounds:
            return 1 << max(size - 1, 0).bit_length()
        place = bisect.bisect_left(self._bounds, size)
        return self._bounds[place] if place < len(self._bounds) else None

    def admit(self, sizes: Sequence[int], key: Hashable) -> tuple[bool, Hashable | None]:
        """Whether a call of these sizes may have a graph, and the key of the calls that lose theirs to it."""
        bounds = tuple(bound for size in sizes if (bound := self.bound(size)) is not None)
        if len(bounds) < len(sizes):
            return False, None
        holder = self._recorded.get(bounds)
        if holder == key:
            self._others.pop(bounds, None)
            return True, None
        if holder is None:
            free = len(self._recorded) < self._limit
            if free:
                self._recorded[bounds] = key
            return free, None
        others = self._others.setdefault(bounds, Counter())
        others[key] += 1
        if others[key] < MIN_CALLS_TO_REPLACE:
            return False, None
        del self._others[bounds]
        self._recorded[bounds] = key
        return True, holder
