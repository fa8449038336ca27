import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.codegen.schedule.memory.offsets import ALIGNMENT, Block, place, place_symbolic
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.index import as_index, contiguous_strides, evaluate, flatten, var
from dcompile.ir.interpret import GARBAGE, interpret
from dcompile.ir.nodes import Apply, Collective, Const, Extern, Load, Loop, Program, Reduce, Store, View, Wait
from dcompile.ir.verify import verify
from tests.codegen.emit import cpp_kernel
from tests.codegen.emit.harness import call, compiled, placed, read
from tests.ir.fuzz import random_program

N = 64


def buffer(name, shape=(N,), dtype="float32", **more):
    return Buffer(name, dtype, shape, contiguous_strides(shape), **more)


def view(name, shape=(N,)):
    return View(name, shape, contiguous_strides(shape))


def double(source, target, name="k"):
    body = (Load(source, var("i0"), "float32"), Apply("add", (0, 0), "float32"))
    return Loop(name, (N,), (), body, (Store(target, var("i0"), 1),))


def chain(length):
    """x -> b0 -> b1 -> ... -> the last is the output."""
    names = [f"b{n}" for n in range(length)]
    steps = [double(a, b, f"k{b}") for a, b in zip(["x", *names], names, strict=False)]
    return Program("p", ("x",), (view(names[-1]),), tuple(map(buffer, ["x", *names])), tuple(steps))


blocks = st.lists(
    st.builds(
        lambda first, length, size: Block(first, first + length, size), *map(st.integers, (0, 0, 1), (60, 20, 4000))
    ),
    max_size=60,
)


def peak(items):
    """Live bytes, each block rounded up as the arena does."""
    steps = range(max((b.last for b in items), default=0) + 1)
    size = [-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in items]
    return max((sum(s for b, s in zip(items, size, strict=True) if b.first <= t <= b.last) for t in steps), default=0)


@given(blocks)
@settings(max_examples=100, deadline=None)
def test_live_blocks_do_not_overlap_and_little_is_wasted(items):
    offsets, total = place(items)
    for n, (a, at) in enumerate(zip(items, offsets, strict=True)):
        assert at % ALIGNMENT == 0 and at + a.nbytes <= total
        for b, other in zip(items[:n], offsets, strict=False):
            together = a.first <= b.last and b.first <= a.last
            assert not together or at + a.nbytes <= other or other + b.nbytes <= at
    assert peak(items) <= total <= max(1.3 * peak(items), peak(items) + 4096)


def test_waste_on_many_random_lifetimes():
    generator = np.random.default_rng(0)
    for _ in range(5):
        first = generator.integers(0, 400, 400)
        length = generator.geometric(0.1, 400)
        size = 2 ** generator.integers(6, 16, 400)
        items = [Block(int(f), int(f + n), int(s)) for f, n, s in zip(first, length, size, strict=True)]
        assert place(items)[1] <= 1.1 * peak(items)


def test_a_chain_of_pointwise_loops_needs_one_buffer():
    planned = plan_memory(chain(6))
    verify(planned)
    assert planned.arena_bytes == 4 * N
    assert planned.table["x"].storage == "input" and planned.table["b5"].storage == "out"


def test_planning_keeps_every_value():
    for seed in range(60):
        program, inputs = random_program(seed)
        planned = plan_memory(program)
        verify(planned)
        for before, after in zip(interpret(program, inputs), interpret(planned, inputs), strict=True):
            np.testing.assert_array_equal(before, after)


def test_compiled_kernels_bear_sharing_memory():
    """What the planner takes to be safe in place must be so for the code that is emitted."""
    made = [random_program(seed, size=12, exact=True) for seed in range(12)]
    programs = [(plan_memory(program), inputs) for program, inputs in made]
    functions = compiled([program for program, _ in programs])
    shared = 0
    for program, inputs in programs:
        arena = np.full(program.arena_bytes, GARBAGE, np.uint8)
        memory = {b.name: placed(b, inputs.get(b.name)) for b in program.buffers if b.storage != "arena"}
        inside = [b for b in program.buffers if b.storage == "arena"]
        memory |= {b.name: arena[b.offset : b.offset + max(b.nbytes, 1)] for b in inside}
        shared += len(inside) - len({b.offset for b in inside})
        for step in program.steps:
            assert call(cpp_kernel.emit(step, program.table), functions, memory) == 0
        for output, expected in zip(program.outputs, interpret(program, inputs), strict=True):
            found = read(program.table[output.buffer], output, memory[output.buffer])
            np.testing.assert_array_equal(found, expected)
    assert shared > 10


