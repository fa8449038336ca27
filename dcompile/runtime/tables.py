"""Compiled functions as builtins of Python's: what they are called with is written into a table that they read.

A call by way of ctypes prepares itself each time: 0.26 us for 0.10, and 4 for 0.7 where kernels have swept the caches
(two addresses; Intel, 2026-11-25). Compiled files therefore describe a function to Python as extension modules do, with
a `PyMethodDef`; they declare the few functions of Python's stable interface themselves, whose headers are not
everywhere. What such a function is bound to is the address of its table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from dcompile.errors import BuildError


class Address(int):
    """An address or a number that is known beforehand, where a plain int stands for one given at each call."""


class Table(int):
    """The address of words of 64 bits, which it keeps, and so does what is bound to it."""

    words: ctypes.Array[ctypes.c_uint64]

    def __new__(cls, count: int) -> Table:
        words = (ctypes.c_uint64 * count)()
        table = super().__new__(cls, ctypes.addressof(words))
        table.words = words
        return table

    def at(self, place: int) -> int:
        """The address of a word."""
        return self + 8 * place

    def fill(self, words: Sequence[int]) -> None:
        """All of the words."""
        self.words[:] = words  # type: ignore[call-overload]


def bound(library: ctypes.CDLL, method: str, table: Table) -> Callable[..., Any]:
    """The function that `method`, a `PyMethodDef` of a library, describes, bound to `table`."""
    try:
        described = ctypes.addressof(ctypes.c_char.in_dll(library, method))
    except ValueError:
        raise BuildError(f"dcompile: {library._name} has no {method}; delete it to build it again") from None
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    made: Callable[..., Any] = make(("PyCFunction_NewEx", ctypes.pythonapi))(described, table, None)
    return made


def pointers(table: Table, arguments: Sequence[int], given_at: int, known_at: int) -> list[int]:
    """Where each argument is found: known ones from the word `known_at` on, as `known_of` has them; others from
    `given_at` on, an argument being its place among those that a call gives."""
    places = {argument: table.at(known_at + n) for n, argument in enumerate(known_of(arguments))}
    return [places[a] if isinstance(a, Address) else table.at(given_at + a) for a in arguments]


def known_of(arguments: Sequence[int]) -> list[Address]:
    """The known ones, each once."""
    return list(dict.fromkeys(argument for argument in arguments if isinstance(argument, Address)))
