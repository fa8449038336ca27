"""Stream the text of one sequence as tokens arrive, up to a stop string; shown text never changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

INCOMPLETE = "\ufffd"
"""A tokenizer's text for an incomplete character."""


class Answer:
    """Collects tokens, and passes text to `show` that no later token changes.

    A possible beginning of a stop string is shown only once it cannot become one. Stop strings and stop tokens are not
    part of `text`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_tokens: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        show: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.tokenizer, self.stop_tokens, self.stop_strings = tokenizer, stop_tokens, stop_strings
        self.show = show
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = ""
        """Description of the stop token or string that ended the answer."""
        self._decoded = self._context = 0
        self._shown = 0

    def add(self, token: int) -> bool:
        """Take the next token; return True if it ends the answer."""
        if token in self.stop_tokens:
            self.stopped = f"token {token}"
            self.finish()
            return True
        self.tokens.append(token)
        self._decode(last=False)
        if self.stopped:
            return True
        self._show_up_to(len(self.text) - self._uncertain())
        return False

    def finish(self) -> str:
        """End the answer: show the rest, and return the whole text."""
        if not self.stopped or self.stopped.startswith("token"):
            self._decode(last=True)
        self._show_up_to(len(self.text))
        return self.text

    def _decode(self, last: bool) -> None:
        """Add the text of new tokens, decoded together with a few earlier ones, since spaces depend on neighbours."""
        before = self._text_of(self.tokens[self._context : self._decoded])
        now = self._text_of(self.tokens[self._context :])
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not last):
            return
        searched = len(self.text)
        self.text += now[len(before) :]
        self._context, self._decoded = self._decoded, len(self.tokens)
        for stop in self.stop_strings:
            at = self.text.find(stop, max(0, searched - len(stop)))
            if at >= 0:
                self.text, self.stopped = self.text[:at], f"string {stop!r}"
        if self.stopped.startswith("string"):
            self._show_up_to(len(self.text))

    def _text_of(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _uncertain(self) -> int:
        """Return the length of the text's longest suffix that is a prefix of a stop string."""
        ends = (len(prefix) for stop in self.stop_strings for prefix in _beginnings(stop) if self.text.endswith(prefix))
        return max(ends, default=0)

    def _show_up_to(self, end: int) -> None:
        if end > self._shown:
            self.show(self.text[self._shown : end])
            self._shown = end


def _beginnings(text: str) -> list[str]:
    return [text[:length] for length in range(1, len(text))]
