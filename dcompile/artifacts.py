"""Log channels, dump directory, warnings: everything the compiler says while it works.

Reporting never breaks what is reported on: streams may be absent, closed or full, and so may the disk.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from dcompile.config import CHANNELS, Config


def rank() -> int:
    """This process's rank as torchrun gives it (0 outside a job); needs no process group."""
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def write(stream: TextIO | None, text: str) -> bool:
    """Write `text` to a stream and flush it; whether that worked. Raises nothing: a stream may raise anything.

    `stream` is None in a process without a console. Characters outside its encoding are written as escapes.
    """
    if stream is None:
        return False
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode())
        stream.flush()
    except Exception:
        return False
    return True


def flush_streams() -> None:
    """Flush what was printed, before a process ends by `os._exit`; it must come to that whatever a stream raises."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def say(text: str) -> None:
    """Print a line to stderr, in one write so that lines of several ranks do not mix. Raises nothing."""
    write(sys.stderr, f"dcompile: {text}\n")


def log(config: Config, channel: str, text: str) -> None:
    """One line on a log channel, on rank 0 unless the channel list says `all`."""
    assert channel in CHANNELS, f"unknown log channel {channel}"
    wanted = config.log.split(",") if config.log else []
    if channel in wanted and (rank() == 0 or "all" in wanted):
        prefix = f"rank {rank()}: " if "all" in wanted else ""
        say(f"[{channel}] {prefix}{text}")


_DUMPS: Counter[str] = Counter()
"""Models that this process dumps, by directory: for folder names alone."""


_UNWRITABLE: set[str] = set()
"""Dump directories of which it was said that something could not be written: a model has some fifty files."""


def own_dump(config: Config) -> Config:
    """The settings for one more model: from the second on that dumps into a directory, it has a folder of its own."""
    if not config.dump:
        return config
    _DUMPS[config.dump] += 1
    number = _DUMPS[config.dump]
    return config if number == 1 else replace(config, dump=str(Path(config.dump) / f"model{number}"))


def dump(config: Config, name: str, text: str) -> None:
    """Write `text` to `rankN/name` in the dump directory, if one is set. A disk that is full is reported once."""
    if not config.dump:
        return
    path = Path(config.dump) / f"rank{rank()}" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        if config.dump not in _UNWRITABLE:
            _UNWRITABLE.add(config.dump)
            say(f"cannot write {path} (DCOMPILE_DUMP): {error.strerror}; going on without what cannot be written there")
