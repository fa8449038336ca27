"""Parse library calls and their arguments: `y <- aten.mm.default(x[4, 8], w[8, 4]) [out]  # head`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dcompile.ir.buffers import Buffer
from dcompile.ir.cursor import TextCursor
from dcompile.ir.index import contiguous_strides
from dcompile.ir.index_text import parse_index, parse_size, parse_sizes
from dcompile.ir.names import NAME
from dcompile.ir.nodes import Arg, Extern, Verbatim, View
from dcompile.ir.text import VERBATIM

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