def loop_of(body, *stores):
    return Loop("k", (4,), (16,), tuple(body), stores)


AT = flatten([var("i0"), var("j0")], (16, 1))


def test_a_store_in_an_early_pass_does_not_overwrite_what_a_late_pass_reads():
    body = [Load("a", AT, "float32"), Apply("add", (0, 0), "float32"), Reduce("sum", 1, "float32")]
    body += [Apply("mul", (0, 2), "float32")]
    late = loop_of(body, Store("b", AT, 1), Store("c", AT, 3))  # b is known in pass 0, but pass 1 loads a again
    programs = {}
    for target in ("b", "c"):
        steps = (double("x", "a"), late, double("b", "y"), double("c", "z"))
        names = [buffer(n) for n in ("x", "a", "b", "c", "y", "z")]
        programs[target] = plan_memory(Program("p", ("x",), (view("y"), view("z")), tuple(names), steps))
    for planned in programs.values():
        verify(planned)
        table = planned.table
        assert table["b"].offset != table["a"].offset
        assert table["c"].offset == table["a"].offset


@pytest.mark.parametrize("index", [var("i0") + var("j0") * 4, AT * 1])
def test_only_the_same_index_is_in_place(index):
    step = loop_of([Load("a", index, "float32"), Apply("neg", (0,), "float32")], Store("b", AT, 1))
    program = Program("p", ("x",), (view("y"),), tuple(map(buffer, "xaby")), (double("x", "a"), step, double("b", "y")))
    planned = plan_memory(program)
    verify(planned)
    assert (planned.table["a"].offset == planned.table["b"].offset) == (index == AT)


def test_a_collective_in_flight_holds_its_buffers():
    """`g` is not read after the start, but memory that is being sent must not be reused before the wait."""
    steps = (
        double("x", "g"),
        Collective("all_reduce", "b0", "ddp", ("g",)),
        double("x", "h"),
        double("h", "y"),
        Wait("b0", ("g",)),
    )
    planned = plan_memory(Program("p", ("x",), (view("y"),), tuple(map(buffer, "xghy")), steps))
    verify(planned)
    assert planned.table["g"].offset != planned.table["h"].offset


def test_buckets_and_library_results_are_left_alone():
    bucket = Bucket("b0", "float32", "cpu", "ddp", (0,), ("g",), (0,), N)
    steps = (
        Extern("aten.foo.default", (view("x"),), (), ("t",), "alloc"),
        double("t", "g"),
        Collective("all_reduce", "b0", "ddp", ("g",)),
        Wait("b0", ("g",)),
    )
    buffers = (buffer("x"), buffer("t"), buffer("g", storage="bucket:b0"))
    planned = plan_memory(Program("p", ("x",), (view("g"),), buffers, steps, buckets=(bucket,)))
    verify(planned)
    assert [b.storage for b in planned.buffers] == ["input", "library", "bucket:b0"]


@pytest.mark.parametrize("why", ["fallback", "effect"])
def test_what_a_result_may_look_at_lives_as_long(why):
    """A fallback may answer with a view of its argument; a collective reads its argument until its result is waited."""
    fallback = Extern("aten.odd.default", (view("a"),), (), ("t",), "alloc", **{why: True})
    rest = (double("x", "c"), double("c", "d"), double("d", "y"), double("t", "z"))
    names = tuple(buffer(n) for n in ("x", "a", "t", "c", "d", "y", "z"))
    program = Program("p", ("x",), (view("y"), view("z")), names, (double("x", "a"), fallback, *rest))
    planned = plan_memory(program)
    verify(planned)
    assert planned.table["a"].offset != planned.table["c"].offset
    escaping = plan_memory(Program("p", ("x",), (view("t"), view("y")), names, (double("x", "a"), fallback, *rest[:3])))
    verify(escaping)
    assert escaping.table["a"].storage == "out"


def test_zero_sized_and_scalar_buffers():
    steps = (
        Loop("k0", (0,), (), (Const(1.0, "float32"),), (Store("e", var("i0"), 0),)),
        Loop("k1", (), (), (Const(1.0, "float32"),), (Store("s", var("i0") * 0, 0),)),
        Loop("k2", (), (), (Load("s", var("i0") * 0, "float32"),), (Store("y", var("i0") * 0, 0),)),
    )
    buffers = (buffer("e", (0,)), buffer("s", ()), buffer("y", ()))
    planned = plan_memory(Program("p", (), (view("y", ()),), buffers, steps))
    verify(planned)
    assert planned.arena_bytes == ALIGNMENT


