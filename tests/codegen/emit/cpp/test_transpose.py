"""Transposing loops are turned tile by tile, on either side, whatever the sizes, and give the interpreter's bits."""

import functools

import numpy as np
import pytest

from dcompile.codegen.emit.cpp import prefetch
from dcompile.codegen.emit.cpp.transpose import find_transposed
from dcompile.codegen.nest.loop_nest import TILE_SIDE, WIDE_TILE_SIDE, make_nest
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Load, Loop, Program, Store
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.cases import random_inputs
from tests.codegen.emit.harness import compiled, execute, run, source_of, together

SMALL = [(2 * TILE_SIDE, 3 * TILE_SIDE), (2 * TILE_SIDE + 3, 2 * TILE_SIDE + 5), (2 * TILE_SIDE + 8, 4 * TILE_SIDE + 1)]
SIZES = [
    *SMALL,
    (2 * WIDE_TILE_SIDE, WIDE_TILE_SIDE),
    (WIDE_TILE_SIDE + 3, 2 * WIDE_TILE_SIDE + 21),
    (2 * TILE_SIDE, 3 * WIDE_TILE_SIDE + 8),
]


def add_transposed(rows: int, n: int) -> Program:
    """y = (x + z).T: two operands are read in order, so that the result is the one to turn."""
    b = loops.Body()
    place = loops.I0 * n + var("i1")
    total = b.op("add", b.load("x", place), b.load("z", place))
    stores = [Store("y", var("i1") * rows + loops.I0, total)]
    shape = ("float32", (rows, n))
    return loops.program(b, (rows, n), (), stores, x=shape, z=shape, y=("float32", (n, rows)))


def turned(program: Program) -> tuple[int, int]:
    (loop,) = program.steps
    assert isinstance(loop, Loop)
    found = find_transposed(make_nest(loop), program.table)
    return (0, 0) if found is None else (len(found.loads), len(found.stores))


DTYPES = ["float32", "bfloat16", "float16", "int32", "float64", "int64", "uint8"]


@pytest.fixture(scope="module")
def built():
    """In one file, which g++ has done in half the time of one for each."""
    return compiled(
        [*(loops.transpose(*s, dtype) for dtype in DTYPES for s in SIZES), *(add_transposed(*s) for s in SIZES)]
    )


@pytest.mark.parametrize(("rows", "n"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transposition_gives_the_interpreters_bits(rows, n, dtype, built):
    program = loops.transpose(rows, n, dtype)
    assert turned(program) == (1, 0)
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs, built), strict=True):
        assert np.array_equal(want, got)


@pytest.mark.parametrize(("rows", "n"), SIZES)
def test_the_result_is_turned_where_most_operands_are_in_order(rows, n, built):
    program = add_transposed(rows, n)
    assert turned(program) == (0, 1)
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs, built), strict=True):
        assert np.array_equal(want, got)


BFLOAT16, INT64 = (functools.partial(loops.transpose, dtype=dtype) for dtype in ("bfloat16", "int64"))


def copied(dtype, rows, n, shift) -> Program:
    """Rows of another distance, which begin at another place."""
    b = loops.Body()
    x = b.put(Load("x", loops.I0 * (n + 7) + var("i1"), dtype))
    stores = [Store("y", loops.I0 * (n + 9) + var("i1") + shift, x)]
    shapes = {"x": (dtype, (rows * (n + 7),)), "y": (dtype, (rows * (n + 9) + shift,))}
    return loops.program(b, (rows, n), (), stores, **shapes)


def streamed(program, again=frozenset()):
    """The kernel, if results of any size are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "MIN_STREAM_BYTES", 0)
        return source_of(program, again)


@together(lambda rows, n, make: [streamed(make(rows, n))])
@pytest.mark.parametrize(
    ("rows", "n"), [(4 * TILE_SIDE, 2 * TILE_SIDE), (2 * WIDE_TILE_SIDE + 21, 2 * WIDE_TILE_SIDE + 3)]
)
@pytest.mark.parametrize("make", [add_transposed, loops.transpose, BFLOAT16, INT64])
def test_large_results_are_streamed_behind_the_turn(rows, n, make):
    program = make(rows, n)
    source, before = streamed(program), source_of(program).text
    text = source.text
    if turned(program)[1]:
        assert text == before  # a result that is turned itself is written by tiles
    else:
        assert " stream_" in text and " stream_" not in before
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), execute(program, source, inputs), strict=True):
        assert np.array_equal(want, got)


@together(lambda again, **case: [streamed(copied(**case), again)])
@pytest.mark.parametrize("dtype", ["int64", "bfloat16", "uint8"])
@pytest.mark.parametrize(
    ("rows", "n", "shift"), [(1, 20_000, 0), (1, 20_000, 3), (5, 3001, 5), (40, 100, 0), (40, 33, 1)]
)
@pytest.mark.parametrize("again", [frozenset(), frozenset("y")])
def test_copies_are_streamed_wherever_they_lie(dtype, rows, n, shift, again):
    program = copied(dtype, rows, n, shift)
    source, inputs = streamed(program, again), random_inputs(program)
    assert "stream_bytes(" in source.text and ("stays<" in source.text) == bool(again)
    (want,), (got,) = interpret(program, inputs), execute(program, source, inputs)
    places = np.arange(rows)[:, None] * (n + 9) + np.arange(n) + shift
    assert np.array_equal(want[places], got[places])


def test_tiles_that_are_all_complete_have_fixed_sizes():
    whole, ragged = (cpp_kernel.emit(p.steps[0], p.table).text for p in (loops.transpose(*s) for s in SMALL[:2]))
    assert f"{TILE_SIDE}, {TILE_SIDE});" in whole and "_high - i0_low" not in whole
    assert "_high - i0_low" in ragged


def test_tiles_of_several_bytes_are_large_where_there_is_room():
    for dtype, side in (
        ("float32", WIDE_TILE_SIDE),
        ("int64", WIDE_TILE_SIDE),
        ("bfloat16", WIDE_TILE_SIDE),
        ("uint8", TILE_SIDE),
    ):
        (loop,) = loops.transpose(2 * WIDE_TILE_SIDE, WIDE_TILE_SIDE, dtype).steps
        assert {row.tile for row in make_nest(loop).rows} == {side}
