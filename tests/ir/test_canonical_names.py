"""Loops without names: equal exactly where they are the same program on other buffers."""

from __future__ import annotations

from dataclasses import replace

from dcompile.ir.canonical_names import nameless, rename_buffers
from dcompile.ir.index import var
from dcompile.ir.nodes import Apply, Const, Load, Loop, Store

i0 = var("i0")


def scaled(source: str, target: str, by: float, name: str = "loop") -> Loop:
    body = (Load(source, i0, "float32"), Const(by, "float32"), Apply("mul", (0, 1), "float32"))
    return Loop(name, (64,), (), body, (Store(target, i0, 2),), origin=(name,))


def test_names_and_origins_make_no_difference_and_all_else_does():
    one, names = nameless(scaled("x", "y", 2.0), {}), {}
    assert one == nameless(scaled("a", "b", 2.0, "other"), names)
    assert names == {"a": "0", "b": "1"}
    assert one != nameless(scaled("x", "x", 2.0), {}), "another buffer is the same one here"
    assert one != nameless(scaled("x", "y", 3.0), {})
    assert nameless(scaled("x", "y", 0.0), {}) != nameless(scaled("x", "y", -0.0), {})


def test_numbers_of_buffers_that_are_known_are_kept():
    names = {"y": "0"}
    loop, _ = nameless(scaled("x", "y", 2.0), names)
    assert (loop.reads, loop.writes, names) == ({"1"}, {"0"}, {"y": "0", "x": "1"})


def test_renaming_back_gives_the_loop():
    loop, names = scaled("x", "y", 2.0), {}
    number = nameless(loop, names)[0]
    back = rename_buffers(number, {short: name for name, short in names.items()})
    assert replace(back, name=loop.name, origin=loop.origin) == loop