# --- blocks of symbolic size ------------------------------------------------------------------------------------------

S0, S1 = var("s0"), var("s1")
symbolic_bytes = st.sampled_from((S0, 4 * S0, 64 * S0, S0 * S1, 4 * S0 * S1 + 4, 256 * S1, S0 + S1))
symbolic_blocks = st.lists(
    st.builds(lambda first, length, nbytes: Block(first, first + length, nbytes), st.integers(0, 12),
              st.integers(0, 5), symbolic_bytes),
    max_size=14,
)  # fmt: skip


@given(symbolic_blocks, st.integers(0, 3).map(lambda n: 64 * n))
@settings(deadline=None)
def test_blocks_of_symbolic_size_do_not_overlap_whatever_the_sizes(blocks, start):
    offsets, end = place_symbolic(blocks, start)
    for s0, s1 in itertools.product((2, 7, 100), (2, 33)):
        sizes = {"s0": s0, "s1": s1}
        at = [evaluate(as_index(offset), sizes) for offset in offsets]
        ends = [low + evaluate(block.nbytes, sizes) for low, block in zip(at, blocks, strict=True)]
        assert all(low >= start and low % 64 == 0 for low in at)
        assert max(ends, default=start) <= evaluate(as_index(end), sizes)
        for a, b in itertools.combinations(range(len(blocks)), 2):
            together = blocks[a].first <= blocks[b].last and blocks[b].first <= blocks[a].last
            assert not together or ends[a] <= at[b] or ends[b] <= at[a]


def test_blocks_that_follow_one_another_share_memory_where_sizes_compare():
    blocks = [Block(0, 1, 64 * S0), Block(2, 3, 64 * S0), Block(4, 5, 16 * S0)]
    assert place_symbolic(blocks, 0) == ([0, 0, 0], 64 * S0)
    apart = [Block(0, 1, 64 * S0), Block(2, 3, 64 * S1)]
    assert place_symbolic(apart, 0)[1] == 64 * S0 + 64 * S1


@pytest.mark.parametrize("rows, columns", [(3, 5), (700, 96), (4000, 7)])
def test_column_sums_may_go_with_what_is_written_in_place(rows, columns):
    """The kernel that writes over what it reads also adds it up along the rows, before and after."""
    shape = (rows, columns)
    at = flatten([var("i0"), var("j0")], (columns, 1))
    body = (
        Load("a", at, "float32"),
        Apply("neg", (0,), "float32"),
        Reduce("sum", 0, "float32"),
        Apply("sub", (1, 2), "float32"),
    )
    stores = (Store("b", at, 3), Store("c", var("j0"), 0, "sum"), Store("d", var("j0"), 3, "sum"))
    steps = (
        Loop("k0", (rows,), (columns,), (Load("x", at, "float32"),), (Store("a", at, 0),)),
        Loop("k1", (rows,), (columns,), body, stores),
        Loop("k2", (rows,), (columns,), (Load("b", at, "float32"),), (Store("y", at, 0),)),
    )
    buffers = (*(buffer(name, shape) for name in "xaby"), buffer("c", (columns,)), buffer("d", (columns,)))
    shown = (view("y", shape), view("c", (columns,)), view("d", (columns,)))
    program = plan_memory(Program("p", ("x",), shown, buffers, steps))
    verify(program)
    table = program.table
    assert (table["a"].storage, table["a"].offset) == (table["b"].storage, table["b"].offset)
    functions = compiled([program])
    inputs = {"x": np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32)}
    memory = {b.name: placed(b, inputs.get(b.name)) for b in program.buffers if b.storage in ("input", "out")}
    shared = memory["y"] if table["a"].storage != "arena" else np.zeros(program.arena_bytes, np.uint8)
    memory |= {"a": shared, "b": shared}
    for step in program.steps:
        assert call(cpp_kernel.emit(step, table), functions, memory) == 0
    for output, expected in zip(program.outputs, interpret(program, inputs), strict=True):
        np.testing.assert_array_equal(read(table[output.buffer], output, memory[output.buffer]), expected)
