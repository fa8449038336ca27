"""The registry of patches as text, with what applies to the installed torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

from dcompile.compat.patches.registry import PATCHES
from dcompile.compat.patches.torch_patch import TorchPatch, installed_version
from dcompile.compat.versions import torch_version


def find_target(dotted: str) -> Any:
    """Return the object of a dotted name. Raises ImportError or AttributeError if this torch lacks it."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[count:], found)
    raise ModuleNotFoundError(f"No module named {parts[0]!r}", name=parts[0])


def status_of(patch: TorchPatch) -> str:
    """Whether a patch applies to the installed torch, and why not."""
    major, minor = version = installed_version()
    if not patch.applies_to(version):
        return f"not needed by torch {major}.{minor}"
    missing = []
    for target in patch.targets:
        try:
            find_target(target)
        except (ImportError, AttributeError):
            missing.append(target)
    return f"does nothing: there is no {', '.join(missing)}" if missing else "applies"


def describe() -> Iterator[str]:
    """Yield lines for each patch, with whether it applies to the installed torch."""
    yield f"torch {torch_version()}: {len(PATCHES)} patches"
    for patch in PATCHES:
        yield ""
        yield f"{patch.name}: {status_of(patch)}"
        yield f"  replaces  {', '.join(patch.targets)}"
        yield f"  reason    {patch.kind}: {patch.reason}"
        yield f"  versions  torch {patch.versions}"
        yield f"  undone    {patch.undone}"
