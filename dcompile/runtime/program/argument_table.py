"""Compiled functions as builtins of Python's: what they are called with is written into a table that they read.

A call by way of ctypes prepares itself each time: 0.26 us for 0.10, and 4 for 0.7 where kernels have swept the caches
(two addresses; Intel, 2026-11-25). Compiled files therefore describe a function to Python as extension modules do, with
a `PyMethodDef`; they declare the few functions of Python's stable interface themselves, whose headers are not
everywhere. What such a function is bound to is the address of its table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Self

from dcompile.errors import BuildError


class Address(int):
    """An address or a number that is known beforehand, where a plain int stands for one given at each call."""


class ArgumentTable(int):
    """The address of words of 64 bits, which it keeps, and so does what is bound to it."""

    words: ctypes.Array[ctypes.c_uint64]

    def __new__(cls, count: int) -> Self:
        words = (ctypes.c_uint64 * count)()
        table = super().__new__(cls, ctypes.addressof(words))
        table.words = words
        return table

    def fill(self, words: Sequence[int]) -> None:
        """All of the words."""
        self.words[:] = words  # type: ignore[call-overload]

    @classmethod
    def laid_out(cls, head: Sequence[int], given: Sequence[int], rows: Sequence[int], arguments: Sequence[int]) -> Self:
        """`head`, what a call gives, `rows`, where each of the arguments is found, and those that are known, each once.

        An argument is an `Address`, or its place among `given`.
        """
        known = dict.fromkeys(argument for argument in arguments if isinstance(argument, Address))
        known_at = len(head) + len(given) + len(rows) + len(arguments)
        table = cls(known_at + len(known))
        places = {argument: known_at + n for n, argument in enumerate(known)}
        found = (places[a] if isinstance(a, Address) else len(head) + a for a in arguments)
        table.fill([*head, *given, *rows, *(table + 8 * place for place in found), *known])
        return table


def bound(library: ctypes.CDLL, method: str, table: ArgumentTable) -> Callable[..., Any]:
    """The function that `method`, a `PyMethodDef` of a library, describes, bound to `table`."""
    try:
        described = ctypes.addressof(ctypes.c_char.in_dll(library, method))
    except ValueError:
        raise BuildError(f"dcompile: {library._name} has no {method}; delete it to build it again") from None
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    made: Callable[..., Any] = make(("PyCFunction_NewEx", ctypes.pythonapi))(described, table, None)
    return made


def address_of(function: Any) -> int:
    """Of a C function that ctypes knows."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found
