"""Compile each graph once, on the first rank that reaches it, and send it to the others through the group's store.

A rank claims a graph by its key when it reaches it. It then compiles the graph and sends it to ranks that come later.
So no rank waits for a program that nobody will send, whichever graphs a rank compiles alone, and in which order.
Nothing that is sent depends on a rank.

A rank runs programs from its own cache directory, or from another rank with the SHA-256 that this one announced. The
job's store is the boundary of trust, as it is for torch, whose collectives find their peers through it. Nothing is
unpickled. A received program is put into the cache, and loaded from there with all its checks.
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
from dcompile.runtime.cache.disk import LIBRARY_KINDS, KernelCache
from dcompile.runtime.coordination.heartbeat import PeerCoordinator
from dcompile.runtime.coordination.wait_policy import PeerWait
from dcompile.runtime.program.artifact import from_record, to_record

CHUNK_BYTES = 1 << 20
"""Bytes per value: stores refuse values of many megabytes."""
MAX_BYTES = 1 << 30
"""Maximum bytes of one entry or library. A larger one is not sent or unpacked: each rank compiles for itself."""
ARRIVE_S = 60.0
"""Seconds to wait for a rank that claimed a graph and is alive, but does not compile."""

_FORMAT = 1


class UnusableArtifact(Exception):
    """A program from the store does not match its checksum or its format. The message says what."""


class ArtifactSharing:
    """Program exchange between the ranks of one group, for the graphs of one compiled model."""

    def __init__(self, peers: PeerCoordinator, patience_s: float) -> None:
        self._peers = peers
        self._patience_s = patience_s
        self._claims: dict[str, int] = {}
        """Key -> the rank that claimed it."""
        self._folders: dict[str, str] = {}
        """Key of a graph -> the cache directory of the rank that claimed it and did not have it."""
        self._sent: set[str] = set()

    def claim(self, key: str, folder: str = "") -> bool:
        """Claim a graph. `folder`: the cache directory into which this rank would compile it, as it is not there yet.

        Return whether this rank was the first: then it gives the graph to the others.
        """
        if key not in self._claims:
            mine = f"{self._peers.rank} {folder}"
            claim = self._peers.store.compare_set(f"claim/{key}", "", mine).decode() or mine
            rank, _, self._folders[key] = claim.partition(" ")
            self._claims[key] = int(rank)
        return self._claims[key] == self._peers.rank

    def is_news(self, key: str, folder: str) -> bool:
        """Whether a graph that this rank has found in `folder` was put there by another rank of this job.

        It is so once: from then on, this rank knows what is in the directory.
        """
        if self._claims[key] == self._peers.rank or self._folders[key] != folder:
            return False
        return bool(self._peers.store.add(f"loaded/{key}/{self._peers.rank}", 1) == 1)

    def let_pass(self, ahead: str, key: str) -> None:
        """Let the rank that claimed `ahead` claim `key` first, while it captures or compiles."""
        rank = self._claims.get(ahead, self._peers.rank)
        if rank == self._peers.rank or key in self._claims:
            return
        others, pause = PeerWait(self._peers, inf, [rank]), 0.001
        while not self._peers.store.check([f"claim/{key}"]):
            self._peers.check()
            others.poll()
            if not others.compiles(rank):
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def give(self, key: str, cache: KernelCache) -> None:
        """Send a claimed graph and its libraries from the cache. An incomplete one is reported as failed."""
        if key in self._sent or not self.claim(key):
            return
        self._sent.add(key)
        found = cache.find_graph(key)
        if found is None:
            self.fail(key)
            return
        graph, libraries = found
        files = {path.name: path for path in libraries.values()}
        if any(path.stat().st_size > MAX_BYTES for path in files.values()):
            self.fail(key)
            return
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
        """Report that a claimed graph will not be sent, so that the others compile it."""
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
        """Put a graph that another rank claimed and compiled into this rank's cache.

        Return the number of kernels received. Returns None and the reason if nothing came. Waits while the other rank
        captures or compiles.
        """
        giver = self._claims[key]
        others = PeerWait(self._peers, ARRIVE_S, [giver], patience_s=self._patience_s)
        pause = 0.001
        while not self._peers.store.check([f"program/{key}"]):
            self._peers.check()
            others.poll()
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
        if not isinstance(chunks, int) or not 0 <= chunks <= MAX_BYTES // CHUNK_BYTES:
            raise UnusableArtifact(f"what came as {place[:40]} is larger than {MAX_BYTES >> 20} MiB")
        packed = b"".join(self._peers.store.get(f"{place}/{number}") for number in range(chunks))
        unpacking = zlib.decompressobj()
        try:
            data = unpacking.decompress(packed, MAX_BYTES)
        except zlib.error as error:
            raise UnusableArtifact(f"what came as {place[:40]} is damaged") from error
        if len(data) >= MAX_BYTES:
            raise UnusableArtifact(f"what came as {place[:40]} is larger than {MAX_BYTES >> 20} MiB")
        if not unpacking.eof:
            raise UnusableArtifact(f"what came as {place[:40]} is damaged")
        if hashlib.sha256(data).hexdigest() != digest:
            raise UnusableArtifact(f"what came as {place[:40]} does not match its checksum")
        return data
