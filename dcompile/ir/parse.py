"""Parse programs from text: `parse(show(program))` equals the program, and text written by hand may be shorter.

By hand, steps need no numbers, values may have any names, and expressions may be nested. `x[i0, j0]` is the element at
these coordinates, and a bare `x` among arguments and outputs is the whole buffer. Lines may end in comments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.collective_kinds import COLLECTIVES, CollectiveKind
from dcompile.ir.cursor import TextCursor
from dcompile.ir.index import Index, contiguous_strides, flatten
from dcompile.ir.index_text import parse_index, parse_size, parse_sizes
from dcompile.ir.loop_text import PLAIN_CONSTANTS, implied_dtype, implied_reduction_dtype
from dcompile.ir.names import NAME
from dcompile.ir.nodes import (
    Apply,
    Arg,
    Collective,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Matmul,
    Program,
    Reduce,
    Ref,
    Scan,
    Step,
    Store,
    Tile,
    Value,
    Verbatim,
    View,
    Wait,
)
from dcompile.ir.ops import OPS, SCANS
from dcompile.ir.text import VERBATIM

Item = TypeVar("Item")
BUCKET_NAMES = ("buffers", "holders", "wire")
"""Fields of a bucket with names; the others have numbers."""
BUFFER_LINE = rf"(?:{NAME}|`[^`\n]*`)\s*:\s*\w+\["
CALL_LINE = rf"(?:(?:{NAME}|`[^`\n]*`)(?:,\s*)?)*\s*<-"


def parse(text: str) -> Program:
    """Parse a program. Raises `ParseError` with line and column. `verify` checks the meaning."""
    return _ProgramParser(TextCursor(text)).parse()


class _ProgramParser:
    def __init__(self, cursor: TextCursor) -> None:
        self.cursor = cursor
        self.table: dict[str, Buffer] = {}

    def parse(self) -> Program:
        cursor = self.cursor
        cursor.skip_lines()
        cursor.expect(r"program\b", "`program`")
        name = cursor.name()
        cursor.need("(")
        inputs = self._names()
        cursor.need(")")
        cursor.end_of_line()
        facts = self._facts()
        steps: list[Step] = []
        while not cursor.match(r"return(?=\s*\()"):
            steps.append(self._step())
            cursor.skip_lines()
        outputs = parse_args(cursor, self.table)
        cursor.skip_lines()
        cursor.expect(r"$", "the end of the program")
        return Program(name, inputs, outputs, tuple(self.table.values()), tuple(steps), **facts)  # type: ignore[arg-type]

    # --- what comes before steps ---

    def _facts(self) -> dict[str, Any]:
        """Parse the lines before the steps: return fields by name, and fill the table of buffers."""
        facts: dict[str, Any] = {"buckets": ()}
        cursor = self.cursor
        while True:
            cursor.skip_lines()
            if cursor.peek(BUFFER_LINE):
                self._buffer()
            elif cursor.match(r"bucket(?= )"):
                facts["buckets"] += (self._bucket(),)
            elif (word := cursor.match(r"(?:donated|parts|sizes|gradients|arena)(?=:)")) is not None:
                cursor.need(":")
                facts |= self._fact(word)
            else:
                return facts
            cursor.end_of_line()

    def _fact(self, word: str) -> dict[str, Any]:
        cursor = self.cursor
        match word:
            case "donated":
                return {"donated": self._list(cursor.name)}
            case "parts":
                return {"parts": self._list(lambda: (cursor.name(), cursor.integer()))}
            case "sizes":
                return {"sizes": self._list(self._named_size)}
            case "gradients":
                return {"grads": self._list(self._gradient)}
            case _:
                size = parse_size(cursor)
                cursor.need("bytes")
                return {"arena_bytes": size}

    def _named_size(self) -> tuple[str, Index]:
        name = self.cursor.name()
        self.cursor.need("=")
        return name, parse_index(self.cursor)

    def _gradient(self) -> tuple[int, int]:
        self.cursor.need("output")
        position = self.cursor.integer()
        self.cursor.expect(r"of\s+parameter\b", "`of parameter`")
        return position, self.cursor.integer()

    def _buffer(self) -> None:
        cursor = self.cursor
        at = cursor.at
        name = cursor.name()
        if name in self.table:
            cursor.fail(f"there is a buffer {name} already", at)
        cursor.need(":")
        dtype = cursor.expect(r"\w+", "a dtype")
        shape = parse_sizes(cursor)
        strides = parse_sizes(cursor) if cursor.match(r"strides\b") else contiguous_strides(shape)
        device = cursor.name("a device") if cursor.match(r"on\b") else "cpu"
        self.table[name] = Buffer(name, dtype, shape, strides, device)
        if cursor.has("@"):
            storage = cursor.name("a storage")
            cursor.need("+")
            self.table[name] = replace(self.table[name], storage=storage, offset=parse_size(cursor))

    def _bucket(self) -> Bucket:
        """Parse `bucket b0: all_reduce float32[96] on cpu over ddp, params (0, 1), ...`."""
        cursor = self.cursor
        found: dict[str, Any] = dict.fromkeys(("params", "buffers", "offsets"), ())
        found["name"] = cursor.name()
        cursor.need(":")
        found["kind"], found["dtype"] = self._kind(), cursor.name("a dtype")
        cursor.need("[")
        found["numel"] = cursor.integer()
        cursor.need("]")
        cursor.need("on")
        found["device"] = cursor.name("a device")
        cursor.need("over")
        found["group"] = cursor.name("a process group")
        while cursor.has(","):
            word = cursor.expect(rf"(?:{'|'.join(field.name for field in fields(Bucket))})\b", "a field of a bucket")
            found[word] = self._bucket_field(cursor.name if word in BUCKET_NAMES else cursor.integer)
        return Bucket(**found)

    def _bucket_field(self, read: Callable[[], str | int]) -> str | int | tuple[str | int, ...]:
        """Parse one value, or several in parentheses."""
        if not self.cursor.has("("):
            return read()
        items = self._list(read)
        self.cursor.need(")")
        return items

    def _kind(self) -> CollectiveKind:
        kinds = tuple(COLLECTIVES)
        word = self.cursor.expect(rf"(?:{'|'.join(kinds)})\b", f"one of {', '.join(kinds)}")
        return next(kind for kind in kinds if kind == word)

    def _list(self, read: Callable[[], Item]) -> tuple[Item, ...]:
        """Parse one or more items, separated by commas."""
        items = [read()]
        while self.cursor.has(","):
            items.append(read())
        return tuple(items)

    def _names(self) -> tuple[str, ...]:
        """Parse names up to the end of the line or a keyword; there may be none."""
        return self._list(self.cursor.name) if self.cursor.peek(rf"{NAME}|`") else ()

    # --- steps ---

    def _step(self) -> Step:
        cursor = self.cursor
        cursor.match(r"\d+(?=\s)")
        if cursor.match(r"loop(?=\s+[^\s<])"):
            return self._loop()
        if cursor.match(r"start(?=\s+[^\s<])"):
            return self._start()
        if cursor.match(r"wait(?=\s+[^\s<])"):
            bucket, buffers = cursor.name("a bucket"), self._after_colon()
            sent = self._names() if cursor.match(r"sent\b") else ()
            cursor.end_of_line()
            return Wait(bucket, buffers, sent)
        if not cursor.peek(CALL_LINE):
            cursor.fail("expected a step (`loop`, `start`, `wait`, or a call with `<-`) or `return`")
        call = replace(parse_call(cursor, self.table), origin=parse_origin(cursor))
        cursor.end_of_line()
        return call

    def _after_colon(self) -> tuple[str, ...]:
        self.cursor.need(":")
        return self._names()

    def _start(self) -> Collective:
        cursor = self.cursor
        kind, bucket = self._kind(), cursor.name("a bucket")
        cursor.need("over")
        group = cursor.name("a process group")
        into = self._names() if cursor.match(r"into\b") else None
        cursor.need(":")
        made: tuple[str, ...] = ()
        if not cursor.peek(CALL_LINE):
            buffers, call, made = self._names(), None, into or ()
        else:
            call = replace(parse_call(cursor, self.table), origin=parse_origin(cursor))
            buffers = tuple(out for out in call.outs if out is not None) if into is None else into
        cursor.end_of_line()
        return Collective(kind, bucket, group, buffers, call, made)

    def _loop(self) -> Loop:
        cursor = self.cursor
        name = cursor.name("the name of a loop")
        outer = parse_sizes(cursor)
        inner = parse_sizes(cursor) if cursor.match(r"x\b") else ()
        tile = self._tile() if cursor.match(r"by\b") else None
        origin = parse_origin(cursor)
        cursor.end_of_line()
        cursor.skip_lines()
        dtypes = {buffer.name: buffer.dtype for buffer in self.table.values()}
        product = self._product() if cursor.peek(rf"{CALL_LINE}[^\n]* by \d+x\d+x\d+") else None
        if product is not None:
            dtypes[product.out] = product.dtype
        body = BodyParser(cursor, self.table, dtypes)
        body.parse_lines()
        return Loop(name, outer, inner, tuple(body.body), tuple(body.stores), origin, product, tile)

    def _product(self) -> Matmul:
        cursor = self.cursor
        call = parse_call(cursor, self.table)
        cursor.need("in")
        dtype = cursor.expect(r"\w+", "a dtype")
        cursor.need("by")
        tile = self._tile()
        call = replace(call, origin=parse_origin(cursor))
        cursor.end_of_line()
        return Matmul(call, dtype, tile)

    def _tile(self) -> Tile:
        """Parse `128x64x32, 4 warps, 3 stages`, and further fields."""
        cursor = self.cursor
        found: dict[str, Any] = {}
        size = cursor.expect(r"\d+x\d+x\d+", "rows x columns x depth")
        while cursor.has(","):
            if word := cursor.match(r"(?:flat|descriptors)\b"):
                found[word] = True
                continue
            number = cursor.integer()
            found[cursor.expect(r"(?:warps|stages|parts|programs)\b", "warps, stages, parts or programs")] = number
        missing = {"warps", "stages"} - found.keys()
        if missing:
            cursor.fail(f"expected `, 4 {min(missing)}`")
        rows, columns, depth = map(int, size.split("x"))
        return Tile(rows, columns, depth, **found)


# --- bodies of loops --------------------------------------------------------------------------------------------------


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
        dtype = self._suffix() or self.dtypes.get(buffer) or self.cursor.fail(f"unknown buffer {buffer}", at)
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


# --- library calls ----------------------------------------------------------------------------------------------------


FLOAT = r"-?(?:inf|nan|\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+))(?!\w)"
STRING = r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\""
TOKENS = re.compile(rf"{STRING}|`[^`\n]*`|[()\[\],]")
"""Pattern at the end of an argument."""
ORIGIN = r"[^,\n]*(?:,(?! )[^,\n]*)*"


def parse_call(cursor: TextCursor, table: Mapping[str, Buffer]) -> Extern:
    """Parse a call without its origin."""
    outs: list[str | None] = []
    while not cursor.has("<-"):
        if outs:
            cursor.need(",")
        outs.append(None if cursor.match(r"_(?![\w.:])") else cursor.name("a result or `<-`"))
    op = cursor.name("an operator")
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    cursor.need("(")
    while not cursor.has(")"):
        if args or kwargs:
            cursor.need(",")
        if keyword := cursor.match(r"[A-Za-z_]\w*(?==)"):
            cursor.need("=")
            kwargs.append((keyword, parse_arg(cursor, table)))
        else:
            args.append(parse_arg(cursor, table))
    return _with_facts(cursor, Extern(op, tuple(args), tuple(kwargs), tuple(outs), "alloc"))


def _with_facts(cursor: TextCursor, call: Extern) -> Extern:
    """Parse a call's mode and the other fields after its arguments."""
    facts: dict[str, Any] = {}
    cursor.need("[")
    facts["mode"] = cursor.expect(r"(?:out|alloc|mutate)\b", "`out`, `alloc` or `mutate`")
    while not cursor.has("]"):
        cursor.need(",")
        if word := cursor.match(r"(?:effect|aliases)\b"):
            facts[word] = True
        elif cursor.match(r"tells\b"):
            names = [cursor.name("a size symbol")]
            while not cursor.peek(r"[,\]]"):
                names.append(cursor.name("a size symbol"))
            facts["tells"] = tuple(names)
        else:
            facts["cost_us"] = float(cursor.expect(r"[\d.e+-]+", "`effect`, `aliases`, `tells ...` or microseconds"))
            cursor.need("us")
    facts["fallback"] = cursor.has("(fallback)")
    return replace(call, **facts)


