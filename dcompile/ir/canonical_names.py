"""Rename the buffers of loops canonically, so that loops of equal layers are equal, and one can represent all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dcompile.ir.nodes import Const, Load, Loop

Nameless = tuple[Loop, tuple[str, ...]]
"""Loop whose buffers are called "0", "1", ..., and its literals: 0.0 equals -0.0, but makes another program."""


def nameless(loop: Loop, names: dict[str, str]) -> Nameless:
    """Rename the buffers of a loop without a matmul to numbers, in the order of their use.

    `names` maps buffers that were renamed earlier to their numbers. New ones are added.
    """
    assert loop.product is None, "a product's buffers are named by its call, too"
    for name in buffers_in(loop):
        names.setdefault(name, str(len(names)))
    literals = tuple(repr(value.value) for value in loop.body if isinstance(value, Const))
    return replace(rename_buffers(loop, names), name="", origin=()), literals


def buffers_in(loop: Loop) -> Iterator[str]:
    """Buffers that a loop's body reads, then those that it stores to, with repetitions."""
    yield from (value.buffer for value in loop.body if isinstance(value, Load))
    yield from (store.buffer for store in loop.stores)


def rename_buffers(loop: Loop, names: Mapping[str, str]) -> Loop:
    """Rename the buffers of a loop."""
    body = tuple(replace(v, buffer=names[v.buffer]) if isinstance(v, Load) else v for v in loop.body)
    return replace(loop, body=body, stores=tuple(replace(store, buffer=names[store.buffer]) for store in loop.stores))
