"""Compiled once, by the first rank that comes to a graph, and sent to the others through the group's store.

A rank claims a graph by its key when it comes to it: then it compiles it and gives it to those that come later. So
nobody waits for a program that no rank is about to send, whichever graphs a rank makes alone, and in which order.
Nothing that is sent depends on a rank. What a rank runs is from its own cache directory, or has come from another rank
through the job's store, with the SHA-256 that this one gave: the store is the boundary of trust, as it is for torch,
whose collectives find their peers by it. Nothing is unpickled; what arrives is put into the cache, and loaded from
there with all its checks.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from math import inf
from typing import Any

from dcompile.errors import BuildError
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.cache.eviction import LIBRARY_KINDS
from dcompile.runtime.coordination.heartbeat import PeerCoordinator
from dcompile.runtime.coordination.wait_policy import PeerWait
from dcompile.runtime.program.artifact import from_record, to_record

CHUNK_BYTES = 1 << 20
"""Bytes per value: stores refuse values of many megabytes."""
ARRIVE_S = 60.0
"""How long a rank waits for one that has claimed a graph and is alive, but does not compile."""

_FORMAT = 1


class UnusableArtifact(Exception):
    """What came through the store does not fit its checksum or its form; says what."""


class ArtifactSharing:
    """Between the ranks of one group, for the graphs of one compiled model."""

    def __init__(self, peers: PeerCoordinator, patience_s: float) -> None:
        self._peers = peers
        self._patience_s = patience_s
        self._claims: dict[str, int] = {}
        """Key -> the rank that came first."""
        self._sent: set[str] = set()

    def claim(self, key: str) -> bool:
        """Come to a graph. Whether this rank is the first to do so: then it compiles it, and gives it to the others."""
        if key not in self._claims:
            mine = str(self._peers.rank)
            found = self._peers.store.compare_set(f"claim/{key}", "", mine).decode() or mine
            self._claims[key] = int(found)
        return self._claims[key] == self._peers.rank

    def let_pass(self, ahead: str, key: str) -> None:
        """Let the rank that has claimed `ahead` come to `key` first, if it captures or compiles now."""
        rank = self._claims.get(ahead, self._peers.rank)
        if rank == self._peers.rank or key in self._claims:
            return
        others, pause = PeerWait(self._peers, inf, [rank]), 0.001
        while not self._peers.store.check([f"claim/{key}"]):
            self._peers.check()
            others.look()
            if not others.compiles(rank):
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def give(self, key: str, cache: KernelCache) -> None:
        """Send a graph that this rank has claimed, from the cache, and its libraries. An incomplete one is not sent."""
        if key in self._sent or not self.claim(key):
            return
        self._sent.add(key)
        found = cache.find_graph(key)
        if found is None:
            self.fail(key)
            return
        graph, libraries = found
        files = {path.name: path for path in libraries.values()}
        entry = {
            "format": _FORMAT,
            "graph": to_record(graph),
            "libraries": {graph.kernels[name]: path.name for name, path in libraries.items()},
            "chunks": {name: self._put(f"library/{name}", path.read_bytes()) for name, path in files.items()},
        }
        data = json.dumps(entry).encode()
        count = self._put(f"program/{key}", data)
        self._peers.store.set(f"program/{key}", f"{count} {hashlib.sha256(data).hexdigest()}")

    def fail(self, key: str) -> None:
        """This rank has nothing to send for a graph, if it has claimed it: the others compile it."""
        if self.claim(key):
            self._peers.store.set(f"program/{key}", "none")

    def _put(self, place: str, data: bytes) -> int:
        packed = zlib.compress(data, 1)
        count = -(-len(packed) // CHUNK_BYTES)
        if place not in self._sent:
            self._sent.add(place)
            for number in range(count):
                self._peers.store.set(f"{place}/{number}", packed[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
        return count

    def receive(self, key: str, cache: KernelCache) -> tuple[int | None, str]:
        """Put what another rank, which has claimed it, compiled into this rank's cache: how many kernels came.

        Or None, and why nothing did. Waits while that rank captures or compiles.
        """
        giver = self._claims[key]
        others = PeerWait(self._peers, ARRIVE_S, [giver], patience_s=self._patience_s)
        pause = 0.001
        while not self._peers.store.check([f"program/{key}"]):
            self._peers.check()
            others.look()
            if others.last(giver) is not None and not others.alive(giver):
                return None, others.describe([giver])
            if others.out_of_patience([giver]):
                return None, f"waiting took too long: {others.describe([giver])}"
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        said = self._peers.store.get(f"program/{key}").decode()
        if said == "none":
            return None, f"rank {giver} could not send it"
        try:
            return self._take(key, said, cache), ""
        except (UnusableArtifact, BuildError, OSError) as error:
            return None, f"from rank {giver}: {error}"
        except (KeyError, TypeError, ValueError, AttributeError):
            return None, f"rank {giver} sent a graph in a form that is not understood"

    def _take(self, key: str, said: str, cache: KernelCache) -> int:
        entry = self._entry(key, said)
        kernels: dict[str, list[str]] = {}
        for kernel, file in entry["libraries"].items():
            kernels.setdefault(file, []).append(kernel)
        received = 0
        for file, keys in kernels.items():
            if all(cache.find(kernel) is not None for kernel in keys):
                continue
            digest, dot, kind = file.partition(".")
            if f"{dot}{kind}" not in LIBRARY_KINDS or not re.fullmatch("[0-9a-f]{64}", digest):
                raise UnusableArtifact(f"a library of an unknown kind came, {file[:80]}")
            cache.take(keys, self._get(f"library/{file}", entry["chunks"][file], digest), digest, f"{dot}{kind}")
            received += len(keys)
        cache.put_graph(key, from_record(entry["graph"]))
        return received

    def _entry(self, key: str, said: str) -> Any:
        match = re.fullmatch("([0-9]{1,6}) ([0-9a-f]{64})", said)
        if match is None:
            raise UnusableArtifact("it was announced in a form that is not understood")
        try:
            entry = json.loads(self._get(f"program/{key}", int(match[1]), match[2]))
            known = entry["format"] == _FORMAT
        except (ValueError, KeyError, TypeError) as error:
            raise UnusableArtifact("a graph came in a form that is not understood") from error
        if not known:
            raise UnusableArtifact(f"a graph came in format {entry['format']}, this dcompile reads {_FORMAT}")
        return entry

    def _get(self, place: str, chunks: int, digest: str) -> bytes:
        packed = b"".join(self._peers.store.get(f"{place}/{number}") for number in range(chunks))
        try:
            data = zlib.decompress(packed)
        except zlib.error as error:
            raise UnusableArtifact(f"what came as {place[:40]} is damaged") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise UnusableArtifact(f"what came as {place[:40]} does not match its checksum")
        return data