def parse_origin(cursor: TextCursor) -> tuple[str, ...]:
    """Parse a step's origin: the text after a `#`, up to the end of the line."""
    if not cursor.has("#"):
        return ()
    entries: list[str] = []
    while not entries or cursor.has(","):
        quoted = cursor.quoted()
        entries.append((cursor.match(ORIGIN) or "").strip() if quoted is None else quoted)
    return tuple(entries)


def parse_args(cursor: TextCursor, table: Mapping[str, Buffer]) -> tuple[Arg, ...]:
    """Parse arguments in parentheses."""
    cursor.need("(")
    args: list[Arg] = []
    while not cursor.has(")"):
        if args:
            cursor.need(",")
            if cursor.has(")"):
                break
        args.append(parse_arg(cursor, table))
    return tuple(args)


def parse_arg(cursor: TextCursor, table: Mapping[str, Buffer]) -> Arg:
    """Parse an argument of a library call, or an output of the program."""
    if cursor.peek(rf"(?:{NAME}|`[^`\n]*`)\["):
        return _view(cursor)
    if (word := cursor.match(r"(?:None|True|False)\b")) is not None:
        return {"None": None, "True": True, "False": False}[word]
    if (text := cursor.match(FLOAT)) is not None:
        return float(text)
    if (text := cursor.match(STRING)) is not None:
        return str(ast.literal_eval(text))
    if (text := cursor.quoted()) is not None:
        return Verbatim(text)
    if (text := cursor.match(rf"{VERBATIM}(?![\w.(])")) is not None:
        return Verbatim(text)
    if cursor.match(r"index(?=\()"):
        return parse_index(cursor)
    if _is_tuple(cursor):
        return parse_args(cursor, table)
    found = cursor.peek(rf"(?!\d){NAME}")  # a number, even if a buffer has such a name
    if found is not None and found[0] in table and table[found[0]].is_tensor:
        buffer = table[cursor.name()]
        return View(buffer.name, buffer.shape, buffer.strides)
    return parse_size(cursor)


def _view(cursor: TextCursor) -> View:
    buffer = cursor.name()
    shape = parse_sizes(cursor)
    strides = parse_sizes(cursor) if cursor.match(r"strides\b") else contiguous_strides(shape)
    return View(buffer, shape, strides, parse_size(cursor) if cursor.match(r"from\b") else 0)


def _is_tuple(cursor: TextCursor) -> bool:
    """Whether parentheses here contain arguments: they are empty, or have a comma at their own level."""
    if not cursor.peek(r"\("):
        return False
    depth = 0
    for token in TOKENS.finditer(cursor.text, cursor.at):
        depth += (token[0] in ("(", "[")) - (token[0] in (")", "]"))
        if depth == 0:
            return not cursor.text[cursor.at + 1 : token.start()].strip()
        if token[0] == "," and depth == 1:
            return True
    return False
