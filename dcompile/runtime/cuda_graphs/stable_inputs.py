"""Inputs of a recorded program that turn out not to move: a later recording reads them where they lie.

Parameters say that they stay. Gradients that a compiled optimizer reads do not, though an allocator that is asked for
the same sizes in the same order each step puts them where they were: copying them took 1.3 ms of a 1B Llama's step on
an H200.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dcompile.runtime.cuda_graphs.recording import CopiedInput

WATCHED_CALLS = 3
"""Replays after which an input that has not moved is expected to stay. The first steps of a run allocate unlike later
ones; a guess that proves wrong costs one more recording, and there are two at most."""
COPY_US, BYTES_A_US = 2.0, 2_000_000
"""What a copy takes on an H200: to start it, and the bytes that it moves in a microsecond."""
WORTH_US = 20.0
"""Copies in a call from which their end is worth one more recording, which takes some tenths of a second."""


class StableInputDetector:
    """The copied inputs of calls that share their recordings: watched for a while, and then known to stay or not."""

    def __init__(self) -> None:
        self.still: dict[int, int] = {}
        """Addresses of inputs that are expected to stay, by position."""
        self._left = WATCHED_CALLS
        self._seen: dict[int, int] | None = None
        self._wrong = False

    def look(self, args: Sequence[Any], slots: Sequence[CopiedInput]) -> bool:
        """See where the inputs of one more replay lie; whether it is now known that some of those in slots stay."""
        if self._left == 0:
            return False
        self._left -= 1
        here = {slot.position: args[slot.position].data_ptr() for slot in slots}
        seen = here if self._seen is None else self._seen
        self._seen = {position: address for position, address in seen.items() if here.get(position) == address}
        spared = sum(COPY_US + slot.tensor.nbytes / BYTES_A_US for slot in slots if slot.position in self._seen)
        if self._left == 0 and spared >= WORTH_US:
            self.still = self._seen
        return bool(self.still)

    def staying(self, args: Sequence[Any]) -> Collection[int]:
        """Positions of those of these inputs that a recording may count on."""
        moved = {known for known, address in self.still.items() if args[known].data_ptr() != address}
        if moved:  # the guess was wrong: copied from now on, at the second time with all the others
            self.still = {} if self._wrong else {k: a for k, a in self.still.items() if k not in moved}
            self._wrong = True
        return self.still.keys()
