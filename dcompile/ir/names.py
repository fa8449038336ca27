"""Names in the text of programs: as they are, or quoted where they could not be read back."""

from __future__ import annotations

import re

NAME = r"\w+(?:(?:\.|::?)\w+)*"
"""A name that needs no quotes."""


def show_name(name: str | int) -> str:
    """A name as it is, or in backquotes where it could not be read back."""
    return str(name) if isinstance(name, int) or (re.fullmatch(NAME, name) and name != "_") else quoted(name)


def quoted(text: str) -> str:
    """Any text in backquotes, on one line."""
    return f"`{text.encode('unicode_escape').decode().replace('`', chr(92) + 'x60')}`"
