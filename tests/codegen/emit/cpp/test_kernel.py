"""Compiled kernels against the interpreter on random programs, and against eager on the loops models are made of."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from dcompile.codegen.emit.cpp.library.base import PRELUDE
from dcompile.codegen.nest.loop_nest import make_nest
from dcompile.ir.canonical_names import rename_buffers
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import IndexOf, Load, Loop, Program, Store
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.all_kernels import kernels_of
from tests.codegen.emit.cases import HAND, random_inputs
from tests.codegen.emit.harness import call, compiled, placed, read, run, without_vectors
from tests.ir.fuzz import random_program


def text(program: Program) -> str:
    (loop,) = program.steps
    assert isinstance(loop, Loop)
    return cpp_kernel.emit(loop, program.table).text


def test_random_exact_programs_agree_bit_for_bit_with_the_interpreter():
    made = [random_program(seed, 8, exact=True) for seed in range(24)]
    functions = compiled([program for program, _ in made])
    for program, inputs in made:
        for want, got in zip(interpret(program, inputs), run(program, inputs, functions), strict=True):
            assert np.array_equal(want, got, equal_nan=True), program.name


def test_random_programs_agree_with_the_interpreter_up_to_rounding():
    made = [random_program(seed, 8) for seed in range(500, 516)]
    functions = compiled([program for program, _ in made])
    for program, inputs in made:
        results = zip(program.outputs, interpret(program, inputs), run(program, inputs, functions), strict=True)
        for view, want, got in results:
            coarse = program.table[view.buffer].dtype in ("bfloat16", "float16")
            wide = np.asarray(want, np.float64), np.asarray(got, np.float64)
            assert np.allclose(*wide, rtol=2e-2 if coarse else 1e-5, atol=1e-5, equal_nan=True), program.name


@pytest.fixture(scope="module")
def hand_built():
    return compiled(list(HAND.values()))


@pytest.mark.parametrize("name", HAND)
def test_hand_built_loops_agree_with_the_interpreter(name, hand_built):
    program = HAND[name]
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs, hand_built), strict=True):
        # Sums of exponentials up to 20 cancel: an error in a term's last place is 2e-6.
        limits = (1.6e-2, 1e-6) if "16" in name else (2e-6, 2e-5) if "scaled" in name else (2e-6, 1e-6)
        assert np.allclose(want, got, *limits, equal_nan=True)


@pytest.mark.parametrize("op", ["max", "min", "argmax", "argmin"])
@pytest.mark.parametrize("columns", [False, True])
def test_nan_wins_and_the_first_of_equals_is_found(op, columns):
    x = np.zeros((6, 40), np.float32)
    x[0, 5] = x[0, 9] = x[0, 30] = 3
    x[1, [7, 20]] = np.nan
    x[2, [39]] = -2
    x[3] = -np.inf
    x[4] = np.inf
    x[4, 39] = np.nan
    if columns:
        program, given, axis = loops.column_reduce(40, 6, op), np.ascontiguousarray(x.T), 0
    elif op.startswith("arg"):
        program, given, axis = loops.argmax(6, 40, op=op), x, 1
    else:
        program, given, axis = loops.row_sum(6, 40, op), x, 1
    (got,) = run(program, {"x": given})
    name = op if op.startswith("arg") else f"a{op}"
    want = getattr(torch.from_numpy(given), name)(axis).numpy()
    assert np.array_equal(got, want, equal_nan=True)


def test_sum_of_a_million_is_as_accurate_as_eagers():
    x = np.random.default_rng(0).uniform(size=(2, 1_000_000)).astype(np.float32)
    exact = x.astype(np.float64).sum(1)
    (got,) = run(loops.row_sum(2, 1_000_000), {"x": x})
    assert np.abs(got / exact - 1).max() < 2e-7


def test_column_sum_over_many_rows_is_as_accurate_as_eagers():
    n, rows = 8, 100_000
    body = loops.Body()
    x = body.load("x", loops.I0 * n + loops.J0)
    program = loops.program(
        body, (rows,), (n,), [Store("y", loops.J0, x, "sum")], x=("float32", (rows, n)), y=("float32", (n,))
    )
    x = np.random.default_rng(0).uniform(size=(rows, n)).astype(np.float32)
    exact = x.astype(np.float64).sum(0)
    for made in (program, loops.column_reduce(rows, n)):
        (got,) = run(made, {"x": x})
        assert np.abs(got / exact - 1).max() < 1e-6


@pytest.mark.parametrize(
    "program",
    [
        loops.rms_norm_backward(300, 200),
        loops.column_reduce(300, 400),
        loops.transpose(300, 200),
        loops.softmax(300, 200),
    ],
    ids=["rows and columns", "columns", "tiles", "rows"],
)
def test_threads_change_nothing_but_the_order_of_column_sums(program):
    assert "omp parallel" in text(program), "large enough to be shared among threads"
    inputs = random_inputs(program)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            results.append(run(program, inputs))
    finally:
        torch.set_num_threads(threads)
    for one, two, three, again in zip(*results, strict=True):
        assert np.allclose(one, two, rtol=1e-5, atol=1e-5) and np.allclose(one, three, rtol=1e-5, atol=1e-5)
        assert np.array_equal(three, again), "the same threads give the same bits"
    for name, results_ in zip(program.outputs, zip(*results, strict=True), strict=True):
        if name.buffer != "dw":
            assert np.array_equal(results_[0], results_[2])


def test_small_kernels_stay_on_one_thread():
    assert "omp parallel" not in text(loops.softmax(8, 64))


def test_integer_division_by_zero_is_reported_and_harmless():
    program = loops.binary("floordiv", 3, "int32")
    (loop,) = program.steps
    source = cpp_kernel.emit(loop, program.table)
    assert source.checked
    functions = compiled([program])
    for divisor, expected in ((0, 1), (2, 0), (2, 0)):
        values = {"x": np.array([5, 6, 7], np.int32), "z": np.array([1, divisor, 3], np.int32)}
        memory = {b.name: placed(b, values.get(b.name)) for b in program.buffers}
        assert call(source, functions, memory) == expected
        assert memory["y"][0] == 5 and memory["y"][2] == 2


@pytest.mark.parametrize("wrong", [200, 70, -71, -(2**40), 2**40])
def test_a_position_outside_is_reported_and_nothing_is_read_there(wrong):
    program = loops.picked(6, 70)
    (loop,) = program.steps
    source = cpp_kernel.emit(loop, program.table)
    assert source.checked
    x, at = np.random.default_rng(0).normal(size=(6, 70)).astype(np.float32), np.arange(420).reshape(6, 70) % 140 - 70
    functions = compiled([program])
    for place, expected in ((wrong, 4 * wrong + 2), (3, 0)):
        at[4, 17] = place
        memory = {b.name: placed(b, {"x": x, "at": at}.get(b.name)) for b in program.buffers}
        assert call(source, functions, memory) == expected
    got = read(program.table["y"], program.outputs[0], memory["y"])
    assert np.array_equal(got, np.take_along_axis(x, at % 70, 1))


def test_rows_that_elements_are_picked_from_are_asked_for_in_order():
    text_ = text(loops.picked(600, 1024))
    assert text_.count("__builtin_prefetch(&a0[i1 + i0*1024 + 1024]);") == 1
    for other in (loops.picked(60, 1024), loops.picked(6000, 64), loops.embedding(600, 1024, 600)):
        assert "prefetch" not in text(other), "in caches, in few lines, or read in order anyway"


def test_output_may_take_the_memory_of_an_input():
    program = loops.softmax(6, 100)
    (loop,) = program.steps
    x = random_inputs(program)["x"]
    memory = {"x": placed(program.table["x"], x)}
    memory["y"] = memory["x"]
    assert call(cpp_kernel.emit(loop, program.table), compiled([program]), memory) == 0
    got = memory["x"][: x.size].reshape(x.shape)
    assert np.allclose(got, torch.softmax(torch.from_numpy(x), -1).numpy(), atol=1e-6)


def test_argmax_sees_its_row_before_an_output_overwrites_it():
    body = loops.Body()
    x = body.load("x", loops.I0 * 20 + loops.J0)
    place = body.reduce("argmax", x, "int64")
    stores = [Store("y", loops.I0 * 20 + loops.J0, body.op("neg", x)), Store("at", loops.I0, place)]
    program = loops.program(
        body, (3,), (20,), stores, x=("float32", (3, 20)), y=("float32", (3, 20)), at=("int64", (3,))
    )
    x = random_inputs(program)["x"]
    memory = {"x": placed(program.table["x"], x), "at": placed(program.table["at"], None)}
    memory["y"] = memory["x"]
    call(cpp_kernel.emit(program.steps[0], program.table), compiled([program]), memory)
    assert np.array_equal(memory["at"][:3], x.argmax(1))
    assert np.array_equal(memory["x"][:60].reshape(3, 20), -x)


def test_equal_layers_share_one_kernel():
    program = loops.rms_norm(4, 8)
    (loop,) = program.steps
    new = {b.name: f"layer7_{b.name}" for b in program.buffers}
    other = replace(rename_buffers(loop, new), name="other", origin=("layer7",))
    table = {new[b.name]: replace(b, name=new[b.name]) for b in program.buffers}
    first, second = cpp_kernel.emit(loop, program.table), cpp_kernel.emit(other, table)
    assert first == second and first.text == second.text
    assert second.arguments == tuple(new[name] for name in first.arguments)


def test_what_a_later_step_or_the_backward_reads_may_stay_in_the_caches():
    """What nobody reads again is streamed on every machine."""
    first = loops.binary("add", 1 << 22)
    (loop,) = first.steps
    names = {"x": "y", "z": "z", "y": "w"}
    second = replace(rename_buffers(loop, names), name="second")
    buffers = (*first.buffers, replace(first.table["y"], name="w"))
    program = replace(first, steps=(loop, second), buffers=buffers)
    for kind, expected in (("inference", [True, False]), ("backward", [True, False]), ("forward", [True, True])):
        kernels = kernels_of(program, kind).calls
        assert ["stays<" in kernel.text for kernel in kernels] == expected
        assert all("stream_float32(" in kernel.text for kernel in kernels)


def test_costly_values_are_kept_and_cheap_ones_computed_again():
    assert without_vectors(text(loops.softmax(4, 100))).count("exp_below_(") == 1
    assert "alignas" not in text(loops.rms_norm(4, 100)), "loading x again is cheaper than keeping it"
    assert without_vectors(text(loops.softmax(4, 100_000))).count("exp_below_(") == 2, "too long for the stack"


def test_loops_are_merged_and_turned_to_the_contiguous_variable():
    body = loops.Body()
    x = body.load("x", loops.I0 * 12 + var("i1") * 3 + var("i2"))
    flat = loops.program(
        body, (2, 4, 3), (), [Store("y", loops.I0 * 12 + var("i1") * 3 + var("i2"), x)],
        x=("float32", (2, 4, 3)), y=("float32", (2, 4, 3)),
    )  # fmt: skip
    nest = make_nest(flat.steps[0])
    assert [axis.size for axis in nest.axes] == [24]
    nest = make_nest(loops.column_reduce(50, 300).steps[0])
    assert nest.lane is not None and nest.lane.size == 300
    assert make_nest(loops.row_sum(50, 300).steps[0]).lane is None
    body = loops.Body()
    x = body.load("x", loops.I0 + var("i1") * 64)
    turned = loops.program(
        body, (64, 64), (), [Store("y", loops.I0 + var("i1") * 64, x)],
        x=("float32", (64, 64), (1, 64)), y=("float32", (64, 64), (1, 64)),
    )  # fmt: skip
    assert make_nest(turned.steps[0]).elements[-1].name == "i0"


FLOATS = [0.1, -0.0, 1e-45, float("inf"), float("-inf"), float("nan"), 1e300]
INTEGERS = [0, 255, -128, 2**63 - 1, -(2**63)]


def constant(value, dtype):
    body = loops.Body()
    return loops.program(body, (3,), (), [Store("y", loops.I0, body.const(value, dtype))], y=(dtype, (3,)))


@pytest.fixture(scope="module")
def constants():
    known = [(value, dtype) for value in FLOATS for dtype in ("float32", "float64")]
    return compiled([constant(*one) for one in [*known, *((value, "int64") for value in INTEGERS)]])


@pytest.mark.parametrize("value", FLOATS)
def test_constants_read_back_exactly(value, constants):
    for dtype in ("float32", "float64"):
        (got,) = run(constant(value, dtype), {}, constants)
        with np.errstate(over="ignore"):
            want = np.full(3, value).astype(dtype)
        assert got.tobytes() == want.tobytes() or (np.isnan(value) and np.isnan(got).all())


@pytest.mark.parametrize("value", INTEGERS)
def test_integer_constants_read_back_exactly(value, constants):
    assert run(constant(value, "int64"), {}, constants)[0].tolist() == [value] * 3


def test_beyond_two_to_the_31_indices_have_64_bits():
    """What runs them is `make ops-sweep` (tests/ops/large.py): it takes 5 GB."""
    rows, columns = 2**16 + 1, 2**15 + 3
    for program in (loops.row_sum(rows, columns, "sum"), loops.row_sum(1, rows * columns, "max")):
        found = re.findall(r"(?:for \(|const )(\w+) (?:[ijrbk]\d*|[ij]\d+_(?:low|high)|part\w*) =", text(program))
        assert found and set(found) == {"int64"}, text(program)
    assert "typedef long int64;" in PRELUDE


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "argmax"])
def test_one_long_row_is_shared_among_threads_with_one_result(op):
    n = 100_003
    program = loops.argmax(1, n) if op == "argmax" else loops.row_sum(1, n, op)
    assert "omp parallel" in text(program)
    x = np.random.default_rng(0).uniform(0.99, 1.01, (1, n)).astype(np.float32)
    spoiled = x.copy()
    spoiled[0, 70_000] = np.nan
    threads = torch.get_num_threads()
    try:
        for given in (x, spoiled):
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(run(program, {"x": given})[0])
            assert all(np.array_equal(results[0], other, equal_nan=True) for other in results)
            name = {"max": "amax", "min": "amin"}.get(op, op)
            want = getattr(torch.from_numpy(given).double(), name)(1).numpy()
            assert np.allclose(results[0], want, rtol=1e-4 if op == "prod" else 1e-6, equal_nan=True)
    finally:
        torch.set_num_threads(threads)


def test_a_place_that_is_the_same_for_a_row_is_made_opaque_before_the_loop_over_the_row():
    for program in (loops.embedding(40, 48, 8), loops.embedding_backward(40, 16, 8)):
        (line,) = re.findall(r".*position\(.*", text(program))
        assert re.fullmatch(r" *const int64 t0 = position\(a\d\[i0\]\);", line)


def test_what_is_put_side_by_side_is_written_in_a_loop_for_each():
    found = re.findall(r"for \(int64 i1 = (\d+); i1 < (\d+); i1\+\+\)", text(loops.concatenated(5, 40, 1, 100)))
    assert found == [("0", "40"), ("40", "41"), ("41", "141")]
    assert text(loops.concatenated(3, *range(1, 12))).count("for (int64 i1") == 1, "not in any number of loops"


def test_the_gradient_of_a_large_embedding_is_shared_by_columns():
    program = loops.embedding_backward(300, 192, 2000)
    assert "j0_low = c * width" in text(program)
    rng = np.random.default_rng(0)
    inputs = {"t": rng.integers(0, 2000, 300), "g": rng.normal(size=(300, 192)).astype(np.float32)}
    inputs["t"][:50] = 7
    (want,) = interpret(program, inputs)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert np.array_equal(run(program, inputs)[0], want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_rows_that_are_masked_as_a_whole_read_zeros(dtype):
    """As in the gradient of a slice: one select a row, none an element."""
    rows, n = 5, 200
    b = loops.Body()
    mask = b.op("lt", b.put(IndexOf(loops.I0)), b.const(3, "int64"), dtype="bool")
    x = b.put(Load("x", loops.I0 * n + loops.J0, dtype, mask))
    y = b.op("where", mask, x, b.const(0, dtype), dtype=dtype)
    stores = [Store("y", loops.I0 * n + loops.J0, y), Store("z", loops.I0, b.reduce("max", x, dtype))]
    if dtype == "bfloat16":
        stores = stores[:1]
    shapes = {"x": (dtype, (3, n)), "y": (dtype, (rows, n))} | ({"z": (dtype, (rows,))} if len(stores) > 1 else {})
    program = loops.program(b, (rows,), (n,), stores, **shapes)
    assert "zeros;" in text(program) and f"[{loops.J0}]" in text(program)
    inputs = random_inputs(program)
    for want, got in zip(interpret(program, inputs), run(program, inputs), strict=True):
        assert np.array_equal(want, got)
