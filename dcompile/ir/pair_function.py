"""Functions of one pair of a query and a key, as FlexAttention has them: of a score, of positions, or of a gradient.

A function is the body of a loop over nothing. It loads its arguments by name: `score`, `grad`, and the positions `b`
(batch), `h` (head), `q` (query) and `k` (key). Tensors that it reads are `c0`, `c1`, ..., by elements. Its text is that
of any body, so a step of a program can have it as an argument: `result[0] = add(score[0]:float32, c0[v3]:float32)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dcompile.ir.analysis import ancestors
from dcompile.ir.cursor import TextCursor
from dcompile.ir.index import ZERO, Index, as_index
from dcompile.ir.loop_text import show_values
from dcompile.ir.nodes import Apply, Const, Load, Loop, Ref, Store, Value
from dcompile.ir.parse import BodyParser

SCORE, GRADIENT, RESULT = "score", "grad", "result"
PLACES = ("b", "h", "q", "k")
"""Names of a pair's batch, head, query and key."""


@dataclass(frozen=True, slots=True)
class PairFunction:
    """The values of a function, and which of them is its result."""

    body: tuple[Value, ...]
    result: Ref

    def __str__(self) -> str:
        return "\n".join(show_values(Loop(RESULT, (), (), self.body, (Store(RESULT, ZERO, self.result),)), {}))

    def is_argument(self, name: str) -> bool:
        """Whether the function returns this argument as it is, but for conversions to its own dtype."""
        value = self.body[self.result]
        while isinstance(value, Apply) and value.op == "cast" and self.body[value.args[0]].dtype == value.dtype:
            value = self.body[value.args[0]]
        return isinstance(value, Load) and value.buffer == name

    @property
    def is_true(self) -> bool:
        """Whether the function is True for each pair."""
        value = self.body[self.result]
        return isinstance(value, Const) and value.dtype == "bool" and bool(value.value)

    @property
    def reads(self) -> frozenset[str]:
        """Arguments that the result depends on."""
        used = ancestors(self.body, (self.result,))
        return frozenset(value.buffer for ref in used if isinstance(value := self.body[ref], Load))

    def with_buffers(self, places: Mapping[str, tuple[str, Index | int]]) -> PairFunction:
        """Return the function with other buffers for tensors: name -> buffer, and the element that it starts at."""

        def placed(value: Value) -> Value:
            if not isinstance(value, Load) or value.buffer not in places:
                return value
            buffer, start = places[value.buffer]
            return replace(value, buffer=buffer, index=value.index + as_index(start))

        return replace(self, body=tuple(map(placed, self.body)))


def parse_pair_function(text: str) -> PairFunction:
    """Parse the text of a function. Raises ParseError."""
    parser = BodyParser(TextCursor(text), {}, {})
    parser.parse_lines()
    (store,) = parser.stores
    return PairFunction(tuple(parser.body), store.value)
