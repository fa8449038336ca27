"""Loops without the names of their buffers: those of equal layers are equal then, and one stands for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dcompile.ir.nodes import Const, Load, Loop

Nameless = tuple[Loop, tuple[str, ...]]
"""A loop whose buffers are called "0", "1", ..., and its literals: 0.0 equals -0.0, but is another program."""


def nameless(loop: Loop, names: dict[str, str]) -> Nameless:
    """A loop without a product, its buffers called by number in the order of their use.

    `names` has the numbers of those that are known already, and learns the others.
    """
    assert loop.product is None, "a product's buffers are named by its call, too"
    for name in buffers_in(loop):
        names.setdefault(name, str(len(names)))
    literals = tuple(repr(value.value) for value in loop.body if isinstance(value, Const))
    return replace(rename_buffers(loop, names), name="", origin=()), literals


def buffers_in(loop: Loop) -> Iterator[str]:
    """The buffers that a loop's body reads and those that it stores to, in this order, each as often as it comes."""
    yield from (value.buffer for value in loop.body if isinstance(value, Load))
    yield from (store.buffer for store in loop.stores)


def rename_buffers(loop: Loop, names: Mapping[str, str]) -> Loop:
    """The same with other buffers, by their names."""
    body = tuple(replace(v, buffer=names[v.buffer]) if isinstance(v, Load) else v for v in loop.body)
    return replace(loop, body=body, stores=tuple(replace(store, buffer=names[store.buffer]) for store in loop.stores))
