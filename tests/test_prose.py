"""Docstrings and comments are plain: sentences of at most 35 words, and no words that docs/glossary.md replaces."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job import ROOT

MAX_SENTENCE_WORDS = 35
MIN_COMMAS_OF_LIST = 5
"""An enumeration of names or figures may be longer."""
FOLDERS = ("dcompile", "launch", "benchmarks", "tools")
PRIVATE = re.compile(r"\b(?:goes by|hears of|is told of|handed out|hand(?:s|ed) on|lodg\w+|abreast)\b")
"""Some of the glossary's left column, those that can mean nothing else."""
Text = tuple[int, str]
"""First line, and what it says."""


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def texts(path: Path) -> list[Text]:
    """Docstrings of modules, classes, functions and fields, and comments on lines of their own."""
    text = path.read_text()
    return [*_docstrings(ast.parse(text)), *_comments(text)]


def _docstrings(tree: ast.AST) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, re.sub(r"^ {4,}.*$", "", inspect.cleandoc(node.value.value), flags=re.MULTILINE)


def _comments(text: str) -> Iterator[Text]:
    found: list[list[str]] = []
    before, starts = 0, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, alone = token.start[0], token.line.strip().startswith("#")
        if not (alone and line == before + 1):
            found.append([])
            starts.append(line)
        found[-1].append(token.string.lstrip("#").strip())
        before = line if alone else 0
    yield from zip(starts, map(" ".join, found), strict=True)


def sentences(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n|\n\s*(?:- |\d+\. )|\n\s*(?=`?\w+`?: )", text):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(block.split()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_are_short(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in sources()
        if path.is_relative_to(ROOT / folder)
        for line, text in texts(path)
        for sentence in sentences(text)
        if len(sentence.split()) > MAX_SENTENCE_WORDS
        and sum(bool(re.search(r"\w", word)) for word in sentence.split()) > MAX_SENTENCE_WORDS
        and sentence.count(",") < MIN_COMMAS_OF_LIST
    ]
    assert not found, "\n".join(["one thought a sentence:", *found])


def test_words_are_the_fields() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words[0]}"
        for path in sources()
        for line, text in texts(path)
        if (words := PRIVATE.findall(re.sub(r"`[^`]*`", "", text)))
    ]
    assert not found, "\n".join(["docs/glossary.md has the field's words for these:", *found])
