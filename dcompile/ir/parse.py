"""Parse programs from text: `parse(show(program))` equals the program, and text written by hand may be shorter.

By hand, steps need no numbers, values may have any names, and expressions may be nested. `x[i0, j0]` is the element at
these coordinates, and a bare `x` among arguments and outputs is the whole buffer. Lines may end in comments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.collective_kinds import COLLECTIVES, CollectiveKind
from dcompile.ir.cursor import TextCursor
from dcompile.ir.index import Index, contiguous_strides
from dcompile.ir.index_text import parse_index, parse_size, parse_sizes
from dcompile.ir.names import NAME
from dcompile.ir.nodes import Collective, Loop, Matmul, Program, Step, Tile, Wait
from dcompile.ir.parse_call import parse_args, parse_call, parse_origin
from dcompile.ir.parse_loop import BodyParser

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
