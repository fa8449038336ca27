"""Run several compiled CPU kernels in a single call, from a table that is built beforehand.

The table holds the addresses that are known when the host program prepares itself. Other addresses, and sizes that only
the call knows, are filled in at each call. Every compiled file has a `run_calls` that walks over the table
(`codegen/emit/cpp/library/base.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcompile.runtime.program.argument_table import Address, ArgumentTable, address_of, bound
from dcompile.runtime.program.kernel_library import kernel, library

METHOD = "calls_from_python"
"""`PyMethodDef` of the function that reads the table."""


def calls(
    libraries: Mapping[str, Path], count: int, kernels: Sequence[tuple[str, Sequence[Address | int]]]
) -> Callable[..., Any]:
    """Make a function that runs kernels, each given by its name and arguments.

    It takes `count` addresses and sizes per call. The function returns the status of the first kernel that fails, and 0
    if none does.
    """
    rows = [word for name, some in kernels for word in (_entry(libraries[name], name), len(some))]
    arguments = [argument for _, some in kernels for argument in some]
    table = ArgumentTable.laid_out([count, len(kernels)], [0] * count, rows, arguments)
    return bound(library(libraries[kernels[0][0]]), METHOD, table)


def _entry(path: Path, name: str) -> int:
    """Address of the kernel variant that takes pointers to its arguments."""
    return address_of(kernel(path, f"{name}_at"))
