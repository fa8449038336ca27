"""Large temporaries of a GPU program lie outside of the arena: with values as before, and a lower peak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.codegen.emit.host import program as host_program
from dcompile.codegen.emit.target import Kernels
from dcompile.codegen.emit.triton.kernel import emit
from dcompile.codegen.schedule.memory import plan
from dcompile.codegen.schedule.memory.offsets import Block
from dcompile.codegen.schedule.memory.plan import (
    MIN_BLOCK_BYTES,
    MIN_SMALL_BLOCK_BYTES,
    RISE_FRACTION,
    plan_memory,
    set_apart,
)
from dcompile.ir.buffers import IN_DONOR, Bucket, Buffer
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Collective, Load, Loop, Program, Store, View, Wait
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

MIB = 1 << 20
STEPS = 24
ROWS = MIB // 4


def gpu(name, mib=1):
    shape = (mib * ROWS,)
    return Buffer(name, "float32", shape, contiguous_strides(shape), "cuda")


def whole(name, mib=1):
    return View(name, (mib * ROWS,), (1,))


def loop(sources, target, mib=1):
    """target = the sum of sources, each times two, element by element."""
    body = [Load(source, var("i0"), "float32") for source in sources]
    last = 0
    for n in range(1, len(sources)):
        body.append(Apply("add", (last, n), "float32"))
        last = len(body) - 1
    body.append(Apply("add", (last, last), "float32"))
    return Loop(f"k_{target}", (mib * ROWS,), (), tuple(body), (Store(target, var("i0"), len(body) - 1),))


def backward(mib=8, layers=6, donated=True):
    """Saved tensors s5..s0 are read one after another; on the way down a wide temporary lives for two steps."""
    saved = [f"s{n}" for n in range(layers)]
    buffers, steps, given = [gpu(name, mib) for name in saved], [], "s5"
    for n in reversed(range(layers)):
        steps += [loop([given, f"s{n}"] if given != f"s{n}" else [given], f"g{n}", mib)]
        buffers.append(gpu(f"g{n}", mib))
        given = f"g{n}"
    buffers += [gpu("wide", 4 * mib), gpu("out", mib)]
    size = mib * ROWS
    place = var("i0") * size + var("i1")
    wide = Loop("k_wide", (4, size), (), (Load("g0", var("i1"), "float32"),), (Store("wide", place, 0),))
    narrow = Loop("k_out", (mib * ROWS,), (), (Load("wide", var("i0"), "float32"),), (Store("out", var("i0"), 0),))
    program = Program("p", tuple(saved), (whole("out", mib),), tuple(buffers), (*steps, wide, narrow))
    return replace(program, donated=tuple(saved)) if donated else program


def storages(program):
    return {buffer.name: buffer.storage for buffer in program.buffers}


def test_a_wide_temporary_at_the_end_does_not_count_at_the_beginning():
    planned = plan_memory(backward())
    verify(planned)
    assert storages(planned)["wide"] == "out"
    assert planned.arena_bytes < 8 * MIB


def test_the_first_gradient_takes_the_memory_of_the_saved_tensor():
    planned = plan_memory(backward())
    assert storages(planned)["g5"] == IN_DONOR + "s5"
    assert IN_DONOR + "s5" not in storages(plan_memory(backward(donated=False))).values()


def test_what_follows_in_place_lies_in_the_same_allocation():
    steps = (loop(["x"], "a", 64), loop(["a"], "b", 64), loop(["b"], "c", 64), loop(["y"], "out", 64))
    reads = Loop("k", (ROWS,), (), (Load("c", var("i0") * 64, "float32"),), (Store("small", var("i0"), 0),))
    buffers = tuple(gpu(name, 64) for name in ("x", "y", "a", "b", "c", "out"))
    program = Program(
        "p", ("x", "y"), (whole("out", 64), whole("small")), (*buffers, gpu("small")), (*steps[:3], reads, steps[3])
    )
    planned = plan_memory(program)
    verify(planned)
    found = storages(planned)
    assert (found["a"], found["b"], found["c"]) == ("out", IN_DONOR + "a", IN_DONOR + "a")
    text = host_program.emit(planned, Kernels(tuple(emit(step, planned.table) for step in planned.steps)))
    made = [line.split()[0] for line in text.splitlines() if " = empty" in line]
    assert made == ["a", "small", "out"]


def test_what_is_free_is_given_back_before_more_is_taken():
    """Kernels are started together, but not where a large argument of the first could go before the second's result."""
    for mib, runs in ((64, 2), (1, 1)):
        steps = (loop(["x"], "a", mib), loop(["y"], "out", mib))
        buffers = tuple(gpu(name, mib) for name in ("x", "y", "a", "out"))
        program = Program("p", ("x", "y"), (whole("a", mib), whole("out", mib)), buffers, steps)
        planned = plan_memory(program)
        text = host_program.emit(planned, Kernels(tuple(emit(step, planned.table) for step in planned.steps)))
        assert text.count("(stream, ") == runs
        gone = text.index("del x") < text.index("out = empty_cuda")
        assert gone == (runs == 2)


def test_a_small_program_keeps_its_arena():
    planned = plan_memory(
        Program("p", ("x",), (whole("c"),), tuple(map(gpu, "xabc")), tuple(loop([a], b) for a, b in ("xa", "ab", "bc")))
    )
    assert storages(planned)["a"] == "arena"


