"""A place in a text that is being parsed: matches patterns one after another, and says where one does not."""

from __future__ import annotations

import re
from typing import NoReturn

from dcompile.errors import ParseError
from dcompile.ir.names import NAME


class TextCursor:
    """Reads a text from left to right. Blanks between words do not matter; ends of lines do."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        """Raise `ParseError` with line and column of this place, or of another, and what should be there."""
        at = self.at if at is None else at
        start = self.text.rfind("\n", 0, at) + 1
        line = self.text[start:].split("\n", 1)[0]
        place = f"line {self.text.count(chr(10), 0, at) + 1}, column {at - start + 1}"
        raise ParseError(f"{place}: {expected}\n  {line}\n  {' ' * (at - start)}^")

    def skip_blanks(self) -> None:
        """Go on to the next character that is no blank, in this line."""
        while self.text.startswith((" ", "\t"), self.at):
            self.at += 1

    def skip_lines(self) -> None:
        """Go on to the next line that has something in it besides a comment."""
        while self.at < len(self.text) and self.match(r"(#[^\n]*)?\n|#[^\n]*$") is not None:
            pass
        self.skip_blanks()

    def peek(self, pattern: str) -> re.Match[str] | None:
        """What of the text matches here, which stays unread."""
        self.skip_blanks()
        return re.compile(pattern).match(self.text, self.at)

    def match(self, pattern: str) -> str | None:
        """Read what matches, if it does."""
        found = self.peek(pattern)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def expect(self, pattern: str, what: str) -> str:
        """Read what matches; it is an error if nothing does."""
        found = self.match(pattern)
        return self.fail(f"expected {what}") if found is None else found

    def has(self, literal: str) -> bool:
        """Read these very characters, if they come next."""
        return self.match(re.escape(literal)) is not None

    def need(self, literal: str) -> None:
        """Read these very characters; it is an error if others come."""
        self.expect(re.escape(literal), f"`{literal}`")

    def name(self, what: str = "a name") -> str:
        """A name, which is quoted if it has characters of its own."""
        quoted = self.quoted()
        return self.expect(NAME, what) if quoted is None else quoted

    def quoted(self) -> str | None:
        """Text between backquotes, if it comes next."""
        found = self.match(r"`[^`\n]*`")
        return None if found is None else found[1:-1].encode().decode("unicode_escape")

    def integer(self) -> int:
        """A whole number."""
        return int(self.expect(r"-?\d+(?![\w.])", "a whole number"))

    def end_of_line(self) -> None:
        """Nothing may follow in this line but a comment."""
        self.expect(r"(#[^\n]*)?(\n|$)", "the end of the line")
