"""A limit for the size of the cache on disk: what was used longest ago goes first."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from dcompile.logs import report

SCAN_INTERVAL_S = 24 * 3600
"""Time between two looks at the size of a directory: with 24 000 entries, one takes 0.1 s."""
MIN_AGE_S = 3600
"""What was used within this time stays: another process may be about to load it."""
SHARE_KEPT = 0.8
"""Part of the limit that is left after an eviction, so that the next one is not due at once."""
MARKER = "size-checked"
LIBRARY_KINDS = (".so", ".gpu")
"""What libraries may be: shared objects, and archives of cubins (`runtime.gpu`)."""
TRACE = ".trace"
"""What traces of AOTAutograd are called."""


@dataclass(frozen=True)
class CacheFile:
    """One file of the cache: its size in bytes, and when it was written or used last, in seconds since the epoch."""

    path: Path
    size: int
    used: float


def files_in(directory: Path) -> list[CacheFile]:
    """The files of a cache directory; temporary folders and files, which are being written, are left out."""
    found = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process removes it
                status = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False) and not entry.name.startswith("tmp-"):
                    found.append(CacheFile(Path(entry.path), status.st_size, status.st_mtime))
    return found


def mark_used(path: Path) -> None:
    """Note that a file is in use."""
    with contextlib.suppress(OSError):  # a directory that is read only, or a file that has gone
        os.utime(path)


def limit_size(directory: Path, limit_bytes: int) -> None:
    """Once a day: if the cache is larger than its limit, remove what was used longest ago. 0: no limit."""
    marker = directory / MARKER
    with contextlib.suppress(OSError):
        if limit_bytes <= 0 or (marker.exists() and time.time() - marker.stat().st_mtime < SCAN_INTERVAL_S):
            return
        if files := files_in(directory):
            marker.touch()
            evict(directory, limit_bytes, files)


def evict(directory: Path, limit_bytes: int, files: list[CacheFile]) -> int:
    """Remove files until the cache holds `SHARE_KEPT` of its limit, if it holds more than that; bytes removed."""
    total = sum(file.size for file in files)
    if total <= limit_bytes:
        return 0
    excess, removed = total - SHARE_KEPT * limit_bytes, 0
    entries = _entries_of_libraries(files)
    candidates = [file for file in files if file.path.suffix in (*LIBRARY_KINDS, ".graph", TRACE)]
    for file in sorted(candidates, key=lambda file: file.used):
        if removed >= excess or time.time() - file.used < MIN_AGE_S:
            break
        # entries first: one that names a library that is not there looks damaged
        removed += sum(map(_remove, [*entries.get(file.path.name, ()), file]))
    report(logging.INFO, f"cache {directory} had {total / 1e9:.2f} GB; {removed / 1e9:.2f} GB, unused longest, removed")
    return removed


def clear(directory: Path) -> int:
    """Remove everything that the cache holds; bytes removed. Other files in the directory stay."""
    known = (*LIBRARY_KINDS, ".graph", TRACE, ".json")
    return sum(_remove(file) for file in files_in(directory) if file.path.suffix in known or file.path.name == MARKER)


def _remove(file: CacheFile) -> int:
    try:
        file.path.unlink()
    except OSError:
        return 0
    return file.size


def _entries_of_libraries(files: list[CacheFile]) -> dict[str, list[CacheFile]]:
    """Name of a library -> the entries of kernels that point at it."""
    found: dict[str, list[CacheFile]] = {}
    for file in files:
        if file.path.suffix != ".json":
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(file.path.read_text())
            found.setdefault(f"{record['sha256']}{record.get('kind', '.so')}", []).append(file)
    return found
