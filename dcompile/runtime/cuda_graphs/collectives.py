"""One call of a program that may be recorded: its collectives, which a replay carries out without Python.

Python has work of its own around them: memory of buckets is chosen before, gradients are handed on after. A call
does that part for recordings and replays alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dcompile.collectives.contract import AnySource, BucketSource, ShardSource
from dcompile.ir.nodes import Bucket

Once = Callable[[AnySource | None, bool], list[Any]]
"""Runs the program on a source of collectives; `sync` as in `collectives.params.Executable`."""


class RecordedCall(Protocol):
    """What surrounds one call of a program."""

    key: tuple[Any, ...]
    """A recording serves calls with equal keys."""
    sync: bool
    communicates: bool
    """Whether collectives are part of a recording."""

    @property
    def memories(self) -> dict[str, Any]:
        """Memory of gradient buckets, by name."""

    def run(self, once: Once) -> list[Any]:
        """Run it, to be recorded; its results, and behind them what `happened` wants of each replay."""

    def happened(self, results: list[Any]) -> None:
        """A replay has carried out the collectives: do what is left, and take what is not the caller's off the end."""


class PlainCall:
    """Without collectives."""

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
    """With gradient buckets, and the memory that they have in this call: a `BucketSource` to record with."""

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
    """With sharded parameters: gathers read shards where they lie, reduced shards are handed on after each replay."""

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
    """What surrounds this call; or why it runs without a recording, since it does not do the same each time."""
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