def test_what_a_collective_works_on_stays_where_it_is():
    program = backward()
    bucket = Bucket("all", "float32", "cuda", "group", (0,), ("wide",), (0,), 4 * 8 * ROWS)
    flying = (Collective("all_reduce", "all", "group", ("wide",)), Wait("all", ("wide",)))
    program = replace(program, steps=(*program.steps[:-1], *flying, program.steps[-1]), buckets=(bucket,))
    assert storages(plan_memory(program))["wide"] == "arena"


def test_planning_keeps_every_value(monkeypatch):
    """Random programs as if on a GPU, with nothing too small to be set apart."""
    monkeypatch.setattr(plan, "MIN_BLOCK_BYTES", 0)
    monkeypatch.setattr(plan, "MIN_SMALL_BLOCK_BYTES", 0)
    moved = 0
    for seed in range(40):
        program, inputs = random_program(seed)
        there = replace(program, buffers=tuple(replace(buffer, device="cuda") for buffer in program.buffers))
        planned = plan_memory(there)
        verify(planned)
        shown = {output.buffer for output in planned.outputs if isinstance(output, View)}
        moved += any(place == "out" for name, place in storages(planned).items() if name not in shown)
        for before, after in zip(interpret(program, inputs), interpret(planned, inputs), strict=True):
            np.testing.assert_array_equal(before, after)
    assert moved > 4


def test_what_is_small_beside_the_largest_lies_outside():
    """The largest is alive at the peak; a small one beside it, a step later, would make the arena larger than it."""
    held = np.full(STEPS, 100000 * MIB)
    held[2] += 600 * MIB
    layers = {n: Block(5 + n % 9, 6 + n % 9, 90 * MIB // 5) for n in range(2, 47)}
    blocks = {0: Block(2, 4, 256 * MIB), 1: Block(3, 5, 7 * MIB), **layers}
    assert set_apart(blocks, {}, held).hosts == {1: None}
    assert peak(blocks, {1}, held) == int(held.max()) + 256 * MIB


def test_what_is_small_and_alive_all_the_time_after_the_peak_lies_outside():
    held = np.arange(STEPS, 0, -1) * 100 * MIB
    tables = {n: Block(3, STEPS - 2, MIB // 4) for n in range(2)}
    assert set_apart(tables, {}, held).hosts == {0: None, 1: None}


def test_what_is_large_at_the_peak_lies_outside_for_it_would_outlive_the_program():
    """As logits, where all that is saved is saved: the program needs as much either way, and its backward less."""
    held = np.arange(1, STEPS + 1) * 10 * MIB
    blocks = {0: Block(STEPS - 2, STEPS - 1, 128 * MIB), **{n: Block(2 * n, 2 * n, MIB // 2) for n in range(1, 9)}}
    assert set_apart(blocks, {}, held).hosts == {0: None}
    assert arena(blocks, {0}) < MIB < arena(blocks, {}), "which counts in the backward, too"


def test_kilobytes_are_no_reason_for_an_allocation():
    held = np.arange(STEPS, 0, -1) * 100 * MIB
    assert not set_apart({0: Block(3, 20, MIB // 16)}, {}, held).hosts
    held = np.arange(STEPS, 0, -1) * 10000 * MIB
    assert not set_apart({0: Block(3, 20, MIB // 4)}, {}, held).hosts


def peak(blocks, outside, held):
    inside, at = np.zeros(len(held), np.int64), held.copy()
    for n, block in blocks.items():
        (at if n in outside else inside)[block.first : block.last + 1] += block.nbytes
    return int(inside.max() + at.max())


def arena(blocks, outside):
    inside = np.zeros(STEPS, np.int64)
    for n, block in blocks.items():
        inside[block.first : block.last + 1] += 0 if n in outside else block.nbytes
    return int(inside.max())


spans = st.tuples(st.integers(0, STEPS - 1), st.integers(0, 5), st.integers(1, 64 * 16))


@given(st.lists(spans, max_size=30), st.integers(0, 200), st.integers(0, STEPS - 1))
@settings(max_examples=100, deadline=None)
def test_the_peak_rises_only_where_the_arena_shrinks_by_more(given, saved, until):
    """Not above that of everything in the arena, nor that of what is large outside of it, whatever lies there too."""
    blocks = {n: Block(a, min(a + more, STEPS - 1), part * MIB // 16) for n, (a, more, part) in enumerate(given)}
    held = np.zeros(STEPS, np.int64)
    held[: until + 1] += saved * MIB
    found = set_apart(blocks, {}, held).hosts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MAX_SMALL_BLOCKS", 0)
        lasting = set_apart(blocks, {}, held).hosts
        patch.setattr(plan, "_move_lasting", lambda sides: None)
        large = set_apart(blocks, {}, held).hosts
    assert large.keys() <= lasting.keys() <= found.keys()
    usual, before, between, after = (peak(blocks, outside, held) for outside in ({}, large, lasting, found))
    assert after <= between - MIN_SMALL_BLOCK_BYTES * (len(found) - len(lasting))
    assert not large or before <= usual - MIN_BLOCK_BYTES
    gained = before + arena(blocks, large) - between - arena(blocks, lasting)
    assert gained >= MIN_BLOCK_BYTES * (len(lasting) - len(large)) and between <= before + before // RISE_FRACTION
    assert found == set_apart(dict(reversed(blocks.items())), {}, held).hosts
