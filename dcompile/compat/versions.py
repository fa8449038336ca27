"""What is done before torch is loaded: checking its version, and registering the backend."""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import importlib.util
import re
import sys
from typing import Any

from dcompile.errors import UnsupportedTorchError

FIRST_TORCH, END_TORCH = (2, 11), (2, 16)
SUPPORTED = "2.11 to 2.15"
_REGISTRY = "torch._dynamo.backends.registry"


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


class _Registration(importlib.abc.MetaPathFinder):
    """Adds a backend to torch's registry as soon as that is imported, which takes TorchDynamo a second."""

    def __init__(self, entry: importlib.metadata.EntryPoint) -> None:
        self.entry = entry

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return the spec of the registry alone, with a loader that adds the backend."""
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            self.add(module)

        spec.loader.exec_module = exec_module
        return spec

    def add(self, registry: Any) -> None:
        """Add the backend, which is loaded at its first use; an installed package of this name may replace it."""
        registry._BACKENDS.setdefault(self.entry.name, self.entry)


def register_backend(name: str, function: str) -> None:
    """Let torch find a backend, "module:function", by name, as the entry point of an installed package does.

    It loads neither torch nor the function.
    """
    made = _Registration(importlib.metadata.EntryPoint(name, function, "torch_dynamo_backends"))
    if _REGISTRY in sys.modules:
        made.add(sys.modules[_REGISTRY])
    elif not any(isinstance(finder, _Registration) for finder in sys.meta_path):
        sys.meta_path.insert(0, made)
