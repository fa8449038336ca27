"""Collectives of one call of a program that may be recorded; a replay carries them out without Python.

Python prepares memory of buckets before a call, and installs gradients after it. These classes do that part alike for
recordings and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dcompile.collectives.contract import AnySource, BucketSource, ShardSource
from dcompile.ir.buffers import Bucket

Once = Callable[[AnySource | None, bool], list[Any]]
"""Runs the program on a source of collectives; `sync` as in `collectives.contract.Executable`."""


class RecordedCall(Protocol):
    """Preparation and completion of one call of a program."""

    key: tuple[Any, ...]
    """Key of the call; a recording serves calls with equal keys."""
    sync: bool
    communicates: bool
    """Whether collectives are part of a recording."""

    @property
    def memories(self) -> dict[str, Any]:
        """Memory of gradient buckets, by name."""

    def run(self, once: Once) -> list[Any]:
        """Run the call while it is recorded.

        Return its results, followed by values that `happened` needs of each replay.
        """

    def happened(self, results: list[Any]) -> None:
        """Complete a replay: install gradients, count collectives, and remove internal values from `results`."""


class PlainCall:
    """Call without collectives."""

    key: tuple[Any, ...] = ()
    communicates = False

    def __init__(self, sync: bool) -> None:
        self.sync = sync
        self.memories: dict[str, Any] = {}

    def run(self, once: Once) -> list[Any]:
        return once(None, self.sync)

    def happened(self, results: list[Any]) -> None:
        del results


class BucketCall:
    """Call with gradient buckets, and their memory in this call. A recording uses it as its `BucketSource`."""

    def __init__(self, buckets: Sequence[Bucket], source: BucketSource, sync: bool) -> None:
        self.source, self.sync = source, sync
        self.memories = {bucket.name: source.acquire(bucket.name) for bucket in buckets}
        self.key: tuple[Any, ...] = (sync, *(memory.flat.data_ptr() for memory in self.memories.values()))
        self.communicates = sync and bool(self.memories)

    def run(self, once: Once) -> list[Any]:
        return once(self, self.sync)

    def happened(self, results: list[Any]) -> None:
        del results
        if self.sync:
            for bucket, memory in self.memories.items():
                self.source.replayed(bucket, memory)

    # --- as a BucketSource ---

    def acquire(self, bucket: str) -> Any:
        return self.memories[bucket]

    def scale(self, sync: bool) -> float:
        return self.source.scale(sync)

    def start(self, bucket: str, memory: Any) -> None:
        self.source.start(bucket, memory)

    def wait(self, bucket: str, memory: Any) -> None:
        self.source.wait(bucket, memory)

    def accumulated(self) -> bool:
        return False

    def replayed(self, bucket: str, memory: Any) -> None:
        raise AssertionError("a recording is no replay")


class ShardCall:
    """Call with sharded parameters: gathers read fixed addresses, and each replay's reduced shards are installed."""

    communicates = True

    def __init__(self, source: ShardSource, key: tuple[Any, ...], sync: bool) -> None:
        self.source, self.key, self.sync = source, key, sync
        self.memories: dict[str, Any] = {}

    def run(self, once: Once) -> list[Any]:
        inside = self.source.recorded()
        results = once(inside, self.sync)
        return [*results, *inside.reduced(), tuple(inside.collectives)]

    def happened(self, results: list[Any]) -> None:
        collectives = results.pop()
        first = len(results) - self.source.hand_on_count()
        reduced = results[first:]
        del results[first:]
        self.source.hand_on(reduced, collectives)


def call_of(buckets: Sequence[Bucket], source: AnySource | None, sync: bool) -> RecordedCall | str:
    """Make the preparation of this call. If the call may differ from others, return why it cannot be recorded."""
    if source is None:
        return PlainCall(sync)
    if any(bucket.carries_units for bucket in buckets):
        shards: Any = source
        key = shards.same_each_time()
        return key if isinstance(key, str) else ShardCall(shards, key, sync)
    reducer: Any = source
    if sync and reducer.accumulated():
        return "gradients of earlier backwards are added on the way"
    return BucketCall(buckets, reducer, sync)
