"""Files, classes and functions have the field's names (docs/glossary.md), and no two classes share one."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layering import ROOT, modules, nodes_of

SAY = {
    "prefetch": "asked fetched ahead asked_ahead asked_for_ahead",
    "interleave, unroll-and-jam": "beside abreast side_by_side",
    "software pipelining": "behind",
    "rematerialize, recompute": "again computed_again",
    "separate allocation; unshare": "apart",
    "donor buffer; reuse of external memory": "lodge lodging lodgings live_with lives_with",
    "epilogue": "ending endings ends_in",
    "split reduction": "spread",
    "horizontal fusion": "together joint_launch joint_launches",
    "loop splitting, index-set splitting": "piece pieces",
    "hoisting": "tables",
    "transpose tile": "turned tiles",
    "vector, vectorized": "wide many",
    "vector lane, stream, track or communicator": "lane lanes",
    "narrowed to int32": "counted",
    "layout, address": "lie lies lying lies_where",
    "view": "look looks looks_at",
    "returned, passed to": "handed handed_on handed_out handed_over",
    "falls back": "given_back",
    "uses, depends on": "goes_by",
    "status, report, notified": "told said hears",
    "matmul, GEMM": "product products",
    "row reduction, column reduction": "sums_of_rows sums_of_columns",
    "collective": "exchange exchanges",
    "progress events": "mark marks",
    "in flight, pending collective": "flying flight",
    "peer memory, copy-engine all-gather": "nearby pull pulls pulling",
    "packing, coalesced messages": "parcel parcels messages",
    "watchdog": "lookout",
    "heartbeat, coordination": "beat line_to_others",
    "services": "toolbox",
    "graph boundary": "border",
    "eager region": "between",
    "after_call, record_forward, guard_tensor_identity, connect, forecast": "judge ran told_apart meet outlook",
    "what it does, in the field's word": (
        "alone arcs asking bags bases crew cut doubles drawing far garbage given grids held host keys kept lean "
        "literally meanings narrow needed nobody others puts quick rows settling t tangents unread unreduced unscaled "
        "unsure waiting windows"
    ),
}
"""The field's words -> what the glossary has them say instead of, and bare words of the same sort."""
FILES = frozenset(("figures", "frames", "peers"))
"""Words that say too little as the name of a file, though not of a class in one."""
PRIVATE = {word: field for field, words in SAY.items() for word in words.split()}
NEVER_A_PART = frozenset((
    "abreast", "apart", "border", "counted", "exchange", "fetched", "flying", "handed", "lane", "lanes", "lie", "lies",
    "lodging", "lookout", "lying", "nearby", "parcel", "parcels", "pieces", "pulling", "said", "spread", "told",
    "together", "toolbox", "turned", "wide",
))  # fmt: skip
"""Of these, words that are no part of a longer name either: they have no other meaning in the field."""
NO_FUNCTION = frozenset((
    "abreast", "again", "apart", "asked", "behind", "beside", "between", "endings", "fetched", "flight", "flying",
    "goes_by", "handed", "hears", "judge", "lies", "lodging", "look", "looks", "meet", "outlook", "parcel", "pieces",
    "ran", "said", "spread", "together", "told", "told_apart", "turned",
))  # fmt: skip
"""Of these, what no function of the package is called. Others are plain English for what a small function returns."""
FIELDS = frozenset(("pieces", "together"))
"""Of these, what fields may be called: a CUDA graph records a piece, and units have a number that they share."""
FOLDERS = {"host"}
"""Words that name a folder: `emit/host` writes programs of the host."""
LIMITS = frozenset(("LEAST", "MOST", "NEAR", "WORTH", "FEW", "AHEAD"))
BARE_LIMITS = LIMITS | {"SHARE", "LIMIT"}


def words_of(name: str) -> list[str]:
    """Words of a file's or class's name, lower-case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def private_word(name: str) -> str | None:
    """The word of the glossary's left column that a file's or class's name is, or has as a part."""
    words = words_of(name)
    if "_".join(words) in PRIVATE:
        return "_".join(words)
    return next((word for word in words if word in NEVER_A_PART), None)


def defined(*kinds: type[ast.AST]) -> Iterator[tuple[str, str]]:
    """(name, module) of all definitions of these kinds."""
    for path, module in modules():
        yield from ((node.name, module) for node in nodes_of(path.read_text()) if isinstance(node, kinds))  # type: ignore[attr-defined]


def stored_names() -> Iterator[tuple[str, str]]:
    """(name, module:line) of all variables that the package sets."""
    for path, module in modules():
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, f"{module}:{node.lineno}"


def field_word(name: str, where: str) -> str:
    word = private_word(name) or name.strip("_").lower()
    return f"{where} {name}: say {PRIVATE.get(word, 'what it does')}"


def test_no_file_or_folder_has_a_private_name() -> None:
    inside = {path.relative_to(ROOT).with_suffix("") for path, _ in modules()}
    names = {(part, path.as_posix()) for path in inside for part in path.parts if part not in FOLDERS}
    wrong = [field_word(part, path) for part, path in sorted(names) if private_word(part) or part in FILES]
    assert not wrong, "\n".join(wrong)


def test_no_class_has_a_private_name() -> None:
    wrong = [field_word(name, module) for name, module in defined(ast.ClassDef) if private_word(name)]
    assert not wrong, "\n".join(wrong)


def test_no_function_has_a_private_name() -> None:
    functions = defined(ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [field_word(name, module) for name, module in functions if name.strip("_") in NO_FUNCTION]
    assert not wrong, "\n".join(wrong)


def fields() -> Iterator[tuple[str, str]]:
    """(name, module) of all attributes that the package sets, and of all fields of its classes."""
    for path, module in modules():
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr, module
            elif isinstance(node, ast.ClassDef):
                annotated = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
                yield from ((target.id, module) for target in annotated if isinstance(target, ast.Name))


def test_no_field_has_a_private_name() -> None:
    names = NO_FUNCTION - FIELDS
    wrong = [field_word(name, module) for name, module in fields() if name.strip("_") in names]
    assert not wrong, "\n".join(wrong)


def test_no_threshold_leaves_out_of_what_it_is() -> None:
    wrong = [
        f"{where} {name}"
        for name, where in stored_names()
        if name.strip("_") in BARE_LIMITS or (name.isupper() and LIMITS & set(name.split("_")))
    ]
    assert not wrong, f"MIN_ or MAX_, what, and its unit: {wrong}"


def test_every_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for name, module in defined(ast.ClassDef):
        places[name].append(module)
    several = {name: found for name, found in places.items() if len(found) > 1}
    assert not several, f"one name, several classes: {several}"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("asked", "asked"),
        ("Abreast", "abreast"),
        ("_LyingBuffers", "lying"),
        ("side_by_side", "side_by_side"),
        ("T", "t"),
        ("LodgingPlan", "lodging"),
        ("handed_over", "handed_over"),
        ("JointLaunch", "joint_launch"),
        ("argument_tables", None),
        ("AheadOfTimeProgram", None),
        ("HostProgram", None),
        ("PendingCollective", None),
    ],
)
def test_finds_a_private_name(name: str, word: str | None) -> None:
    assert private_word(name) == word


def test_our_glossary_has_the_words_to_say() -> None:
    """Each term that this file proposes is explained, so that a reader of a failure finds it."""
    text = Path(ROOT / "docs/glossary.md").read_text().lower()
    terms = ("prefetch", "interleave", "software pipelining", "rematerialize", "donor buffer", "epilogue", "watchdog")
    assert not [term for term in terms if term not in text]
