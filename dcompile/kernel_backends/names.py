"""Compilers that option `kernels` can name: a table, any other backend in torch's registry, and callables.

Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from dcompile.errors import OptionError, suggestion

OWN = ("auto", "aten")
"""Values of option `kernels` that name no other compiler."""
REPLAYED = "cudagraphs"
"""Value for ATen's kernels, replayed as CUDA graphs: a setting of dcompile, not a compiler of regions."""


@dataclass(frozen=True, slots=True)
class NamedBackend:
    """Row of the table: packages to install, and regions that the compiler accepts."""

    modules: tuple[str, ...]
    """Modules that must be installed. The first one registers the compiler with torch, and has its version."""
    install: str
    """Command that installs it."""
    trains: bool = True
    """Whether it accepts regions of training graphs."""
    symbolic: bool = False
    """Whether it accepts regions with symbolic sizes."""
    custom_ops: bool = False
    """Whether it accepts operators that are not torch's own."""
    dtypes: tuple[str, ...] = ()
    """Dtypes that it accepts; empty for all."""
    records: bool = False
    """Whether a CUDA graph may record its code."""


_NUMERIC = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")

NAMED: Mapping[str, NamedBackend] = {
    "inductor": NamedBackend(("torch",), "pip install torch", symbolic=True, custom_ops=True, records=True),
    "onnxruntime": NamedBackend(
        ("onnxruntime", "onnxscript"), "pip install onnxruntime onnxscript", trains=False, dtypes=_NUMERIC
    ),
    "openvino": NamedBackend(("openvino",), "pip install openvino", trains=False, dtypes=_NUMERIC),
    "tensorrt": NamedBackend(("torch_tensorrt",), "pip install torch-tensorrt", trains=False),
    "tvm": NamedBackend(("tvm",), "pip install apache-tvm", trains=False),
    "ipex": NamedBackend(("intel_extension_for_pytorch",), "pip install intel-extension-for-pytorch"),
    "openxla": NamedBackend(("torch_xla",), "pip install torch_xla"),
}
"""Compilers for regions of which more is known than their name in torch's registry."""
ANY = NamedBackend((), "", symbolic=True, custom_ops=True)
"""Row of all others: they are asked for every region, and may raise."""


@dataclass(frozen=True)
class KernelBackend:
    """A requested compiler: a row of `NAMED`, a backend in torch's registry, or a callable with their signature.

    Its text, name and version, represents it in cache keys and in what ranks compare.
    """

    name: str
    version: str
    row: NamedBackend
    function: Callable[..., Any] | None = field(default=None, compare=False)
    """`fn(gm, example_inputs)`; None for one that is found by its name."""
    is_stable: bool = True
    """Whether name and version identify it. Otherwise, nothing that it makes is cached."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()

    @property
    def cache_objection(self) -> str:
        """Why nothing that it makes is cached; empty if it is."""
        return (
            "" if self.is_stable else f"its kernels come from {self.name}, and nothing tells that from another by name"
        )


def find_backend(asked: Any) -> str | KernelBackend:
    """Resolve a value of option `kernels`: a name of `OWN` or `REPLAYED` stays, others become a `KernelBackend`.

    Raises OptionError for an unknown name. For a compiler that is not installed, the error has the line that installs
    it.
    """
    if isinstance(asked, KernelBackend) or asked in (*OWN, REPLAYED):
        return asked  # type: ignore[no-any-return]
    if callable(asked):
        return _of_callable(asked)
    if asked not in NAMED:
        return _of_registry(str(asked))
    row = NAMED[asked]
    missing = [module for module in row.modules if not _is_installed(module)]
    if missing:
        raise OptionError(
            f"dcompile: kernels={asked!r} needs {', '.join(missing)}, which is not installed: {row.install}"
        )
    return KernelBackend(asked, _version_of(row.modules[0]), row)


def _of_registry(name: str) -> KernelBackend:
    """Find a backend in torch's registry. Only one that an installed package declares is known by its version."""
    import torch

    known = {*torch.compiler.list_backends(exclude_tags=())} - {"dcompile"}
    if name not in known:
        names = (*OWN, REPLAYED, *NAMED, "a callable with torch's contract for backends, fn(gm, example_inputs)")
        raise OptionError(f"dcompile: unknown value kernels={name!r}{suggestion(name, names, 'valid values')}")
    declared = [one.dist for one in entry_points(group="torch_dynamo_backends", name=name)]
    found = declared[0].version if declared and declared[0] is not None else ""
    return KernelBackend(name, found, ANY, is_stable=bool(found))


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version_of(module: str) -> str:
    """Version of a module's distribution, else the module's own `__version__`; empty if there is neither."""
    found = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(found, str):
        return str(found)
    try:
        return version(packages_distributions().get(module, [module])[0])
    except PackageNotFoundError:
        return ""


def _of_callable(function: Callable[..., Any]) -> KernelBackend:
    """Identify a callable by its module and qualified name, with the version of its package or a digest of its file."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        return KernelBackend(f"{type(function).__module__}.{type(function).__qualname__}", "", ANY, function, False)
    found = _version_of(module.partition(".")[0]) or _digest_of(function)
    is_stable = bool(found) and "<" not in name and module != "__main__" and _is_there(module, name, function)
    return KernelBackend(f"{module}.{name}", found, ANY, function, is_stable)


def _is_there(module: str, name: str, function: Any) -> bool:
    """Whether the name leads to this callable. A decorated or bound one may have another's name."""
    found: Any = sys.modules.get(module)
    for piece in name.split("."):
        found = getattr(found, piece, None)
    return found is function


def _digest_of(function: Any) -> str:
    """Digest of a function's source file; empty if it cannot be read."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""
