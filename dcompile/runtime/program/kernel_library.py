"""Compiled libraries, each loaded once, and their functions."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from dcompile.errors import BuildError


@cache
def library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"dcompile: cannot load compiled kernels from {path}: {error}; delete it to build it again"
        ) from error


def kernel(path: Path, name: str) -> Any:
    """Find a function of a compiled library; it returns an integer."""
    try:
        function = getattr(library(path), name)
    except AttributeError:
        raise BuildError(f"dcompile: {path} has no kernel {name}; delete it to build it again") from None
    function.restype = ctypes.c_long
    return function
