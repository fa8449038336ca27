"""Limit the size of the cache on disk by removing the least recently used files."""

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
"""Seconds between two scans of a directory's size. One scan of 24 000 entries takes 0.1 s."""
MIN_AGE_S = 3600
"""Age in seconds below which a file is not evicted: another process may be about to load it."""
MAX_SHARE_AFTER_EVICTION = 0.8
"""Part of the limit that an eviction leaves, so that the next one is not due at once."""
MARKER = "size-checked"
LIBRARY_KINDS = (".so", ".gpu")
"""Suffixes of libraries: shared objects, and archives of cubins."""
TRACE = ".trace"
"""Suffix of AOTAutograd's traces."""


@dataclass(frozen=True)
class CacheFile:
    """File of the cache: `size` in bytes, and `used`, its last write or use in seconds since the epoch."""

    path: Path
    size: int
    used: float


def files_in(directory: Path) -> list[CacheFile]:
    """List the files of a cache directory, without the temporary ones, which are still being written."""
    found = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                status = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False) and not entry.name.startswith("tmp-"):
                    found.append(CacheFile(Path(entry.path), status.st_size, status.st_mtime))
    return found


def mark_used(path: Path) -> None:
    """Set a file's time of last use to now."""
    with contextlib.suppress(OSError):  # the directory may be read-only, or the file removed
        os.utime(path)


def limit_size(directory: Path, limit_bytes: int) -> None:
    """Evict the least recently used files if the cache exceeds its limit. Runs once a day; 0 means no limit."""
    marker = directory / MARKER
    with contextlib.suppress(OSError):
        if limit_bytes <= 0 or (marker.exists() and time.time() - marker.stat().st_mtime < SCAN_INTERVAL_S):
            return
        if files := files_in(directory):
            marker.touch()
            evict(directory, limit_bytes, files)


def evict(directory: Path, limit_bytes: int, files: list[CacheFile]) -> int:
    """Remove files until the cache is below `MAX_SHARE_AFTER_EVICTION` of its limit, if it exceeds that."""
    total = sum(file.size for file in files)
    if total <= limit_bytes:
        return 0
    excess, removed = total - MAX_SHARE_AFTER_EVICTION * limit_bytes, 0
    entries = _entries_of_libraries(files)
    candidates = [file for file in files if file.path.suffix in (*LIBRARY_KINDS, ".graph", TRACE)]
    for file in sorted(candidates, key=lambda file: file.used):
        if removed >= excess or time.time() - file.used < MIN_AGE_S:
            break
        # entries first: an entry whose library is missing looks damaged
        removed += sum(map(_remove, [*entries.get(file.path.name, ()), file]))
    report(logging.INFO, f"cache {directory} had {total / 1e9:.2f} GB; {removed / 1e9:.2f} GB, unused longest, removed")
    return removed


def clear(directory: Path) -> int:
    """Remove all files of the cache and return their bytes. Other files in the directory stay."""
    known = (*LIBRARY_KINDS, ".graph", TRACE, ".json")
    return sum(_remove(file) for file in files_in(directory) if file.path.suffix in known or file.path.name == MARKER)


def _remove(file: CacheFile) -> int:
    try:
        file.path.unlink()
    except OSError:
        return 0
    return file.size


def _entries_of_libraries(files: list[CacheFile]) -> dict[str, list[CacheFile]]:
    """Name of a library -> the kernel entries that name it."""
    found: dict[str, list[CacheFile]] = {}
    for file in files:
        if file.path.suffix != ".json":
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(file.path.read_text())
            found.setdefault(f"{record['sha256']}{record.get('kind', '.so')}", []).append(file)
    return found
