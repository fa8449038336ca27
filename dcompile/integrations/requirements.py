"""Lowest supported version of each optional package, checked when its integration is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

LOWEST = {
    "accelerate": (1, 10),
    "deepspeed": (0, 18),
    "lightning": (2, 5),
    "peft": (0, 18),
    "transformers": (5, 10),
    "trl": (0, 24),
}
"""Distribution -> its lowest supported version; pyproject.toml's extras have the same."""


def require(package: str, module: str) -> None:
    """Raise ImportError, with the line that installs it, unless the `package` that a `module` needs is new enough."""
    found = _version(package)
    if found is not None and _parsed(found) >= LOWEST[package]:
        return
    wanted = ".".join(map(str, LOWEST[package]))
    have = "it is not installed" if found is None else f"{found} is installed"
    raise ImportError(f"{module} needs {package} {wanted} or newer ({have}): pip install '{package}>={wanted}'")


def too_old(package: str) -> str:
    """Warning for a user whose installed `package` is older than the tested versions; empty otherwise."""
    found = _version(package)
    if found is None or _parsed(found) >= LOWEST[package]:
        return ""
    wanted = ".".join(map(str, LOWEST[package]))
    return f"{package} {found} is older than {wanted}, the lowest version that dcompile is tested with"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package) if importlib.util.find_spec(package) else None
    except (importlib.metadata.PackageNotFoundError, ValueError):  # ValueError: sys.modules holds None for it
        return None


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
