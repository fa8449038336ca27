"""Prune the C++ prelude to the declarations that a kernel file uses. Parsing all of it costs g++ 50 ms a file.

Declarations are kept by name, all of one name together, so that a call finds the same overloads as in the whole
prelude. Preprocessor lines are always kept.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dcompile.codegen.emit.cpp.library.base import PRELUDE

Macros: TypeAlias = dict[str, list[tuple[list[str], str]]]
"""Macros with parameters: parameter names and replacement text of each definition."""

CALLED = "calls_from_python"
"""Function called from outside the file."""
OPERATOR = "operator"
"""Name of declarations without one, which are always kept."""
SIGNS = {
    "VECTORS": re.compile("VECTORS|stream_bytes"), "PAIRS": re.compile("pair|quad|two|twice|both", re.IGNORECASE),
    "DOUBLES": re.compile("float64|lgamma_"),
}  # fmt: skip
"""Patterns in the text of kernels that need a part of the prelude: vectors; steps of several vectors (`vectorize.py`);
float64, in which lgamma is computed."""
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_MACRO = re.compile(r"#define (\w+)\(([^()]*)\)(.*)", re.DOTALL)
_MACROS, _MACROS_ALONE = re.compile(r"\w+\([^()]*\)"), re.compile(r"(?:\w+\([^()]*\)\s*)+")
_WORD = re.compile(r"[A-Za-z_]\w*")
_AROUND = re.compile(r"template *<[^<>]*>|__attribute__\(\((?:[^()]|\([^()]*\))*\)\)|alignas\(\d+\)|\[[^][]*\]")
"""Parts of a declaration that are not its name."""
_FUNCTION = re.compile(r"INLINE [^(]*?(\w+)\(")
_BODY, _STRUCT, _CALL = re.compile(r"\{[^{}]*\}"), re.compile(r"\bstruct (\w+)"), re.compile(r"(\w+)\(")


@dataclass(frozen=True, slots=True)
class Declarations:
    """Declarations that belong together, or a preprocessor line."""

    text: str
    names: frozenset[str]
    """Declared names; none for a preprocessor line, which every file has."""
    words: frozenset[str]
    """All words in it."""


def prune_prelude(kernels: str) -> str:
    """Return the part of the prelude that the text of some kernels uses."""
    pieces, where = _declarations()
    found: set[str] = set()
    new = {*_WORD.findall(kernels), CALLED, OPERATOR}
    while new:
        found |= new
        new = {word for name in new for n in where.get(name, ()) for word in pieces[n].words} - found
    left_out = [name for name, sign in SIGNS.items() if not sign.search(kernels)]
    head = "".join(f"#define NO_{name}\n" for name in left_out)
    return head + "".join(piece.text for piece in pieces if not piece.names or piece.names & found)


@functools.cache
def _declarations() -> tuple[list[Declarations], Mapping[str, list[int]]]:
    """Return the whole prelude, in order, and the declarations of each name."""
    texts = list(_split(_COMMENT.sub("", PRELUDE)))
    macros: Macros = defaultdict(list)
    for made in filter(None, map(_MACRO.match, texts)):
        macros[made[1]].append((_WORD.findall(made[2]), made[3].replace("\\\n", "\n")))
    pieces: list[Declarations] = []
    where: dict[str, list[int]] = defaultdict(list)
    for text in texts:
        if text.startswith("#"):
            pieces.append(Declarations(text, frozenset(), frozenset()))
            continue
        code, words = text, frozenset(_WORD.findall(text))
        while called := words & macros.keys():
            code = _expanded(code, {name: macros[name] for name in called})
            words = frozenset(_WORD.findall(code))
        for name in (names := _declared(code, words)):
            where[name].append(len(pieces))
        pieces.append(Declarations(text, names, words))
    return pieces, where


def _split(text: str) -> Iterator[str]:
    """Yield whole declarations, and the preprocessor lines between them."""
    piece, depth = "", 0
    for line in filter(str.strip, text.splitlines(keepends=True)):
        piece += line
        depth += line.count("{") - line.count("}")
        end = line.rstrip()
        if depth == 0 and (not end.endswith("\\") if piece.startswith("#") else end.endswith((";", "}", ")"))):
            yield from (f"{call}\n" for call in _MACROS.findall(piece)) if _MACROS_ALONE.fullmatch(piece) else (piece,)
            piece = ""
    assert not piece, f"the prelude ends within a declaration: {piece}"


def _expanded(code: str, macros: Macros) -> str:
    """Expand a declaration as the preprocessor does, by each definition of a macro."""

    def made(found: re.Match[str]) -> str:
        given = [one.strip() for one in found[2].split(",")]
        return " ".join(_filled(body, dict(zip(names, given, strict=True))) for names, body in macros[found[1]])

    return re.sub(rf"\b({'|'.join(macros)})\(([^()]*)\)", made, code)


def _filled(body: str, given: Mapping[str, str]) -> str:
    return re.sub(r" *## *", "", _WORD.sub(lambda word: given.get(word[0], word[0]), body))


def _declared(code: str, words: frozenset[str]) -> frozenset[str]:
    """Return the names that declarations define."""
    if names := {OPERATOR} if OPERATOR in words else {*_FUNCTION.findall(code), *_STRUCT.findall(code)}:
        return frozenset(names)
    count = 1
    while count:
        code, count = _BODY.subn(";", code)
    for declaration in filter(str.strip, _AROUND.sub("", code).split(";")):
        found = _CALL.search(declaration)
        names.add(found[1] if found else _WORD.findall(declaration.split("=")[0])[-1])
    return frozenset(names)
