"""Cache entries for torch.compiler.save_cache_artifacts() and load_cache_artifacts().

Each library is one entry, named by its SHA-256. Each graph is one entry, which names its libraries, and so is each
trace. Before entries come into the cache, their checksums, versions and processor are compared. Nothing is unpickled.
An entry that does not fit is refused with one line in the log, and its graph is compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dcompile import compat
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.logs import report
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.program.artifact import from_record, to_record
from dcompile.toolchain import cpu_features, own_source, own_version

KIND = "dcompile"
_FORMAT = 1
_NAME = re.compile(r"([0-9a-f]{64})\.(graph|trace|so|gpu)")


class RefusedArtifact(Exception):
    """Raised for an entry that is damaged, or made by another dcompile, torch or processor."""


def register() -> None:
    """Register our kind of entries with torch."""
    compat.cache_artifacts.register(KIND, populate)


def record(key: str, cache: KernelCache, libraries: Mapping[str, Path]) -> None:
    """Record a graph for torch's artifacts, with the library of each kernel by the kernel's key."""
    register()
    for path in dict.fromkeys(libraries.values()):
        compat.cache_artifacts.record(KIND, path.name, functools.partial(_library, path))
    files = {kernel: path.name for kernel, path in libraries.items()}
    compat.cache_artifacts.record(KIND, f"{key}.graph", functools.partial(_graph, cache, key, files))


class RecordedTraces:
    """The traces of a cache. Each one that is read or written is recorded for torch's artifacts."""

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache

    def find_trace(self, key: str) -> str | None:
        """Find a trace, and record it for `torch.compiler.save_cache_artifacts()`."""
        text = self._cache.find_trace(key)
        if text is not None:
            self._record(key)
        return text

    def put_trace(self, key: str, text: str) -> None:
        """See `KernelCache`."""
        self._cache.put_trace(key, text)
        self._record(key)

    def _record(self, key: str) -> None:
        register()
        compat.cache_artifacts.record(KIND, f"{key}.trace", functools.partial(_trace, self._cache, key))


def _library(path: Path) -> bytes:
    """Content of a library, or nothing after its eviction."""
    return path.read_bytes() if path.is_file() else b""


def _graph(cache: KernelCache, key: str, files: Mapping[str, str]) -> bytes:
    found = cache.find_graph(key)
    if found is None:
        return b""
    return _sealed({"graph": to_record(found[0]), "libraries": files})


def _trace(cache: KernelCache, key: str) -> bytes:
    """Content of a trace, or nothing after its eviction."""
    text = cache.find_trace(key)
    return b"" if text is None else _sealed({"trace": text})


def _sealed(entry: Mapping[str, Any]) -> bytes:
    """An entry with the versions and the processor that it depends on, and its checksum."""
    text = json.dumps({**_here(), **entry})
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "entry": text}).encode()


def _here() -> dict[str, Any]:
    """Format, versions and processor that an entry depends on."""
    return {
        "format": _FORMAT,
        "dcompile": f"{own_version()} {own_source()[:16]}",
        "torch": torch.__version__,
        "processor": hashlib.sha256(cpu_features().encode()).hexdigest(),
    }


def populate(name: str, content: bytes) -> None:
    """Put an entry that torch has loaded into the cache directory of the settings."""
    if not content:
        return
    try:
        _take(name, content, KernelCache.open(Config.make(None, None)))
    except (RefusedArtifact, BuildError, OSError) as reason:
        report(logging.WARNING, f"a cache artifact is refused, {name[:80]}: {reason}; its graph is compiled again")


def _take(name: str, content: bytes, cache: KernelCache) -> None:
    match = _NAME.fullmatch(name)
    if match is None:
        raise RefusedArtifact("no name of ours")
    key, kind = match.groups()
    if kind == "trace":
        text = _checked(content).get("trace")
        if not isinstance(text, str):
            raise RefusedArtifact("a trace in a form that is not understood")
        cache.put_trace(key, text)
        return
    if kind != "graph":
        if hashlib.sha256(content).hexdigest() != key:
            raise RefusedArtifact("its content does not match its checksum")
        cache.take([], content, key, f".{kind}")
        return
    entry = _checked(content)
    try:
        graph, libraries = from_record(entry["graph"]), dict(entry["libraries"])
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedArtifact("a graph in a form that is not understood") from error
    for kernel, file in libraries.items():
        if not re.fullmatch("[0-9a-f]{64}", str(kernel)) or _NAME.fullmatch(str(file)) is None:
            raise RefusedArtifact("a library with no name of ours")
        if not cache.link(kernel, file):
            raise RefusedArtifact(f"its library {file[:12]} is not here")
    cache.put_graph(key, graph)


def _checked(content: bytes) -> dict[str, Any]:
    try:
        outer = json.loads(content)
        text, digest = outer["entry"], outer["sha256"]
        entry: dict[str, Any] = json.loads(text)
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedArtifact("an entry in a form that is not understood") from error
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise RefusedArtifact("its content does not match its checksum")
    for what, here in _here().items():
        if entry.get(what) != here:
            shown = "another one" if what == "processor" else entry.get(what)
            raise RefusedArtifact(f"made for {what} {shown}, not {'this one' if what == 'processor' else here}")
    return entry
