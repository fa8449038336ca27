"""Load compiled libraries, and call their functions as Python builtins that read arguments from a table in memory.

A call through ctypes prepares itself each time: 0.26 us instead of 0.10 (docs/lab/runtime.md, R2). So compiled files
describe a function to Python as extension modules do, with a `PyMethodDef`. They declare the few functions of Python's
stable interface themselves, as its headers may be missing. Such a function is bound to the address of its table.

Several CPU kernels run in a single call. Their table holds the addresses that are known when the host program prepares
itself. Other addresses, and sizes that only the call knows, are filled in at each call. Every compiled file has a
`run_calls` that walks over the table (`codegen/emit/cpp/library/base.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

from dcompile.errors import BuildError

_RUN_CALLS = "calls_from_python"
"""`PyMethodDef` of the function that reads the table."""


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


class Address(int):
    """Address or number known when the table is built.

    A plain int is the position of one that is passed in each call.
    """


class ArgumentTable(int):
    """Address of a table of 64-bit words. The object keeps the table alive, and so does a function bound to it."""

    words: ctypes.Array[ctypes.c_uint64]

    def __new__(cls, count: int) -> Self:
        words = (ctypes.c_uint64 * count)()
        table = super().__new__(cls, ctypes.addressof(words))
        table.words = words
        return table

    def fill(self, words: Sequence[int]) -> None:
        """Set all words."""
        self.words[:] = words  # type: ignore[call-overload]

    @classmethod
    def laid_out(cls, head: Sequence[int], given: Sequence[int], rows: Sequence[int], arguments: Sequence[int]) -> Self:
        """Build a table: `head`, slots for `given`, `rows`, a pointer per argument, and the known arguments, once each.

        An argument is an `Address`, or its position in `given`.
        """
        known = dict.fromkeys(argument for argument in arguments if isinstance(argument, Address))
        known_at = len(head) + len(given) + len(rows) + len(arguments)
        table = cls(known_at + len(known))
        places = {argument: known_at + n for n, argument in enumerate(known)}
        found = (places[a] if isinstance(a, Address) else len(head) + a for a in arguments)
        table.fill([*head, *given, *rows, *(table + 8 * place for place in found), *known])
        return table


def bound(library: ctypes.CDLL, method: str, table: ArgumentTable) -> Callable[..., Any]:
    """Bind the function that `method`, a `PyMethodDef` of a library, describes to `table`."""
    try:
        described = ctypes.addressof(ctypes.c_char.in_dll(library, method))
    except ValueError:
        raise BuildError(f"dcompile: {library._name} has no {method}; delete it to build it again") from None
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    made: Callable[..., Any] = make(("PyCFunction_NewEx", ctypes.pythonapi))(described, table, None)
    return made


def address_of(function: Any) -> int:
    """Address of a ctypes function."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def kernel_calls(
    libraries: Mapping[str, Path], count: int, kernels: Sequence[tuple[str, Sequence[Address | int]]]
) -> Callable[..., Any]:
    """Make a function that runs kernels, each given by its name and arguments.

    It takes `count` addresses and sizes per call. The function returns the status of the first kernel that fails, and 0
    if none does.
    """
    rows = [word for name, some in kernels for word in (_entry_point(libraries[name], name), len(some))]
    arguments = [argument for _, some in kernels for argument in some]
    table = ArgumentTable.laid_out([count, len(kernels)], [0] * count, rows, arguments)
    return bound(library(libraries[kernels[0][0]]), _RUN_CALLS, table)


def _entry_point(path: Path, name: str) -> int:
    """Address of the kernel variant that takes pointers to its arguments."""
    return address_of(kernel(path, f"{name}_at"))
