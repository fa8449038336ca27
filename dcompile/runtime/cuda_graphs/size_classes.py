"""Select the sizes of a program that have a CUDA graph, where sizes vary: one size of each class."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Sequence

MAX_CLASSES = 8
"""Maximum number of classes with graphs in one program under `auto`, which has no largest class."""
MIN_CALLS_TO_REPLACE = 8
"""Calls of a size before it replaces the recorded size of its class, if that one is not called meanwhile."""


class SizeClasses:
    """Size classes of one program. `bounds`: largest size of each class, ascending; empty: powers of two."""

    def __init__(self, bounds: Sequence[int] = ()) -> None:
        self._bounds = sorted(bounds)
        self._limit = len(bounds) or MAX_CLASSES
        self._recorded: dict[tuple[int, ...], Hashable] = {}
        """Class -> key of the calls with graphs."""
        self._others: dict[tuple[int, ...], Counter[Hashable]] = {}
        """Class -> keys of other calls, and their number since the last call with graphs."""

    def bound(self, size: int) -> int | None:
        """Return the largest size of a size's class; None if the size is larger than all."""
        if not self._bounds:
            return 1 << max(size - 1, 0).bit_length()
        place = bisect.bisect_left(self._bounds, size)
        return self._bounds[place] if place < len(self._bounds) else None

    def admit(self, sizes: Sequence[int], key: Hashable) -> tuple[bool, Hashable | None]:
        """Return whether a call of these sizes may have a graph, and the key of the calls that it replaces."""
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
