"""Names in the text of programs, quoted if they could not be parsed otherwise."""

from __future__ import annotations

import re

NAME = r"\w+(?:(?:\.|::?)\w+)*"
"""A name that needs no quotes."""


def show_name(name: str | int) -> str:
    """Return a name, in backquotes if it could not be parsed otherwise."""
    return str(name) if isinstance(name, int) or (re.fullmatch(NAME, name) and name != "_") else quoted(name)


def quoted(text: str) -> str:
    """Return any text in backquotes, on one line."""
    return f"`{text.encode('unicode_escape').decode().replace('`', chr(92) + 'x60')}`"
