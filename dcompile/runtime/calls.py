"""Runs compiled kernels on the CPU one after another in a single call, by way of a table made beforehand.

It has the addresses that are known when the host program prepares itself; the others, and sizes that only the call
tells, are filled in at each call. `run_calls` of every compiled file walks over it (`codegen/emit/prelude.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcompile.runtime.libraries import kernel, library
from dcompile.runtime.tables import Address, Table, bound, known_of, pointers

METHOD = "calls_from_python"
"""What describes the function that reads the table."""


def calls(
    libraries: Mapping[str, Path], count: int, kernels: Sequence[tuple[str, Sequence[Address | int]]]
) -> Callable[..., Any]:
    """A run of kernels, each its name and arguments, as a function of `count` addresses and sizes that change.

    It returns what the first kernel that fails does, and 0 if none does.
    """
    arguments = [argument for _, some in kernels for argument in some]
    rows = [word for name, some in kernels for word in (_address(libraries[name], name), len(some))]
    given, known = [0] * count, known_of(arguments)
    known_at = 2 + len(given) + len(rows) + len(arguments)
    table = Table(known_at + len(known))
    table.fill([count, len(kernels), *given, *rows, *pointers(table, arguments, 2, known_at), *known])
    return bound(library(libraries[kernels[0][0]]), METHOD, table)


def _address(path: Path, name: str) -> int:
    """Of the function that takes where a kernel's arguments are."""
    found = ctypes.cast(kernel(path, f"{name}_at"), ctypes.c_void_p).value
    assert found is not None
    return found
