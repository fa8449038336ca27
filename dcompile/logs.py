"""The loggers `dcompile` and `dcompile.<channel>`, through which the compiler writes everything for people.

Records go to the user's handlers, those of these loggers or of the root logger. Without handlers, they are written as
plain lines to the current stderr, much as `logging.lastResort` would. Nothing is attached to any logger.

An error in reporting never breaks the run: handlers may raise, and streams may be absent, closed or full.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from dcompile.config import CHANNELS, Config, parse_log

DEFAULT_LEVEL = logging.INFO
"""Default level of the logger `dcompile`, so that the receipt is visible."""


def rank() -> int:
    """This process's rank as torchrun sets it (0 outside of a job); needs no process group."""
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def write(stream: TextIO | None, text: str) -> bool:
    """Write `text` to a stream and flush it. Return whether that worked; never raises, whatever the stream raises.

    `stream` is None in a process without a console. Characters outside its encoding are written as escapes.
    """
    if stream is None:
        return False
    try:
        try:
            with _above_progress_bars(stream):
                stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode())
        stream.flush()
    except Exception:
        return False
    return True


def _above_progress_bars(stream: TextIO) -> contextlib.AbstractContextManager[None]:
    """Hide tqdm's progress bars while a line is written to the terminal, and redraw them below it."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is None or not stream.isatty():
        return contextlib.nullcontext()
    cleared: contextlib.AbstractContextManager[None] = bars.external_write_mode(file=stream)
    return cleared


def flush_streams() -> None:
    """Flush stdout and stderr before a process ends by `os._exit`, whatever a stream raises."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def report(level: int, text: str) -> None:
    """Log a line on the logger `dcompile`, on any rank: the receipt, warnings, errors. Never raises."""
    logger = logging.getLogger("dcompile")
    threshold = logger.level or DEFAULT_LEVEL  # not the root logger's, which is WARNING by default
    if logger.manager.disable < level and level >= threshold:
        _emit(logger, level, text)


def is_logged(config: Config, channel: str, level: int) -> bool:
    """Whether a line of this level would be logged on a channel. Check it before building an expensive line.

    Option `log` or the logger's own level must allow it, on rank 0, or on each rank if `log` names `all`.
    """
    assert channel in CHANNELS, f"unknown log channel {channel}"
    setting = parse_log(config.log)
    logger = logging.getLogger(f"dcompile.{channel}")
    if logger.manager.disable >= level or not (rank() == 0 or setting.every_rank):
        return False
    # not the root logger's level, which scripts set for lines of their own
    own = logger.level or logging.getLogger("dcompile").level or sys.maxsize
    return level >= min(setting.levels.get(channel, sys.maxsize), own)


def log(config: Config, channel: str, level: int, text: str) -> None:
    """Log a line on a channel, if `is_logged` allows it. Never raises."""
    if is_logged(config, channel, level):
        _log(config, channel, level, text)


def log_code(config: Config, text: str) -> None:
    """Log generated code on the channel `kernels`, whatever its level: torch's own settings request it."""
    if rank() == 0 or parse_log(config.log).every_rank:
        _log(config, "kernels", logging.DEBUG, text)


def _log(config: Config, channel: str, level: int, text: str) -> None:
    prefix = f"rank {rank()}: " if parse_log(config.log).every_rank else ""
    _emit(logging.getLogger(f"dcompile.{channel}"), level, f"{prefix}{text}")


def _emit(logger: logging.Logger, level: int, text: str) -> None:
    """Pass a record to the user's handlers, or write a plain line if there are none.

    The level was checked before: option `log` of one model may allow what the logger's level does not.
    """
    with contextlib.suppress(Exception):
        frame = sys._getframe()
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        code = frame.f_code
        record = logger.makeRecord(logger.name, level, code.co_filename, frame.f_lineno, text, (), None, code.co_name)
        if logger.hasHandlers():
            logger.handle(record)
        elif not logger.disabled and logger.filter(record):
            channel = logger.name.removeprefix("dcompile").removeprefix(".")
            write(sys.stderr, f"dcompile: [{channel}] {text}\n" if channel else f"dcompile: {text}\n")


# --- progress ---------------------------------------------------------------------------------------------------------

AFTER_S = 5.0
"""Seconds of a step after which its progress is shown."""


class _ProgressLine:
    """A line at the bottom of the terminal that says what the compiler does. There is one, as there is one terminal.

    A thread moves it by tqdm, and ends with the last context of `doing`. Steps without a pause between are one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doing: list[Callable[[], str]] = []
        """What is done now, the innermost last."""
        self._began = self._ended = -math.inf
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, what: Callable[[], str]) -> None:
        """Start telling this."""
        with self._lock:
            self._doing.append(what)
            if len(self._doing) > 1:
                return
            if (now := time.monotonic()) - self._ended > AFTER_S:
                self._began = now
            self._over = threading.Event()
            self._thread = threading.Thread(
                target=self._move, args=(self._over,), name="dcompile-progress", daemon=True
            )
            self._thread.start()

    def end(self, what: Callable[[], str]) -> None:
        """Stop telling this. The line is gone before anything else is written."""
        with self._lock:
            self._doing.remove(what)
            if self._doing or self._thread is None:
                return
            self._ended, thread = time.monotonic(), self._thread
            self._over.set()
        thread.join(1.0)

    def _move(self, over: threading.Event) -> None:
        if over.wait(max(self._began + AFTER_S - time.monotonic(), 0.0)):
            return
        with contextlib.suppress(Exception):  # tqdm is optional
            from tqdm.std import tqdm  # type: ignore[import-untyped, unused-ignore]

            form = "dcompile: {desc} [{elapsed}]"
            with tqdm(bar_format=form, leave=False, file=sys.stderr, dynamic_ncols=True, delay=1e-9) as bar:
                bar.start_t = time.time() - (time.monotonic() - self._began)
                while text := self._text():
                    bar.set_description_str(text)
                    over.wait(0.2)

    def _text(self) -> str:
        with self._lock:
            return self._doing[-1]() if self._doing else ""


_PROGRESS = _ProgressLine()


@contextlib.contextmanager
def doing(config: Config, what: str | Callable[[], str]) -> Iterator[None]:
    """Tell in a terminal, while the context lasts, what the compiler does, if the step takes long. On rank 0 alone."""
    shown = False
    with contextlib.suppress(Exception):  # a stream may be closed, or lack methods
        shown = config.progress and config.receipt and rank() == 0 and sys.stderr.isatty()
    if not shown:
        yield
        return
    said = what if callable(what) else functools.partial(str, what)
    _PROGRESS.begin(said)
    try:
        yield
    finally:
        _PROGRESS.end(said)


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
