"""Fusion keeps every output bitwise, and makes one kernel of what one pass over memory can do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.interchange_reductions import interchange_reductions
from dcompile.codegen.schedule.fusion.merge import merge
from dcompile.ir.index import contiguous_strides, flatten, var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Buffer, Const, Extern, IndexOf, Load, Loop, Program, Reduce, Store, View
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

F = "float32"
R, D = 6, 16


def buffer(name, *shape):
    return Buffer(name, F, shape, contiguous_strides(shape))


def whole(name, *shape):
    return View(name, shape, contiguous_strides(shape))


def at(*indices, shape):
    return flatten(indices, contiguous_strides(shape))


i0, i1, i2, i3, j0 = (var(n) for n in ("i0", "i1", "i2", "i3", "j0"))


def run(program, seed=0):
    rng = np.random.default_rng(seed)
    table = program.table
    inputs = {name: rng.standard_normal(table[name].shape).astype(F) for name in program.inputs}
    verify(program)
    return interpret(program, {name: array.copy() for name, array in inputs.items()})


def loops(program):
    return [step for step in program.steps if isinstance(step, Loop)]


def rms_norm():
    """y = x * rsqrt(mean(x*x)) * w, with the row scalar saved; as lowering writes it: three loops."""
    square = Loop(
        "square",
        (2, R // 2),
        (D,),
        (Load("x", at(i0 * (R // 2) + i1, j0, shape=(R, D)), F), Apply("mul", (0, 0), F), Reduce("sum", 1, F)),
        (Store("s", at(i0, i1, shape=(2, R // 2)), 2),),
    )
    scale = Loop(
        "scale",
        (2, R // 2, 1),
        (),
        (
            Load("s", at(i0, i1, i2, shape=(2, R // 2, 1)), F),
            Const(1 / D, F),
            Apply("mul", (0, 1), F),
            Apply("rsqrt", (2,), F),
        ),
        (Store("r", at(i0, i1, i2, shape=(2, R // 2, 1)), 3),),
    )
    apply = Loop(
        "apply",
        (2, R // 2, D),
        (),
        (
            Load("x", at(i0, i1, i2, shape=(2, R // 2, D)), F),
            Load("r", at(i0, i1, shape=(2, R // 2)), F),
            Apply("mul", (0, 1), F),
            Load("w", i2, F),
            Apply("mul", (2, 3), F),
        ),
        (Store("y", at(i0, i1, i2, shape=(2, R // 2, D)), 4),),
    )
    return Program(
        "rms_norm",
        ("x", "w"),
        (whole("y", R, D), whole("r", R)),
        (buffer("x", R, D), buffer("w", D), buffer("s", R), buffer("r", R), buffer("y", R, D)),
        (square, scale, apply),
    )


def test_a_norm_becomes_one_kernel_and_its_row_sum_no_buffer():
    before = rms_norm()
    after = fuse(before)
    verify(after)
    assert len(loops(after)) == 1
    assert "s" not in after.table
    assert loops(after)[0].outer == (R,) and loops(after)[0].inner == (D,)
    for a, b in zip(run(before), run(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_transposing_consumer_joins_by_splitting_the_row():
    heads, width = 4, D // 4
    before = rms_norm()
    transpose = Loop(
        "transpose",
        (heads, R, width),
        (),
        (Load("y", i1 * D + i0 * width + i2, F), Apply("neg", (0,), F)),
        (Store("z", at(i0, i1, i2, shape=(heads, R, width)), 1),),
    )
    before = Program(
        "t",
        before.inputs,
        (whole("z", heads, R, width),),
        (*before.buffers, buffer("z", heads, R, width)),
        (*before.steps, transpose),
    )
    after = fuse(before)
    assert len(loops(after)) == 1 and "y" not in after.table
    np.testing.assert_array_equal(run(before)[0], run(after)[0])


def test_what_a_masked_load_read_is_chosen_in_float32():
    twice = (Load("x", i0, F), Apply("add", (0, 0), F), Apply("cast", (1,), "bfloat16"))
    masked = (
        IndexOf(i0),
        Const(4, "int64"),
        Apply("lt", (0, 1), "bool"),
        Load("y", i0, "bfloat16", mask=2),
        Apply("cast", (3,), F),
    )
    program = Program(
        "p",
        ("x",),
        (whole("z", 8),),
        (buffer("x", 8), replace(buffer("y", 8), dtype="bfloat16"), buffer("z", 8)),
        (
            Loop("twice", (8,), (), twice, (Store("y", i0, 2),)),
            Loop("masked", (8,), (), masked, (Store("z", i0, 4),)),
        ),
    )
    fused = fuse(program)
    assert len(fused.steps) == 1
    assert np.array_equal(run(fused)[0], run(program)[0])


def test_loops_that_touch_different_parts_of_a_whole_stay_apart():
    def doubled(source, result):
        body = (Load(source, i0, F), Load("w", i0, F), Apply("add", (0, 1), F))
        return Loop(result, (2048,), (), body, (Store(result, i0, 2),))

    program = Program(
        "p",
        ("a", "b", "w"),
        (whole("x", 2048), whole("y", 2048), whole("z", 2048)),
        tuple(buffer(name, 2048) for name in "abwxyz"),
        (doubled("a", "x"), doubled("b", "y"), doubled("x", "z")),
    )
    assert len(fuse(program).steps) == 1
    apart = fuse(replace(program, parts=(("a", 0), ("b", 1))))
    assert [sorted(step.reads & {"a", "b"}) for step in apart.steps] == [["a"], ["b"]]


def test_a_library_call_between_two_loops_keeps_them_apart():
    double = Loop(
        "a",
        (R, D),
        (),
        (Load("x", at(i0, i1, shape=(R, D)), F), Apply("add", (0, 0), F)),
        (Store("y", at(i0, i1, shape=(R, D)), 1),),
    )
    call = Extern("aten.neg.default", (whole("y", R, D),), (), ("z",), "alloc")
    add = Loop(
        "b",
        (R, D),
        (),
        (Load("y", at(i0, i1, shape=(R, D)), F), Load("z", at(i0, i1, shape=(R, D)), F), Apply("add", (0, 1), F)),
        (Store("out", at(i0, i1, shape=(R, D)), 2),),
    )
    program = Program(
        "p",
        ("x",),
        (whole("out", R, D),),
        tuple(buffer(n, R, D) for n in ("x", "y", "z", "out")),
        (double, call, add),
    )
    assert [type(s).__name__ for s in fuse(program).steps] == ["Loop", "Extern", "Loop"]


def test_a_reader_at_another_element_is_not_joined():
    """z[r, c] = y[r, 0]: the element is not the one just computed."""
    double = Loop(
        "a",
        (R, D),
        (),
        (Load("x", at(i0, i1, shape=(R, D)), F), Apply("add", (0, 0), F)),
        (Store("y", at(i0, i1, shape=(R, D)), 1),),
    )
    first = Loop(
        "b", (R, D), (), (Load("y", i0 * D, F), Apply("neg", (0,), F)), (Store("z", at(i0, i1, shape=(R, D)), 1),)
    )
    program = Program(
        "p", ("x",), (whole("z", R, D),), tuple(buffer(n, R, D) for n in ("x", "y", "z")), (double, first)
    )
    after = fuse(program)
    assert len(loops(after)) == 2
    np.testing.assert_array_equal(run(program)[0], run(after)[0])


def column_sum(finish=False):
    body = [
        Load("dy", j0 * D + i0, F),
        Load("x", j0 * D + i0, F),
        Apply("mul", (0, 1), F),
        Reduce("sum", 2, F),
    ]
    if finish:
        body += [Const(0.5, F), Apply("mul", (3, 4), F)]
    return Loop("dw", (D,), (R,), tuple(body), (Store("dw", i0, len(body) - 1 if finish else 3),))


@pytest.mark.parametrize("finish", [False, True])
def test_a_sum_over_rows_is_turned_to_read_rows_in_order(finish):
    program = Program(
        "p",
        ("dy", "x"),
        (whole("dw", D),),
        (buffer("dy", R, D), buffer("x", R, D), buffer("dw", D)),
        (column_sum(finish),),
    )
    after = interchange_reductions(program)
    verify(after)
    first = loops(after)[0]
    assert first.outer == (R,) and first.inner == (D,) and first.stores[0].mode == "sum"
    assert len(loops(after)) == 1 + finish
    np.testing.assert_allclose(run(program)[0], run(after)[0], rtol=1e-6)


def test_both_gradients_of_a_norm_share_one_pass():
    """dx needs a row sum of dy*x, dw a column sum of it."""
    row = Loop(
        "row",
        (R,),
        (D,),
        (Load("dy", i0 * D + j0, F), Load("x", i0 * D + j0, F), Apply("mul", (0, 1), F), Reduce("sum", 2, F)),
        (Store("s", i0, 3),),
    )
    dx = Loop(
        "dx",
        (R, D),
        (),
        (Load("dy", i0 * D + i1, F), Load("s", i0, F), Apply("sub", (0, 1), F)),
        (Store("dx", i0 * D + i1, 2),),
    )
    program = Program(
        "p",
        ("dy", "x"),
        (whole("dw", D), whole("dx", R, D)),
        (buffer("dy", R, D), buffer("x", R, D), buffer("dw", D), buffer("s", R), buffer("dx", R, D)),
        (column_sum(), row, dx),
    )
    import dcompile.codegen.schedule.fusion.fuse as module

    small, module.MIN_SHARED_BYTES = module.MIN_SHARED_BYTES, 0
    try:
        after = fuse(interchange_reductions(program))
    finally:
        module.MIN_SHARED_BYTES = small
    verify(after)
    assert len(loops(after)) == 1
    for a, b in zip(run(program), run(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_update_in_place_joins_its_own_readers():
    """p -= lr * m, m = 0.9 m + g: two in-place updates at the same elements are one kernel."""
    N = 4096

    def update(name, read, op, target):
        body = (Load(target, i0, F), Load(read, i0, F), Apply(op, (0, 1), F))
        return Loop(name, (N,), (), body, (Store(target, i0, 2),))

    program = Program(
        "p",
        ("p", "m", "g"),
        (),
        (buffer("p", N), buffer("m", N), buffer("g", N)),
        (update("p", "m", "sub", "p"), update("m", "g", "add", "m")),
    )
    after = fuse(program)
    assert len(loops(after)) == 1
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(N).astype(F) for n in ("p", "m", "g")}
    first, second = ({n: a.copy() for n, a in arrays.items()} for _ in range(2))
    interpret(program, first)
    interpret(after, second)
    for n in arrays:
        np.testing.assert_array_equal(first[n], second[n])


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_keep_their_outputs_bitwise(seed):
    program, inputs = random_program(seed)
    after = fuse(program)
    verify(after)
    one = interpret(program, {n: np.copy(a) for n, a in inputs.items()})
    two = interpret(after, {n: np.copy(a) for n, a in inputs.items()})
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(60, 100))
def test_random_programs_after_reorientation_stay_close(seed):
    program, inputs = random_program(seed)
    after = fuse(interchange_reductions(program))
    verify(after)
    one = interpret(program, {n: np.copy(a) for n, a in inputs.items()})
    two = interpret(after, {n: np.copy(a) for n, a in inputs.items()})
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(np.asarray(a, dtype="float64"), np.asarray(b, dtype="float64"), rtol=2e-2, atol=1e-3)


def test_fusion_is_the_same_every_time():
    program, _ = random_program(7, size=16)
    assert repr(fuse(program)) == repr(fuse(program))


@pytest.mark.parametrize("op", ["sum", "argmax"])
def test_a_row_of_one_element_is_not_reduced_over_the_rows_it_joins(op):
    """The mean of a number is that number: fused into a loop over rows, it would be summed once for each column."""
    kind = "int64" if op == "argmax" else F
    alone = Loop("alone", (R,), (), (Load("x", i0, F), Reduce(op, 0, kind)), (Store("m", i0, 1),))
    rows = Loop(
        "rows",
        (R,),
        (D,),
        (Load("m", i0, kind), Apply("cast", (0,), F), Load("z", at(i0, j0, shape=(R, D)), F), Apply("mul", (1, 2), F),
         Reduce("sum", 3, F)),
        (Store("y", i0, 4),),
    )  # fmt: skip
    one = Buffer("m", kind, (R,), (1,))
    buffers = (buffer("x", R), one, buffer("z", R, D), buffer("y", R))
    program = Program("p", ("x", "z"), (whole("y", R),), buffers, (alone, rows))
    after = fuse(program)
    assert len(loops(after)) == 1 and sum(isinstance(v, Reduce) for v in loops(after)[0].body) == 1
    for a, b in zip(run(program), run(after), strict=True):
        np.testing.assert_array_equal(a, b)
    joined = merge(alone, rows)  # also where nobody has brought the loops into canonical form
    for a, b in zip(run(program), run(replace(program, steps=(joined,))), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("device", "count"), [("cuda", 1), ("cpu", 2)])
def test_brief_kernels_that_read_the_same_start_together_on_a_gpu(device, count):
    """A start takes longer than they run; on the CPU a call takes nothing."""
    rows = at(i0, j0, shape=(D, R))
    body = (Load("x", rows, F), Reduce("sum", 0, F), Load("r", i0, F), Apply("mul", (1, 2), F))
    total = Loop("total", (D,), (R,), body, (Store("s", i0, 3),))
    scale = Loop("scale", (D,), (), (Load("r", i0, F), Load("w", i0, F), Apply("mul", (0, 1), F)), (Store("y", i0, 2),))
    buffers = [buffer("x", D, R), *(buffer(name, D) for name in "rwsy")]
    program = Program(
        "p", ("x", "r", "w"), (whole("s", D), whole("y", D)),
        tuple(replace(b, device=device) for b in buffers), (total, scale),
    )  # fmt: skip
    fused = fuse(program)
    assert len(loops(fused)) == count
    for want, got in zip(run(program), run(fused), strict=True):
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize(("donated", "later", "count"), [(("x",), False, 2), ((), False, 1), (("x",), True, 1)])
def test_memory_that_a_result_may_take_over_is_worth_more_than_a_start(donated, later, count):
    """As logits and their gradient: a sum added up beside would keep both alive. An input that stays is no loss."""
    rows = at(i0, j0, shape=(D, R))
    body = (Load("x", rows, F), Load("r", i0, F), Apply("mul", (0, 1), F))
    scale = Loop("scale", (D,), (R,), body, (Store("y", rows, 2),))
    total = Loop("total", (D,), (), (Load("r", i0, F),), (Store("s", at(shape=()), 0, "add"),))
    reader = Extern("aten.clone.default", (whole("x", D, R),), (), ("z",), "fresh")
    buffers = [buffer("x", D, R), buffer("r", D), buffer("s"), buffer("y", D, R), buffer("z", D, R)]
    outputs = (whole("s"), whole("y", D, R), *[whole("z", D, R)] * later)
    program = Program(
        "p", ("x", "r"), outputs, tuple(replace(b, device="cuda") for b in buffers[: None if later else 4]),
        (scale, total, *[reader] * later), donated=donated,
    )  # fmt: skip
    fused = fuse(program)
    assert len(loops(fused)) == count


def test_random_programs_as_on_a_gpu_keep_every_value():
    for seed in range(200, 240):
        program, inputs = random_program(seed, 10)
        there = replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers))
        fused = fuse(there)
        verify(fused)
        for want, got in zip(interpret(there, inputs), interpret(fused, inputs), strict=True):
            np.testing.assert_array_equal(want, got)
