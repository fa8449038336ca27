"""Dump directory: programs, kernels and the receipt as files.

An error in reporting never breaks the run: the disk may be full, or the directory not writable.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

from dcompile.config import Config
from dcompile.logs import rank, report

_DUMPS: Counter[str] = Counter()
"""Number of models that this process dumps, by directory, for names of folders."""


_UNWRITABLE: set[str] = set()
"""Dump directories for which a write error was reported: a model has some fifty files."""


def own_dump(config: Config) -> Config:
    """Settings for one more model: from the second one on that dumps into a directory, it gets its own folder.

    Rank 0 says once where a dump is.
    """
    if not config.dump:
        return config
    _DUMPS[config.dump] += 1
    number = _DUMPS[config.dump]
    if number == 1 and rank() == 0:
        report(logging.INFO, f"programs and kernels are dumped to {Path(config.dump).absolute()}")
    return config if number == 1 else replace(config, dump=str(Path(config.dump) / f"model{number}"))


def dump(config: Config, name: str, text: str) -> None:
    """Write `text` to `rankN/name` in the dump directory, if one is set.

    A write error is reported once per directory.
    """
    if not config.dump:
        return
    path = Path(config.dump) / f"rank{rank()}" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        if config.dump not in _UNWRITABLE:
            _UNWRITABLE.add(config.dump)
            what = f"cannot write {path} (DCOMPILE_DUMP): {error.strerror}"
            report(logging.WARNING, f"{what}; going on without what cannot be written there")


def dump_change(config: Config, name: str, before: str, after: str) -> None:
    """Dump what a pass made of a program, as text and as a difference; nothing if it changed nothing."""
    if config.dump and before != after:
        dump(config, f"{name}.diff", difference(before, after))
        dump(config, f"{name}.txt", after)


def difference(before: str, after: str, old: str = "", new: str = "") -> str:
    """Return what changed from one text to the other as a unified diff, with their names; empty if nothing did."""
    return "\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), old, new, lineterm=""))
