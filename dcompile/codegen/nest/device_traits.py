"""Facts about a loop's device that lowering and scheduling may ask for without knowing its target."""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.ir.nodes import Buffer, Loop

MAX_INT32_ELEMENTS = 2**31 - 2**20
"""Elements that GPU kernels index in 32 bits: a tile may reach a little beyond its loop."""

ATOMIC: Mapping[str, frozenset[str]] = {
    "sum": frozenset(("int32", "int64", "float32", "float64")),
    "max": frozenset(("int32", "int64", "float32")),
    "min": frozenset(("int32", "int64", "float32")),
}
"""Dtypes that concurrent stores can combine in memory without losing values, by mode."""


def has_atomic(mode: str, dtype: str) -> bool:
    """Can concurrent stores combine values in memory?"""
    return dtype in ATOMIC.get(mode, ())


def on_gpu(loop: Loop, table: Mapping[str, Buffer]) -> bool:
    """Does the loop write GPU memory?"""
    return any(table[store.buffer].device != "cpu" for store in loop.stores)
