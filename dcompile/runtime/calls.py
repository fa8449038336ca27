"""Runs compiled kernels on the CPU one after another in a single call, by way of a table made beforehand.

It has the addresses that are known when the host program prepares itself; the others, and sizes that only the call
tells, are filled in at each call. `run_calls` of every compiled file walks over it (`codegen/emit/prelude.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcompile.runtime.gpu import Address
from dcompile.runtime.libraries import kernel

WALKER = "run_calls"


class _Call(ctypes.Structure):
    _fields_ = (("run", ctypes.c_void_p), ("count", ctypes.c_int64))


class Calls:
    """A run of kernels, none of which can fail: called with what changes, `count` addresses and sizes."""

    def __init__(
        self, libraries: Mapping[str, Path], count: int, kernels: Sequence[tuple[str, Sequence[Address | int]]]
    ) -> None:
        self._slots, self._count = (ctypes.c_uint64 * max(count, 1))(), count
        self._known: dict[int, ctypes.c_uint64] = {}  # kernels read them at each call
        self._table = (_Call * len(kernels))()
        pointers: list[int] = []
        for place, (name, arguments) in enumerate(kernels):
            function = ctypes.cast(kernel(libraries[name], f"{name}_at"), ctypes.c_void_p).value
            self._table[place] = _Call(function, len(arguments))
            pointers += map(self._place, arguments)
        self._pointers = (ctypes.c_uint64 * len(pointers))(*pointers)
        self._walker = kernel(libraries[kernels[0][0]], WALKER)
        self._walker.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]

    def _place(self, argument: Address | int) -> int:
        """Where an argument will be found: known ones have a place of their own."""
        if isinstance(argument, Address):
            return ctypes.addressof(self._known.setdefault(argument, ctypes.c_uint64(argument)))
        return ctypes.addressof(self._slots) + 8 * argument

    def __call__(self, *given: int) -> None:
        self._slots[: self._count] = given  # type: ignore[call-overload]
        self._walker(self._table, len(self._table), self._pointers)
