"""Files, classes and functions have the field's names (docs/glossary.md), and no two classes share one."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.test_layering import modules, nodes_of

PRIVATE_FILES = frozenset((
    "abreast", "again", "ahead", "apart", "arcs", "asked", "bags", "behind", "beside", "bases", "between", "border",
    "cut", "doubles", "drawing", "exchange", "far", "fetched", "figures", "flying", "frames", "garbage", "grids",
    "keys", "lanes", "lean", "lodging", "lookout", "marks", "meanings", "messages", "narrow", "nearby", "needed",
    "parcels", "peers", "pieces", "pulling", "puts", "quick", "rows", "settling", "spread", "tables", "tangents",
    "tiles", "together", "toolbox", "told", "unread", "unreduced", "unscaled", "waiting", "wide", "windows",
))  # fmt: skip
PRIVATE_CLASSES = frozenset((
    "Abreast", "Ahead", "Alone", "Apart", "Asked", "Behind", "Beside", "Between", "Border", "Counted", "Crew",
    "Fetched", "Flight", "Given", "Host", "Kept", "Lanes", "Literally", "Lodging", "Lookout", "Marks", "Nearby",
    "Nobody", "Others", "Parcel", "Pulls", "Said", "Settling", "Spread", "T", "Told", "Toolbox", "Turned", "Unsure",
))  # fmt: skip
PRIVATE_CONSTANTS = frozenset(("LEAST", "MOST", "SHARE", "NEAR", "WORTH", "FEW", "LIMIT"))


def defined(kind: type[ast.AST]) -> list[tuple[str, str]]:
    """(name, module) of all definitions of a kind."""
    found = ((path, name, nodes_of(path.read_text())) for path, name in modules())
    return [(node.name, module) for _, module, nodes in found for node in nodes if isinstance(node, kind)]  # type: ignore[attr-defined]


def test_no_file_has_a_private_name() -> None:
    wrong = [str(path) for path, _ in modules() if path.stem in PRIVATE_FILES]
    assert not wrong, f"docs/glossary.md has the field's words for these: {wrong}"


def test_no_class_has_a_private_name() -> None:
    wrong = [f"{module}.{name}" for name, module in defined(ast.ClassDef) if name.strip("_") in PRIVATE_CLASSES]
    assert not wrong, f"docs/glossary.md has the field's words for these: {wrong}"


def test_no_threshold_leaves_out_of_what_it_is() -> None:
    found = ((path, name, nodes_of(path.read_text())) for path, name in modules())
    wrong = [
        f"{module}:{node.lineno} {node.id}"
        for _, module, nodes in found
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRIVATE_CONSTANTS
    ]
    assert not wrong, f"MIN_ or MAX_, what, and its unit: {wrong}"


def test_every_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for name, module in defined(ast.ClassDef):
        places[name].append(module)
    several = {name: found for name, found in places.items() if len(found) > 1}
    assert not several, f"one name, several classes: {several}"
