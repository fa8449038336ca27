"""dcompile: a compiler for distributed training in PyTorch. Its public names are loaded at first use."""

import importlib
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

from dcompile.compat.versions import check_torch as _check_torch
from dcompile.compat.versions import register_backend as _register_backend
from dcompile.config import Config

if TYPE_CHECKING:
    from dcompile.aot.export import export
    from dcompile.api import compile, is_compiled, list_mode_options, list_options, receipt
    from dcompile.bisect.search import bisect
    from dcompile.errors import (
        BuildError,
        DcompileError,
        ExportError,
        NotCompiledError,
        OptionError,
        PlanMismatchError,
        PrecompileError,
        UnsupportedTorchError,
        WrongResultError,
    )
    from dcompile.explain.plan_only import explain
    from dcompile.explain.profile import profile
    from dcompile.precompile.job import precompile
    from dcompile.runtime.program.exported import load
    from dcompile.training import train_step

__all__ = [
    "BuildError",
    "Config",
    "DcompileError",
    "ExportError",
    "NotCompiledError",
    "OptionError",
    "PlanMismatchError",
    "PrecompileError",
    "UnsupportedTorchError",
    "WrongResultError",
    "bisect",
    "compile",
    "explain",
    "export",
    "is_compiled",
    "list_mode_options",
    "list_options",
    "load",
    "precompile",
    "profile",
    "receipt",
    "train_step",
]

_HOMES = types.MappingProxyType(
    {"export": "aot.export", "load": "runtime.program.exported", "profile": "explain.profile", "train_step": "training"}
)
"""Public name -> its module, where that is not `api`. `load` works without the compiler."""

_check_torch()
_register_backend("dcompile", "dcompile.backend:dcompile_backend")  # also where the package is not installed


def _populate_cache(name: str, content: bytes) -> None:
    from dcompile.runtime.cache import portable  # late: few programs load artifacts

    portable.populate(name, content)


if "torch" in sys.modules:  # from here on, torch.compiler.load_cache_artifacts() knows entries of ours
    from dcompile.compat import cache_artifacts as _cache_artifacts

    _cache_artifacts.register("dcompile", _populate_cache)


class FunctionPackage(types.ModuleType):
    """A package that is also the function of its name: importing a submodule must not hide the function."""

    _functions = types.MappingProxyType(
        {
            "dcompile.bisect": "dcompile.bisect.search",
            "dcompile.explain": "dcompile.explain.plan_only",
            "dcompile.precompile": "dcompile.precompile.job",
        }
    )
    """Package -> module of the function."""

    def _function(self) -> Any:
        return getattr(importlib.import_module(self._functions[self.__name__]), self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._function()(*args, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """What `help` shows: the function's own signature and text."""
        function = self._function()
        return f"{function.__name__}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"


def __dir__() -> list[str]:
    """List public names, also those that are not loaded yet, for completion in notebooks."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """Load public names lazily: `import dcompile.ir` and the option table need no torch."""
    if name in ("bisect", "explain", "precompile"):
        return importlib.import_module(f"dcompile.{name}")  # a package that can be called
    if name == "__version__":
        return importlib.import_module("dcompile.toolchain").own_version()
    if name not in __all__:
        raise AttributeError(f"module 'dcompile' has no attribute {name!r}")
    home = "errors" if name.endswith("Error") else _HOMES.get(name, "api")
    return getattr(importlib.import_module(f"dcompile.{home}"), name)
