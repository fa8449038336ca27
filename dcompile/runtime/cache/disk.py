"""The cache of compiled graphs, kernels and traces on disk: reading, writing, trust in its folder, and its size.

Libraries are named by the SHA-256 of their content. A small JSON file per kernel names its library; one per graph names
its kernels and holds its host program.

Nothing is executed before its SHA-256 has been compared, and nothing is unpickled. Files are published by rename, so a
reader sees a whole file or none. Any number of processes may write at once: equal content has an equal name. A damaged
file is reported in one line and rebuilt. This covers files that a failing machine leaves half written, too. So nothing
is flushed to the disk: flushing took 25 ms a kernel on a busy one. Above a size, the least recently used files are
removed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import grp
import hashlib
import json
import logging
import mmap
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.logs import report
from dcompile.runtime.program.artifact import CompiledGraph, from_record, to_record

Loaded: TypeAlias = tuple[CompiledGraph, dict[str, Path]]
"""A graph, and the path of each kernel's library by the kernel's name."""

Found = TypeVar("Found")

STALE_S = 3600
"""Age in seconds above which a temporary file belongs to a killed process: no compilation takes so long."""


MAX_LINKS = 40
"""Symbolic links in one path, as in Linux."""

_refused: dict[Path, Path] = {}
"""Unusable directory -> its replacement in this process, so that each one causes one warning and one replacement."""


_unreadable: set[Path] = set()
"""Precompiled folders of which it was said that they are not used."""


class _Damaged(Exception):
    """A damaged cache file. Arguments: its path, and the reason."""


class KernelCache:
    """Cache in one directory, which only its owner can read and write; and one to read what that lacks from."""

    def __init__(self, directory: Path, precompiled: KernelCache | None = None, *, read_only: bool = False) -> None:
        self.directory = directory
        self._precompiled = precompiled
        self._read_only = read_only
        self._checked: set[Path] = set()
        """Libraries whose content was compared with their name."""
        self._seen: set[Path] = set()
        """Damaged files that were already reported."""

    @classmethod
    def open(cls, config: Config) -> KernelCache:
        """Open the configured cache directory, or a temporary one of this process if it is unusable or not trusted."""
        wanted = cache_directory(config)
        beside = cls._readable(config)
        if wanted in _refused:
            return cls(_refused[wanted], beside)
        directory, objection = prepare_directory(wanted)
        if objection is None:
            _sweep(directory)
            _limit(directory, config.cache_size_gib * 2**30)
            return cls(directory, beside)
        _refused[wanted] = _private(f"kernel cache {wanted} is not used: {objection}")
        instead = "kernels are built into a temporary directory this time"
        report(logging.WARNING, f"kernel cache {wanted} is not used: {objection}; {instead}")
        return cls(_refused[wanted], beside)

    @classmethod
    def _readable(cls, config: Config) -> KernelCache | None:
        """The folder that `config.precompiled` names; None where it cannot be read or cannot be trusted."""
        if not config.precompiled:
            return None
        folder = precompiled_folder(config)
        trusted, objection = _trusted(folder)
        objection = objection or _objection_to_libraries(trusted)
        if objection is None:
            return cls(trusted, read_only=True)
        if folder not in _unreadable:
            _unreadable.add(folder)
            report(logging.WARNING, f"precompiled folder {folder} is not used: {objection}")
        return None

    def find(self, key: str) -> Path | None:
        """Return the library that holds a kernel, or None. A damaged file is a miss, and is reported once."""
        found = self._whole(self._checked_library, key, "kernel", "building")
        return self._precompiled.find(key) if found is None and self._precompiled is not None else found

    def find_graph(self, key: str) -> Loaded | None:
        """Return a compiled graph and its libraries, or None. A damaged file is a miss, and is reported once."""
        graph = self._whole(self._checked_graph, key, "graph", "compiling")
        if graph is None:
            return None if self._precompiled is None else self._precompiled.find_graph(key)
        libraries = {name: self.find(kernel) for name, kernel in graph.kernels.items()}
        found = {name: path for name, path in libraries.items() if path is not None}
        return (graph, found) if len(found) == len(libraries) else None

    def find_trace(self, key: str) -> str | None:
        """A trace of AOTAutograd as it was kept, or None. A damaged file is a miss, and is reported once."""
        text = self._whole(self._checked_trace, key, "trace", "tracing")
        return self._precompiled.find_trace(key) if text is None and self._precompiled is not None else text

    def _whole(self, checked: Callable[[str], Found | None], key: str, what: str, doing: str) -> Found | None:
        """Return what `checked` finds, or None where it is damaged, which is reported once."""
        try:
            return checked(key)
        except _Damaged as damage:
            path, why = damage.args
            if path not in self._seen:
                self._seen.add(path)
                report(logging.WARNING, f"cached {what} {path} is damaged ({why}); {doing} it again")
            return None

    def _checked_graph(self, key: str) -> CompiledGraph | None:
        entry = self.directory / f"{key}.graph"
        record = _read(entry, key, "graph")
        if record is None:
            return None
        if record["sha256"] != _digest(key, record.get("graph")):
            raise _Damaged(entry, "its content does not match its checksum")
        self._mark_used(entry)
        return from_record(record["graph"])

    def _checked_library(self, key: str) -> Path | None:
        entry = self.directory / f"{key}.json"
        record = _read(entry, key, "kernel")
        if record is None:
            return None
        digest = record["sha256"]
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise _Damaged(entry, "not a valid entry")
        kind = record.get("kind", ".so")
        if kind not in LIBRARY_KINDS:
            raise _Damaged(entry, "not a valid entry")
        library = self.directory / f"{digest}{kind}"
        if library not in self._checked:
            self._check(library, digest)
        return library

    def _checked_trace(self, key: str) -> str | None:
        entry = self.directory / f"{key}{TRACE}"
        try:
            head, _, text = entry.read_text().partition("\n")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _Damaged(entry, "not a valid entry") from error
        if head != _trace_head(key, text):
            raise _Damaged(entry, "its content does not match its checksum")
        self._mark_used(entry)
        return text

    def _check(self, library: Path, digest: str) -> None:
        try:
            actual = hashlib.sha256(library.read_bytes()).hexdigest()
        except OSError as error:
            raise _Damaged(library, str(error.strerror)) from error
        if actual != digest:
            if not self._read_only:
                with contextlib.suppress(OSError):
                    library.unlink()
            raise _Damaged(library, "its content does not match its checksum")
        self._checked.add(library)
        self._mark_used(library)

    def _mark_used(self, file: Path) -> None:
        if not self._read_only:
            mark_used(file)

    def put(self, keys: Sequence[str], built: Path) -> Path:
        """Publish a library, then one entry for each kernel in it. Return the published path; raise BuildError."""
        assert built.suffix in LIBRARY_KINDS, f"{built} is neither a library nor an archive of cubins"
        try:
            digest = hashlib.sha256(built.read_bytes()).hexdigest()
            library = self.directory / f"{digest}{built.suffix}"
            built.rename(library)  # replaces at most a file of the same content
            for key in keys:
                self._write_entry(key, library)
        except OSError as error:
            free = shutil.disk_usage(self.directory).free / 1e6 if self.directory.exists() else 0.0
            raise BuildError(
                f"dcompile: cannot write compiled kernels to {self.directory} ({free:.1f} MB free): {error.strerror}; "
                "free some space, or set DCOMPILE_CACHE_DIR to another directory"
            ) from error
        self._checked.add(library)
        return library

    def take(self, keys: Sequence[str], data: bytes, digest: str, kind: str) -> None:
        """Publish a library that another process sent, after its SHA-256 was compared.

        Raises BuildError and OSError.
        """
        folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.directory))
        try:
            file = folder / f"received{kind}"
            file.write_bytes(data)
            path = self.put(keys, file)
            assert path.name == f"{digest}{kind}", "a library changed between its check and its place"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def link(self, key: str, file: str) -> bool:
        """Publish an entry for a kernel in a library of this directory. Return False if that is missing or damaged.

        Raises OSError where the entry cannot be written.
        """
        library = self.directory / file
        try:
            self._check(library, library.stem)
        except _Damaged:
            return False
        self._write_entry(key, library)
        return True

    def put_graph(self, key: str, graph: CompiledGraph) -> None:
        """Store a compiled graph. A failure to write is logged as a warning and costs a recompilation only."""
        record = to_record(graph)
        entry = {"key": key, "sha256": _digest(key, record), "graph": record}
        self._keep(f"{key}.graph", json.dumps(entry), "a compiled graph", "compiled")

    def put_trace(self, key: str, text: str) -> None:
        """Keep a trace. It works without: if that cannot be, one line says so."""
        self._keep(f"{key}{TRACE}", f"{_trace_head(key, text)}\n{text}", "a trace", "traced")

    def _keep(self, name: str, text: str, what: str, done: str) -> None:
        try:
            self._write(self.directory / name, text)
        except OSError as error:
            what = f"cannot keep {what} in {self.directory}: {error.strerror}"
            report(logging.WARNING, f"{what}; it will be {done} again")

    def _write_entry(self, key: str, library: Path) -> None:
        """Write the entry of a kernel in a library, whose name is its checksum."""
        record = {"key": key, "sha256": library.stem, "kind": library.suffix}
        self._write(self.directory / f"{key}.json", json.dumps(record))

    def _write(self, path: Path, text: str) -> None:
        """Write a file that appears whole or not at all."""
        handle, name = tempfile.mkstemp(prefix="tmp-", dir=self.directory)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(name).rename(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _read(entry: Path, key: str, what: str) -> Any:
    """Read an entry's JSON and check that it belongs to `key`. None if there is no such file; raises _Damaged."""
    try:
        record = json.loads(entry.read_text())
        owner, digest = record["key"], record["sha256"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _Damaged(entry, str(error.strerror)) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise _Damaged(entry, "not a valid entry") from error
    if owner != key:
        raise _Damaged(entry, f"it belongs to another {what}")
    if not isinstance(digest, str):
        raise _Damaged(entry, "not a valid entry")
    return record


def _trace_head(key: str, text: str) -> str:
    """The first line of a trace's file: its name, and the checksum of name and text."""
    digest = hashlib.sha256(f"{key}\n{text}".encode()).hexdigest()
    return f"{key} {digest}"


def _digest(key: str, graph: Any) -> str:
    """SHA-256 of an entry's program and of the key that it was compiled for."""
    return hashlib.sha256(f"{key}\n{json.dumps(graph, sort_keys=True)}".encode()).hexdigest()


def cache_directory(config: Config) -> Path:
    """Directory of the cache: config.cache_dir, else $XDG_CACHE_HOME/dcompile, else ~/.cache/dcompile."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        base = os.path.expanduser("~/.cache")  # keeps a literal ~ where no home is known, which does no harm
    return Path(base).absolute() / "dcompile"


def precompiled_folder(config: Config) -> Path:
    """The folder of option `precompiled`."""
    return Path(config.precompiled).expanduser().absolute()


def prepare_directory(directory: Path) -> tuple[Path, str | None]:
    """Create the directory if needed. Return it without symbolic links, and why it cannot be used, or None."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        trusted, objection = _trusted(directory, root_may_own=False)
        if objection is None:
            with tempfile.NamedTemporaryFile(prefix="tmp-", dir=trusted) as file:
                file.write(bytes(mmap.PAGESIZE))
                file.flush()
                objection = _objection_to_loading(Path(file.name))
    except FileExistsError:
        return directory, "it is not a directory"
    except OSError as error:
        return directory, str(error.strerror)
    return trusted, objection


def _objection_to_loading(file: Path) -> str | None:
    """Why the loader could not map a library like this file, or None: it maps the file as code."""
    with file.open("rb") as opened:
        try:
            mmap.mmap(opened.fileno(), 1, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
        except OSError as error:
            return f"code cannot be loaded from it ({error.strerror}; its file system may be mounted noexec)"
    return None


@functools.cache
def _objection_to_libraries(folder: Path) -> str | None:
    """Why the libraries of a folder cannot be loaded, or None. Found out once per process: a folder may be large."""
    library = next(folder.glob("*.so"), None)
    return None if library is None else _objection_to_loading(library)


def _trusted(directory: Path, *, root_may_own: bool = True) -> tuple[Path, str | None]:
    """Return a directory's path without symbolic links, and why code from it is not to be trusted, or None.

    Each link and each directory on the way must belong to this user or to root, and others must not be able to replace
    what lies in it. In a directory with the sticky bit they can replace only what is their own.
    """
    user = os.getuid()
    left, place, links = [*reversed(directory.parts[1:])], Path(directory.anchor), 0
    while left:
        if objection := _objection_to(place, user, root_may_own=True, sticky_is_safe=True):
            return directory, f"{place}: {objection}"
        step = place / left.pop()
        try:
            status = step.lstat()
            target = step.readlink() if stat.S_ISLNK(status.st_mode) else None
        except OSError as error:
            return directory, str(error.strerror)
        if target is None:
            place = step
            continue
        if status.st_uid not in (user, 0):
            return directory, f"{step} is a link of user {status.st_uid}, who could plant code in it"
        if (links := links + 1) > MAX_LINKS:
            return directory, "too many symbolic links"
        place = Path(target.anchor) if target.is_absolute() else place
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return place, _objection_to(place, user, root_may_own=root_may_own)


def _objection_to(directory: Path, user: int, *, root_may_own: bool, sticky_is_safe: bool = False) -> str | None:
    """Why others could plant code in a directory that is no symbolic link, or that it is no directory; else None."""
    try:
        opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        status = os.fstat(opened)
        os.close(opened)
    except NotADirectoryError:
        return "it is not a directory"
    except OSError as error:
        return str(error.strerror)
    if status.st_uid != user and not (root_may_own and status.st_uid == 0):
        return f"it belongs to user {status.st_uid}, who could plant code in it"
    writers = status.st_mode & 0o022
    if sticky_is_safe and (status.st_mode & stat.S_ISVTX or (writers == stat.S_IWGRP and _is_private(status.st_gid))):
        return None
    if writers:
        mode = "755" if root_may_own else "700"
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod {mode} it"
    return None


def _is_private(group: int) -> bool:
    """Whether a group has no other member than this user, as distributions make one for each user."""
    try:
        user, members = pwd.getpwuid(os.getuid()), {*grp.getgrgid(group).gr_mem}
    except KeyError:
        return False
    return user.pw_gid == group and members <= {user.pw_name}


def _private(why: str) -> Path:
    """Make a temporary directory for this process, which is removed at exit. Raises BuildError if none can be used.

    `why`: the reason for it, for that error.
    """
    directory = Path(tempfile.mkdtemp(prefix="dcompile-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not remove it
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    if objection := prepare_directory(directory)[1]:
        raise BuildError(
            f"dcompile: {why}; nor can the temporary directory {directory} be used: {objection}. Set "
            "DCOMPILE_CACHE_DIR to a directory of your own from which code can be loaded"
        )
    return directory


@functools.cache
def _limit(directory: Path, limit_bytes: int) -> None:
    """Enforce the cache's size limit, once per process."""
    limit_size(directory, limit_bytes)


@functools.cache
def _sweep(directory: Path) -> None:
    """Remove temporary files that killed processes left.

    It runs once per process: scanning 24 000 entries for each graph took 35 of the 100 ms that a small graph takes.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith("tmp-") and time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_S:
                    shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else os.unlink(entry)


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
