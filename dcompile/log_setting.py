"""Parse option `log`: channels and their levels."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from dcompile.errors import OptionError
from dcompile.settings import suggestion

CHANNELS = ("passes", "overlap", "kernels", "memory")
"""Channels of option `log`: the loggers `dcompile.passes` and so on. `all` is also accepted: log on every rank."""

LEVELS: Mapping[str, int] = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
"""Levels of a channel in `log`."""


@dataclass(frozen=True, slots=True)
class LogSetting:
    """Parsed option `log`: the level of each named channel, and whether every rank logs."""

    levels: Mapping[str, int]
    every_rank: bool


@functools.cache
def parse_log(text: str) -> LogSetting:
    """Parse `passes=INFO,overlap,all`. Raises OptionError for an unknown channel or level."""
    levels: dict[str, int] = {}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        channel, has_level, level = (part.strip() for part in word.partition("="))
        if channel not in CHANNELS and word != "all":
            known = (*CHANNELS, "all")
            raise OptionError(f"dcompile: unknown log channel {word!r}{suggestion(channel, known, 'channels')}")
        if has_level and level.upper() not in LEVELS:
            near = suggestion(level.upper(), LEVELS, "levels")
            raise OptionError(f"dcompile: unknown log level {level!r} in {word!r}{near}")
        if word != "all":
            levels[channel] = LEVELS[level.upper()] if has_level else logging.DEBUG
    return LogSetting(levels, "all" in words)
