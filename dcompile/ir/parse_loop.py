"""Parse the body of a loop: values, whose dtypes may follow from their arguments, and stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dcompile.ir.buffers import Buffer
from dcompile.ir.cursor import TextCursor
from dcompile.ir.index import Index, flatten
from dcompile.ir.index_text import parse_index
from dcompile.ir.loop_text import PLAIN_CONSTANTS, implied_dtype, implied_reduction_dtype
from dcompile.ir.names import NAME
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Reduce, Ref, Scan, Store, Value
from dcompile.ir.ops import OPS, SCANS

BODY_LINE = rf"(?:{NAME}|`[^`\n]*`)\s*(?:=|\[)"
"""Pattern at the start of a body's line; no step starts so."""
CONSTANT = r"(?:True|False|-?(?:inf|nan|\d+(?:\.\d*)?(?:e[+-]?\d+)?))(?![\w.\[(])"


@dataclass
class BodyParser:
    """Values and stores of one loop, as read so far."""

    cursor: TextCursor
    table: Mapping[str, Buffer]
    dtypes: Mapping[str, str]
    """Dtypes of buffers, and of the result of the loop's matmul."""
    body: list[Value] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    _names: dict[str, Ref] = field(default_factory=dict)
    _constants: dict[str, Ref] = field(default_factory=dict)
    """Constants inside lines; equal ones are one value."""

    def parse_lines(self) -> None:
        """Parse all lines up to the next step."""
        self.cursor.skip_lines()
        while self.cursor.peek(BODY_LINE):
            if self.cursor.peek(rf"{NAME}\s*="):
                self._parse_definition()
            else:
                self._parse_store()
            self.cursor.end_of_line()
            self.cursor.skip_lines()

    def _parse_definition(self) -> None:
        at = self.cursor.at
        name = self.cursor.name()
        if name in self._names:
            self.cursor.fail(f"{name} has a value already", at)
        self.cursor.need("=")
        constant = self._constant()
        self._names[name] = self._append(constant) if constant is not None else self._value()

    def _parse_store(self) -> None:
        buffer = self.cursor.name()
        index = self._index(buffer)
        mode = self.cursor.match(r"\w+(?==)")
        self.cursor.need("=")
        value = self._value()
        self.stores.append(Store(buffer, index, value, mode or "set"))

    def _append(self, value: Value) -> Ref:
        self.body.append(value)
        return len(self.body) - 1

    def _value(self) -> Ref:
        """Parse an earlier value's name, or a new value."""
        constant = self._constant()
        if constant is not None:
            key = repr(constant)
            if key not in self._constants:
                self._constants[key] = self._append(constant)
            return self._constants[key]
        at = self.cursor.at
        if self.cursor.match(r"index(?=\()"):
            return self._append(self._index_of())
        if (op := self.cursor.match(r"\w+(?=\()")) is not None:
            return self._append(self._operation(op, at))
        if self.cursor.peek(rf"(?:{NAME}|`[^`\n]*`)\["):
            return self._load()
        name = self.cursor.expect(NAME, "a value")
        if name not in self._names:
            self.cursor.fail(f"{name} has no value so far", at)
        return self._names[name]

    def _constant(self) -> Const | None:
        text = self.cursor.match(CONSTANT)
        if text is None:
            return None
        literal: bool | int | float
        if text in ("True", "False"):
            literal = text == "True"
        else:
            literal = float(text) if any(letter in text for letter in ".ein") else int(text)
        return Const(literal, self._suffix() or PLAIN_CONSTANTS[type(literal)])

    def _suffix(self) -> str | None:
        """Parse `:dtype`, if it follows without a blank."""
        if not self.cursor.text.startswith(":", self.cursor.at):
            return None
        self.cursor.need(":")
        return self.cursor.expect(r"\w+", "a dtype")

    def _index_of(self) -> IndexOf:
        self.cursor.need("(")
        index = parse_index(self.cursor, self._variable)
        self.cursor.need(")")
        return IndexOf(index, self._suffix() or "int64")

    def _variable(self, name: str) -> str:
        """Replace an earlier value's name by its number in this body."""
        return f"v{self._names[name]}" if name in self._names else name

    def _load(self) -> Ref:
        at = self.cursor.at
        buffer = self.cursor.name()
        index = self._index(buffer)
        dtype = self._suffix() or self.dtypes.get(buffer)
        if dtype is None:
            self.cursor.fail(f"unknown buffer {buffer}", at)
        mask = None
        if self.cursor.match(r"if\b"):
            mask = self._value()
            self.cursor.expect(r"else\s+0", "`else 0`")
        return self._append(Load(buffer, index, dtype, mask))

    def _index(self, buffer: str) -> Index:
        """Parse `[element]`, or `[i0, j0]` with a coordinate for each dimension of the buffer."""
        self.cursor.need("[")
        at = self.cursor.at
        coordinates = [parse_index(self.cursor, self._variable)]
        while self.cursor.has(","):
            coordinates.append(parse_index(self.cursor, self._variable))
        self.cursor.need("]")
        if len(coordinates) == 1:
            return coordinates[0]
        strides = self.table[buffer].strides if buffer in self.table else ()
        if len(coordinates) != len(strides):
            self.cursor.fail(f"{buffer} has {len(strides)} dimensions, not {len(coordinates)}", at)
        return flatten(coordinates, strides)

    def _operation(self, name: str, at: int) -> Value:
        self.cursor.need("(")
        args = [self._value()]
        given = None
        while self.cursor.has(","):
            if name == "cast":
                given = self.cursor.expect(r"\w+", "a dtype")
            else:
                args.append(self._value())
        self.cursor.need(")")
        dtypes = tuple(self.body[arg].dtype for arg in args)
        kind, _, op = name.partition("_")
        if kind in ("row", "scan") and name not in OPS:
            implied = implied_reduction_dtype(op, dtypes[0]) if kind == "row" else dtypes[0] if op in SCANS else None
            dtype = self._suffix() or implied or self.cursor.fail(f"unknown operation {name}", at)
            return Reduce(op, args[0], dtype) if kind == "row" else Scan(op, args[0], dtype)
        implied = given if name == "cast" else implied_dtype(name, dtypes)
        return Apply(name, tuple(args), self._suffix() or implied or self.cursor.fail(f"unknown operation {name}", at))
