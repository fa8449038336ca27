"""Compiled once, by rank 0 of a process group, and sent to the others through the group's store.

Nothing that is sent depends on a rank. What a rank runs is from its own cache directory, or has come from rank 0
through the job's store, with the SHA-256 that rank 0 gave: the store is the boundary of trust, as it is for torch,
whose collectives find their peers by it. Nothing is unpickled; what arrives is put into the cache, and loaded from
there with all its checks.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from typing import Any

from dcompile.errors import BuildError
from dcompile.runtime.cache import KINDS, KernelCache
from dcompile.runtime.compiled import from_record, to_record
from dcompile.runtime.peers import Peers
from dcompile.runtime.waiting import Others

CHUNK = 1 << 20
"""Bytes per value: stores refuse values of many megabytes."""
ARRIVE_S = 60.0
"""How long a rank waits for rank 0 to come to a graph that both captured in the same call."""

_FORMAT = 1


class Unusable(Exception):
    """What came through the store does not fit its checksum or its form; says what."""


class Sharing:
    """Between the ranks of one group, for the graphs of one compiled model."""

    def __init__(self, peers: Peers, patience_s: float) -> None:
        self._peers = peers
        self._patience_s = patience_s
        self._model = peers.number("model that shares")
        self._sent: set[str] = set()

    @property
    def gives(self) -> bool:
        """Whether this rank compiles for the others."""
        return self._peers.rank == 0

    def announce(self, name: str, key: str) -> None:
        """Rank 0 has come to a graph: which one it is, before it is compiled."""
        self._peers.store.set(self._place(name), key)

    def _place(self, name: str) -> str:
        return f"compiles/{self._model}/{name}"

    def give(self, key: str, cache: KernelCache) -> None:
        """Send a graph, which is in the cache, and its libraries. An incomplete one is not sent."""
        if key in self._sent:
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
        """Rank 0 has nothing to send for this graph: the others compile it."""
        self._peers.store.set(f"program/{key}", "none")

    def _put(self, place: str, data: bytes) -> int:
        packed = zlib.compress(data, 1)
        count = -(-len(packed) // CHUNK)
        if place not in self._sent:
            self._sent.add(place)
            for number in range(count):
                self._peers.store.set(f"{place}/{number}", packed[number * CHUNK : (number + 1) * CHUNK])
        return count

    def receive(self, key: str, name: str, together: bool, cache: KernelCache) -> tuple[int | None, str]:
        """Put what rank 0 compiled into this rank's cache: how many kernels came; or None, and why nothing did.

        Waits while rank 0 captures or compiles. `together`: every rank captured this graph in the same call, so rank 0
        comes to it too; otherwise nobody waits for a rank 0 that is doing something else, and there is no reason.
        """
        others = Others(self._peers, ARRIVE_S, [0], patience_s=self._patience_s)
        pause = 0.001
        while not self._peers.store.check([f"program/{key}"]):
            self._peers.check()
            others.look()
            if together and self._other_graph(name, key):
                return None, "rank 0 compiles another graph in its place (its machine or shapes differ)"
            if not (together or others.compiles(0)):
                return None, ""
            if others.last(0) is not None and not others.alive(0):
                return None, others.describe([0])
            if others.out_of_patience([0]):
                return None, f"waiting took too long: {others.describe([0])}"
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        said = self._peers.store.get(f"program/{key}").decode()
        if said == "none":
            return None, "rank 0 could not send it"
        try:
            return self._take(key, said, cache), ""
        except (Unusable, BuildError, OSError) as error:
            return None, str(error)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None, "rank 0 sent a graph in a form that is not understood"

    def _other_graph(self, name: str, key: str) -> bool:
        place = self._place(name)
        return bool(self._peers.store.check([place])) and self._peers.store.get(place).decode() != key

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
            if f"{dot}{kind}" not in KINDS or not re.fullmatch("[0-9a-f]{64}", digest):
                raise Unusable(f"rank 0 sent a library of an unknown kind, {file[:80]}")
            cache.take(keys, self._get(f"library/{file}", entry["chunks"][file], digest), digest, f"{dot}{kind}")
            received += len(keys)
        cache.put_graph(key, from_record(entry["graph"]))
        return received

    def _entry(self, key: str, said: str) -> Any:
        match = re.fullmatch("([0-9]{1,6}) ([0-9a-f]{64})", said)
        if match is None:
            raise Unusable("rank 0 announced a graph in a form that is not understood")
        try:
            entry = json.loads(self._get(f"program/{key}", int(match[1]), match[2]))
            known = entry["format"] == _FORMAT
        except (ValueError, KeyError, TypeError) as error:
            raise Unusable("rank 0 sent a graph in a form that is not understood") from error
        if not known:
            raise Unusable(f"rank 0 sent a graph in format {entry['format']}, this dcompile reads {_FORMAT}")
        return entry

    def _get(self, place: str, chunks: int, digest: str) -> bytes:
        packed = b"".join(self._peers.store.get(f"{place}/{number}") for number in range(chunks))
        try:
            data = zlib.decompress(packed)
        except zlib.error as error:
            raise Unusable(f"what rank 0 sent as {place[:40]} is damaged") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise Unusable(f"what rank 0 sent as {place[:40]} does not match its checksum")
        return data
