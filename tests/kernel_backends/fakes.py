"""Fakes of compilers that are not installed here: torch's contract, as their packages register it."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

from dcompile import compat
from dcompile.kernel_backends.names import NAMED

FAKED = ("tensorrt", "tvm", "ipex", "openxla")


def eager(gm: Any, example_inputs: Any) -> Any:
    """A compiler by torch's contract that runs the graph as it is."""
    del example_inputs
    return gm.forward


@contextlib.contextmanager
def installed(name: str, compiler: Any = eager) -> Iterator[None]:
    """As if the package of a compiler were installed, and registered `compiler` with torch when it is imported.

    Packages that are installed stay what they are.
    """
    if name not in FAKED:
        yield
        return
    module = NAMED[name].modules[0]
    fake = types.ModuleType(module)
    fake.__version__ = "1.2.3"  # type: ignore[attr-defined]
    known = compat.dynamo.registered_backend

    def lookup(asked: str) -> Any:
        return compiler if asked == name else known(asked)

    with mock.patch.dict(sys.modules, {module: fake}), mock.patch.object(compat.dynamo, "registered_backend", lookup):
        yield
