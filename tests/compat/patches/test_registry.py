"""Every patch of torch has a row, each row is about something that torch has, and all of them are undone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcompile.compat.patches.registry import PATCHES, find_target, patched, status_of
from dcompile.compat.patches.torch_patch import FIRST, LAST, PatchRequest, installed_version

ROOT = Path(__file__).parents[3] / "dcompile"
FOREIGN = ("torch", "sympy", "networkx", "transformers", "deepspeed")
STATE = {"DistributedDataParallel._active_ddp_module"}
"""What torch itself sets and resets in the same way."""

HELPER = "replaced_attribute"
"""The function of `torch_patch.py` that makes plain patches: whoever calls it makes one."""
PATCHING = ("unittest.mock.patch", HELPER)


def base_of(target: ast.expr) -> str:
    """The name that attributes and subscripts begin with; "" if it is no name."""
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def patching_functions(source: str) -> Iterator[tuple[str, str]]:
    """(top-level function or class, what it replaces) of all that a module patches in foreign code."""
    tree = ast.parse(source)
    foreign = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] in FOREIGN
    }
    for owner in tree.body:
        if not isinstance(owner, (ast.FunctionDef, ast.ClassDef)):
            continue
        for node in ast.walk(owner):
            called = node.func if isinstance(node, ast.Call) else None
            if called and ast.unparse(called).startswith(PATCHING) and owner.name != HELPER:
                yield owner.name, ast.unparse(node)
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if (
                    isinstance(target, ast.Attribute)
                    and base_of(target) in foreign
                    and ast.unparse(target) not in STATE
                ):
                    yield owner.name, ast.unparse(target)


def used_by(tree: ast.Module, names: set[str]) -> set[str]:
    """Those names, and the functions of the module that they use."""
    tops = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    waiting, found = list(names & tops.keys()), set[str]()
    while waiting:
        name = waiting.pop()
        found.add(name)
        words = {leaf.id for leaf in ast.walk(tops[name]) if isinstance(leaf, ast.Name)}
        waiting += words & tops.keys() - found
    return found


def test_every_patch_has_a_row() -> None:
    rows: dict[str, set[str]] = {}
    for patch in PATCHES:
        rows.setdefault(patch.apply.__module__, set()).add(patch.name)
    missing = []
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(("dcompile", *path.relative_to(ROOT).with_suffix("").parts))
        source = path.read_text()
        if found := list(patching_functions(source)):
            known = used_by(ast.parse(source), rows.get(module, set()))
            missing += [f"{module}.{name}: {what}" for name, what in found if name not in known]
    assert not missing, "a patch without a row in compat/patches/registry.py:\n" + "\n".join(missing)


def test_a_patch_without_a_row_is_found() -> None:
    source = "import torch.nn.functional as F\ndef f():\n    F.linear = None\n    x = F.relu\n    x.y = 3"
    assert list(patching_functions(source)) == [("f", "F.linear")]
    assert len(list(patching_functions("def f():\n    with unittest.mock.patch.object(torch, 'x', 1): pass"))) == 1
    assert len(list(patching_functions("def f():\n    return replaced_attribute(torch, 'x', lambda own: 1)"))) == 1


def test_rows_are_whole() -> None:
    names = [patch.name for patch in PATCHES]
    assert len(set(names)) == len(names)
    for patch in PATCHES:
        assert FIRST <= patch.first <= patch.last <= LAST and patch.targets and patch.reason and patch.undone


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_targets_are_there(patch: object) -> None:
    """On each supported version: a name that moved leaves a patch without effect, and nobody would know."""
    if any(target.startswith("networkx") for target in patch.targets):  # type: ignore[attr-defined]
        pytest.importorskip("networkx")
    assert status_of(patch) == "applies" or "not needed" in status_of(patch)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["frame", "graph", "partition"])
def test_a_stage_leaves_nothing_behind(stage: str) -> None:
    needed = [patch for patch in PATCHES if stage in patch.stages and patch.applies_to(installed_version())]
    targets = [target for patch in needed for target in patch.targets]
    targets = [target for target in targets if not target.startswith("networkx")]

    def seen() -> list[object]:
        found = [find_target(target) for target in targets]
        return [dict(value) if isinstance(value, dict) else value for value in found]

    before = seen()
    with patched(stage, PatchRequest(example_inputs=[torch.ones(2)])):  # type: ignore[arg-type]
        assert seen() != before
    assert seen() == before


@pytest.mark.usefixtures("forks")
def test_the_command_lists_every_patch() -> None:
    found = subprocess.run((sys.executable, "-m", "dcompile.compat"), capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert f"torch {torch.__version__.partition('+')[0]}" in found.stdout
    assert all(f"\n{patch.name}: " in found.stdout for patch in PATCHES)
