"""Supported versions of torch, checked before torch is loaded."""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING

from dcompile.errors import UnsupportedTorchError

if TYPE_CHECKING:
    pass


FIRST_TORCH, END_TORCH = (2, 11), (2, 16)
SUPPORTED = "2.11 to 2.15"


def torch_version() -> str:
    """Version of the installed torch, from package metadata if possible, so that torch is not loaded."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        import torch  # built from source without metadata

        return str(torch.__version__)


def check_torch(version: str | None = None) -> None:
    """Raise UnsupportedTorchError unless torch is 2.11 to 2.15. It reads package metadata, so torch is not loaded."""
    version = torch_version() if version is None else version
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST_TORCH <= (int(found[1]), int(found[2])) < END_TORCH:
        raise UnsupportedTorchError(
            f"dcompile: torch {version} is installed, but torch >=2.11,<2.16 is needed; "
            "install a version in that range, for example: pip install 'torch>=2.11,<2.16'"
        )
