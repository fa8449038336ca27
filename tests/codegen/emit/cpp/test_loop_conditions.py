"""Loops in parts: where an index turns, and what it is on either side."""

from __future__ import annotations

import re

from dcompile.codegen.emit.cpp.loop_conditions import MAX_PIECES, find_pieces, nest_within
from dcompile.codegen.nest.loop_nest import make_nest
from dcompile.ir.index import Index, evaluate, floordiv, modulo, var
from dcompile.ir.nodes import Load, Loop, Program, Store
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.loops import I0, Body, program

I1 = var("i1")


def loop_of(made: Program) -> Loop:
    (loop,) = made.steps
    assert isinstance(loop, Loop)
    return loop


def parts(made: Program) -> list[tuple[int, int]]:
    nest = make_nest(loop_of(made))
    return find_pieces(nest, nest.elements[-1], range(len(nest.body)), nest.stores)


def reading(place: Index, n: int, held: int) -> Program:
    b = Body()
    stores = [Store("y", I0 * n + I1, b.load("x", I0 * held + place))]
    return program(b, (4, n), (), stores, x=("float32", (4, held)), y=("float32", (4, n)))


def test_rolled_rows_are_copied_in_two_parts_without_a_remainder():
    made = loops.rolled(5, 70, 3)
    assert parts(made) == [(0, 3), (3, 70)]
    text = cpp_kernel.emit(loop_of(made), made.table).text
    assert re.findall(r"a0\[(.*?)\]", text) == ["i1 + i0*70 + 67", "i1 + i0*70 + -3"]


def test_a_part_reads_what_the_whole_reads_there():
    for n, place in ((40, modulo(I1 * 3 + 5, 70, {"i1": 40})), (60, floordiv(I1 + 7, 25, {"i1": 60}))):
        made = reading(place, n, 70)
        nest = make_nest(loop_of(made))
        (axis,) = nest.elements
        found = parts(made)
        assert len(found) > 1 and found[0][0] == 0 and found[-1][1] == n
        for low, high in found:
            (whole, told) = (
                next(v.index for v in m.body if isinstance(v, Load)) for m in (nest, nest_within(nest, axis, low, high))
            )
            assert told.coefficient("i1") is not None, "affine"
            assert all(
                evaluate(told, {"i0": 2, "i1": i}) == evaluate(whole, {"i0": 2, "i1": i}) for i in range(low, high)
            )


def test_what_turns_too_often_is_one_loop():
    assert parts(reading(floordiv(I1, 2, {"i1": 40}), 40, 20)) == [(0, 40)]
    assert len(parts(reading(floordiv(I1, 8, {"i1": 40}), 40, 5))) == 5 < MAX_PIECES
    assert parts(reading(modulo(I1 + I0, 40, {"i0": 4, "i1": 40}), 40, 40)) == [(0, 40)], "it depends on the row"
