"""Position in a parsed text, which matches patterns in order and reports the place of a mismatch."""

from __future__ import annotations

import re
from typing import NoReturn

from dcompile.errors import ParseError
from dcompile.ir.names import NAME


class TextCursor:
    """Reader of a text from left to right. Blanks between words are ignored; line ends are not."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        """Raise `ParseError` with line and column of this or another position, and with what was expected."""
        at = self.at if at is None else at
        start = self.text.rfind("\n", 0, at) + 1
        line = self.text[start:].split("\n", 1)[0]
        place = f"line {self.text.count(chr(10), 0, at) + 1}, column {at - start + 1}"
        raise ParseError(f"{place}: {expected}\n  {line}\n  {' ' * (at - start)}^")

    def skip_blanks(self) -> None:
        """Move to the next character in this line that is no blank."""
        while self.text.startswith((" ", "\t"), self.at):
            self.at += 1

    def skip_lines(self) -> None:
        """Move to the next line with content besides a comment."""
        while self.at < len(self.text) and self.match(r"(#[^\n]*)?\n|#[^\n]*$") is not None:
            pass
        self.skip_blanks()

    def peek(self, pattern: str) -> re.Match[str] | None:
        """Return the text that matches here, without reading it."""
        self.skip_blanks()
        return re.compile(pattern).match(self.text, self.at)

    def match(self, pattern: str) -> str | None:
        """Read a match, if there is one."""
        found = self.peek(pattern)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def expect(self, pattern: str, what: str) -> str:
        """Read a match; raise an error if there is none."""
        found = self.match(pattern)
        return self.fail(f"expected {what}") if found is None else found

    def has(self, literal: str) -> bool:
        """Read these characters, if they come next."""
        return self.match(re.escape(literal)) is not None

    def need(self, literal: str) -> None:
        """Read these characters; raise an error if others come."""
        self.expect(re.escape(literal), f"`{literal}`")

    def name(self, what: str = "a name") -> str:
        """Read a name, which is quoted if it has special characters."""
        quoted = self.quoted()
        return self.expect(NAME, what) if quoted is None else quoted

    def quoted(self) -> str | None:
        """Read text between backquotes, if it comes next."""
        found = self.match(r"`[^`\n]*`")
        return None if found is None else found[1:-1].encode().decode("unicode_escape")

    def integer(self) -> int:
        """Read an integer."""
        return int(self.expect(r"-?\d+(?![\w.])", "a whole number"))

    def end_of_line(self) -> None:
        """Require the end of the line, apart from a comment."""
        self.expect(r"(#[^\n]*)?(\n|$)", "the end of the line")
