"""Runs compiled kernels on the CPU one after another in a single call, by way of a table made beforehand.

It has the addresses that are known when the host program prepares itself; the others, and sizes that only the call
reports, are filled in at each call. Every compiled file has a `run_calls` that walks over it
(`codegen/emit/cpp/library/base.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcompile.runtime.program.argument_table import Address, ArgumentTable, address_of, bound
from dcompile.runtime.program.kernel_library import kernel, library

METHOD = "calls_from_python"
"""What describes the function that reads the table."""


def calls(
    libraries: Mapping[str, Path], count: int, kernels: Sequence[tuple[str, Sequence[Address | int]]]
) -> Callable[..., Any]:
    """A run of kernels, each its name and arguments, as a function of `count` addresses and sizes that change.

    It returns what the first kernel that fails does, and 0 if none does.
    """
    rows = [word for name, some in kernels for word in (_entry(libraries[name], name), len(some))]
    arguments = [argument for _, some in kernels for argument in some]
    table = ArgumentTable.laid_out([count, len(kernels)], [0] * count, rows, arguments)
    return bound(library(libraries[kernels[0][0]]), METHOD, table)


def _entry(path: Path, name: str) -> int:
    """Where the function is that takes the places of a kernel's arguments."""
    return address_of(kernel(path, f"{name}_at"))
