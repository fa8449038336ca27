"""Temporaries in the memory of results and saved tensors: never two in one place, never in memory still in use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.codegen.schedule.memory import plan, reuse_external
from dcompile.codegen.schedule.memory.offsets import Block, place
from dcompile.codegen.schedule.memory.plan import escaping_buffers, live_ranges, plan_memory
from dcompile.codegen.schedule.memory.reuse_external import SEPARATE, DonorBuffer, place_in_donors
from dcompile.errors import VerifyError
from dcompile.ir.buffers import IN_DONOR
from dcompile.ir.index import var
from dcompile.ir.interpret import GARBAGE, interpret
from dcompile.ir.nodes import Apply, Collective, Extern, Load, Loop, Program, Store, Wait
from dcompile.ir.verify import verify
from tests.codegen.emit import cpp_kernel
from tests.codegen.emit.harness import call, compiled, placed, read
from tests.codegen.schedule.memory.test_plan import N, buffer, double, view
from tests.ir.fuzz import random_program

KIB = 1 << 10
STEPS = 40

spans = st.tuples(st.integers(0, 30), st.integers(0, 9))
block_lists = st.lists(
    st.builds(lambda span, n: Block(span[0], sum(span), n * KIB), spans, st.integers(1, 60)), max_size=25
)
host_lists = st.lists(st.tuples(st.integers(4, 80), st.integers(0, STEPS - 1), st.booleans()), max_size=12)


@given(block_lists, host_lists, st.integers(0, 400), st.one_of(st.none(), st.integers(0, 400)))
@settings(max_examples=50, deadline=None)
def test_attempts_that_end_early_would_not_have_been_chosen(blocks, given_hosts, other, beside):
    """Most are hopeless at their first blocks: followed to the end, they took longer than lowering 32 layers."""
    hosts = [DonorBuffer(f"h{n}", kib * KIB, edge, early) for n, (kib, edge, early) in enumerate(given_hosts)]
    base = np.full(STEPS, other * KIB, np.int64)
    later = None if beside is None else beside * KIB
    whole, gaps, tried = reuse_external._PlacementAttempt.run, reuse_external._DonorSpace.gap, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse_external, "MIN_SAVED_BYTES", KIB)
        patch.setattr(reuse_external, "MIN_SEPARATE_BYTES", 16 * KIB)
        patch.setattr(reuse_external._DonorSpace, "gap", lambda *args: tried.append(1) or gaps(*args))
        found, fewer = place_in_donors(blocks, hosts, {}, base, set(), later), len(tried)
        patch.setattr(reuse_external._PlacementAttempt, "run", lambda self, cap, *_: whole(self, cap, 1 << 60, 1 << 60))
        assert place_in_donors(blocks, hosts, {}, base, set(), later) == found
    assert fewer <= len(tried) - fewer


def is_open(host: DonorBuffer, block: Block) -> bool:
    return block.last < host.edge if host.early else block.first > host.edge


@given(block_lists, host_lists, st.integers(0, 400), st.booleans())
@settings(max_examples=75, deadline=None)
def test_blocks_share_no_byte_and_the_peak_is_what_it_says(blocks, given_hosts, other, may_be_apart):
    hosts = [DonorBuffer(f"h{n}", kib * KIB, edge, early) for n, (kib, edge, early) in enumerate(given_hosts)]
    base = np.full(STEPS, other * KIB, np.int64)
    for host in hosts:
        base[slice(host.edge, None) if host.early else slice(0, host.edge + 1)] += host.nbytes
    usual = place(blocks)[1] + int(base.max(initial=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse_external, "MIN_SEPARATE_BYTES", 16 * KIB if may_be_apart else 1 << 20)
        found = place_in_donors(blocks, hosts, {}, base, set())
    held = base.copy()
    table: dict[str | int, DonorBuffer] = {host.name: host for host in hosts}
    for number, (block, (name, _)) in enumerate(zip(blocks, found.places, strict=True)):
        if name == SEPARATE:
            assert may_be_apart and block.nbytes >= 16 * KIB
            followers = [b.last for b, (name, _) in zip(blocks, found.places, strict=True) if name == number]
            held[block.first : max(block.last, *followers, 0) + 1] += block.nbytes  # whole cache lines already
            table[number] = DonorBuffer("", block.nbytes, block.last, early=False)
    for host in hosts:
        inside = [b for b, (name, _) in zip(blocks, found.places, strict=True) if name == host.name]
        if inside and host.early:
            held[min(b.first for b in inside) : host.edge] += host.nbytes
        elif inside:
            held[host.edge + 1 : max(b.last for b in inside) + 1] += host.nbytes
    for n, (block, (name, at)) in enumerate(zip(blocks, found.places, strict=True)):
        if name == SEPARATE:
            continue
        assert at >= 0 and at + block.nbytes <= (found.arena_bytes if name is None else table[name].nbytes)
        assert name is None or is_open(table[name], block)
        for earlier, (where, start) in zip(blocks[:n], found.places, strict=False):
            together = where == name and earlier.first <= block.last and block.first <= earlier.last
            assert not together or at + block.nbytes <= start or start + earlier.nbytes <= at
    assert found.peak == found.arena_bytes + int(held.max(initial=0)) <= usual


def test_what_is_needed_only_where_little_is_held_has_memory_of_its_own():
    """Saved tensors go one after another; the wide temporary comes when few are left."""
    mib = 1 << 20
    held = np.array([8, 7, 6, 5, 4, 3, 2, 1], np.int64) * mib
    wide, narrow = Block(6, 7, 4 * mib), Block(0, 1, mib)
    found = place_in_donors([wide, narrow], [], {}, held, set())
    assert found.places == [(SEPARATE, 0), (None, 0)] and found.arena_bytes == mib and found.peak == 9 * mib
    assert place_in_donors([wide, narrow], [], {}, held, {0}).places[0] == (None, 0)  # a collective works on it
    late = place_in_donors([wide, narrow], [], {}, held[::-1].copy(), set())
    assert late.places[0][0] is None  # needed where most is held


def test_a_small_arena_needed_later_lies_in_memory_of_its_own_that_is_read_by_then():
    mib = 1 << 20
    held = np.array([8, 9, 1, 1, 1, 1], np.int64) * mib
    wide, row, rows = Block(2, 3, 4 * mib), Block(4, 5, 2 * KIB), Block(5, 5, 8 * KIB)
    found = place_in_donors([wide, row, rows], [], {}, held, set())
    assert found.arena_bytes == 0 and found.peak == 9 * mib
    (own, _), (first, at), (second, then) = found.places
    assert own == SEPARATE and first == second == 0 and sorted((at, then)) in ([0, 2 * KIB], [0, 8 * KIB])
    assert place_in_donors([wide, row, rows], [], {}, held, {1}).arena_bytes > 0  # a collective works on one of them
    full = place_in_donors([wide, row, rows], [], {}, held + np.array([0, 0, 0, 0, 0, 6 * mib]), set())
    assert full.places[0] == (SEPARATE, 0) and full.arena_bytes > 0  # the wide one's memory does not fit in there


def test_an_arena_that_outlasts_the_forward_counts_in_the_backward():
    mib = 1 << 20
    held = np.arange(8, dtype=np.int64) * mib
    wide = Block(0, 7, 4 * mib)
    assert place_in_donors([wide], [], {}, held, set()).places == [(None, 0)]
    assert place_in_donors([wide], [], {}, held, set(), beside=7 * mib).places == [(SEPARATE, 0)]


@pytest.fixture
def small(monkeypatch):
    """Random programs are small."""
    for name in ("SMALLEST_HOST", "SMALLEST_GUEST", "MIN_SAVED_BYTES"):
        monkeypatch.setattr(reuse_external, name, 1)


def given_away(program: Program) -> Program:
    return replace(program, donated=tuple(name for name in program.inputs if name in program.table))


def test_planning_keeps_every_value(small):
    in_donors = 0
    for seed in range(60):
        program, inputs = random_program(seed)
        planned = plan_memory(given_away(program))
        verify(planned)
        in_donors += sum((b.storage or "").startswith(IN_DONOR) for b in planned.buffers)
        for before, after in zip(interpret(program, inputs), interpret(planned, inputs), strict=True):
            np.testing.assert_array_equal(before, after)
    assert in_donors > 30


def test_what_follows_in_memory_of_a_blocks_own_keeps_every_value(small, monkeypatch):
    for name, value in {"MIN_SEPARATE_BYTES": 1, "MIN_SAVING_DIVISOR": 1 << 30, "BYTES_PER_DONOR": 1 << 30}.items():
        monkeypatch.setattr(reuse_external, name, value)
    monkeypatch.setattr(plan, "hosts_of", lambda *_: [])
    followed = 0
    for seed in range(150):
        program, inputs = random_program(seed, size=12)
        planned = plan_memory(program)
        verify(planned)
        heads = {b.name for b in planned.buffers if b.storage == "out"} - escaping_buffers(planned)
        lives = live_ranges(planned, {})
        in_donors = [(b, (b.storage or "").removeprefix(IN_DONOR)) for b in planned.buffers]
        followed += sum(host in heads and lives[host][1] + 1 < lives[b.name][0] for b, host in in_donors)
        if not any((b.storage or "").startswith(IN_DONOR) for b in planned.buffers):
            continue  # four of five are planned as they are without
        for before, after in zip(interpret(program, inputs), interpret(planned, inputs), strict=True):
            np.testing.assert_array_equal(before, after)
    assert followed


def test_compiled_kernels_bear_it(small):
    made = [random_program(seed, size=12, exact=True) for seed in range(12)]
    programs = [(plan_memory(given_away(program)), inputs) for program, inputs in made]
    functions = compiled([program for program, _ in programs])
    in_donors = 0
    for program, inputs in programs:
        arena = np.full(program.arena_bytes, GARBAGE, np.uint8)
        within = {
            b.name: (b.storage or "").removeprefix(IN_DONOR) for b in program.buffers if IN_DONOR in (b.storage or "")
        }
        apart = [b for b in program.buffers if b.storage != "arena" and b.name not in within]
        memory = {b.name: placed(b, inputs.get(b.name)) for b in apart}
        inside = [b for b in program.buffers if b.storage == "arena"]
        memory |= {b.name: arena[b.offset : b.offset + max(b.nbytes, 1)] for b in inside}
        for name, host in within.items():
            start = program.table[name].offset
            room = memory[host].view(np.uint8)[start : start + program.table[name].nbytes]
            memory[name] = room.view(placed(program.table[name], None).dtype)
        in_donors += len(within)
        for step in program.steps:
            assert call(cpp_kernel.emit(step, program.table), functions, memory) == 0
        for output, expected in zip(program.outputs, interpret(program, inputs), strict=True):
            found = read(program.table[output.buffer], output, memory[output.buffer])
            np.testing.assert_array_equal(found, expected)
    assert in_donors > 5


def test_a_chain_takes_the_memory_of_the_result(small):
    """x -> b0 -> b1 -> y: all in place."""
    steps = (double("x", "b0"), double("b0", "b1"), double("b1", "y"))
    planned = plan_memory(Program("p", ("x",), (view("y"),), tuple(map(buffer, ("x", "b0", "b1", "y"))), steps))
    verify(planned)
    assert planned.arena_bytes == 0
    assert planned.table["b0"].storage == planned.table["b1"].storage == IN_DONOR + "y"


def test_what_is_given_away_makes_room_for_what_comes_later(small):
    """Four inputs are in memory at first: one of them serves later, where there is no result to lie in yet."""
    names = ("x0", "x1", "x2", "x3")
    body = (*(Load(name, var("i0"), "float32") for name in names), Apply("add", (0, 1), "float32"))
    body += (Apply("add", (2, 3), "float32"), Apply("add", (4, 5), "float32"))
    first = Loop("k", (N,), (), body, (Store("u", var("i0"), 6),))
    product = Extern("aten.mm.default", (view("b"), view("b")), (), ("y",), "alloc")
    buffers = tuple(map(buffer, (*names, "u", "b", "y")))
    program = Program("p", names, (view("u"), view("y")), buffers, (first, double("u", "b"), product))
    kept, given_ = plan_memory(program), plan_memory(given_away(program))
    verify(given_)
    assert kept.table["b"].storage == "arena" and given_.table["b"].storage in {IN_DONOR + name for name in names}
    assert given_.arena_bytes == 0


def test_what_is_read_later_is_no_place(small):
    steps = (double("x", "b0"), double("b0", "b1"), double("b1", "y"), double("x", "z"))
    program = Program("p", ("x",), (view("y"), view("z")), tuple(map(buffer, ("x", "b0", "b1", "y", "z"))), steps)
    planned = plan_memory(replace(program, donated=("x",)))
    verify(planned)
    assert [b.name for b in planned.buffers if b.storage == IN_DONOR + "x"] == ["z"], "the last step alone may"
    wrong = tuple(replace(b, storage=IN_DONOR + "x", offset=0) if b.name == "b0" else b for b in planned.buffers)
    with pytest.raises(VerifyError, match="alive together"):
        verify(replace(planned, buffers=wrong))
    kept = replace(planned, donated=(), buffers=wrong)
    with pytest.raises(VerifyError, match="may not lie"):
        verify(kept)


def test_what_a_collective_works_on_stays_in_the_arena(small):
    steps = (
        double("x", "g"),
        Collective("all_reduce", "b0", "ddp", ("g",)),
        Wait("b0", ("g",)),
        double("g", "y"),
    )
    planned = plan_memory(Program("p", ("x",), (view("y"),), tuple(map(buffer, "xgy")), steps, donated=("x",)))
    verify(planned)
    assert planned.table["g"].storage == "arena"


def test_a_library_result_that_is_done_with_makes_room(small):
    body = (Load("t", var("i0"), "float32"), Load("s", var("i0"), "float32"), Apply("add", (0, 1), "float32"))
    steps = (
        Extern("aten.two.default", (view("x"),), (), ("t", "s"), "alloc"),
        Loop("k", (N,), (), body, (Store("a", var("i0"), 2),)),
        double("a", "b"),
        Extern("aten.mm.default", (view("b"), view("b")), (), ("y",), "alloc"),
    )
    planned = plan_memory(Program("p", ("x",), (view("y"),), tuple(map(buffer, "xtsaby")), steps))
    verify(planned)
    assert planned.arena_bytes == 0
    assert planned.table["a"].storage == planned.table["b"].storage
    assert planned.table["a"].storage in (IN_DONOR + "t", IN_DONOR + "s")


@pytest.mark.parametrize("fallback", [False, True])
def test_nothing_lies_in_a_saved_tensor_that_a_result_may_be_a_view_of(fallback):
    """What a fallback returns may look at its arguments: a result of the program lives on, and they with it."""
    shape = (1 << 18,)

    def doubled(source, target):
        return replace(double(source, target, f"k_{target}"), outer=shape)

    fallen = Extern("aten.cumsum.default", (view("saved", shape), 0), (), ("seen",), "alloc", fallback=fallback)
    total = (Load("a", var("i0"), "float32"), Load("b", var("i0"), "float32"), Apply("add", (0, 1), "float32"))
    both = Loop("k_both", shape, (), total, (Store("c", var("i0"), 2),))
    steps = (fallen, doubled("x", "a"), doubled("x", "b"), both, doubled("c", "result"))
    buffers = tuple(buffer(name, shape) for name in ["saved", "seen", "x", "a", "b", "c", "result"])
    results = (view("seen", shape), view("result", shape))
    program = Program("p", ("saved", "x"), results, buffers, steps, donated=("saved",))
    planned = plan_memory(program)
    verify(planned)
    assert any(b.storage == IN_DONOR + "saved" for b in planned.buffers) is not fallback


def test_a_result_lies_over_a_saved_tensor_that_is_read_for_the_last_time(small):
    steps = (double("x", "a"), double("a", "y"), double("s", "z"), double("t", "w"))
    buffers = tuple(map(buffer, ("x", "a", "y", "s", "z", "t", "w")))
    program = Program("p", ("x", "s", "t"), (view("y"), view("z"), view("w")), buffers, steps, donated=("s",))
    planned = plan_memory(program)
    verify(planned)
    assert planned.table["z"].storage == IN_DONOR + "s"
    assert planned.table["y"].storage == planned.table["w"].storage == "out", "x and t are the caller's"
    inputs = {name: np.arange(N, dtype=np.float32) for name in "xst"}
    for want, got in zip(interpret(program, inputs), interpret(planned, inputs), strict=True):
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("seen", [False, True])
def test_no_result_lies_over_what_another_result_may_look_at(seen):
    shape = (1 << 18,)
    look = Extern("aten.cumsum.default", (view("s", shape), 0), (), ("a",), "alloc", fallback=seen)
    steps = (look, replace(double("s", "z"), outer=shape))
    buffers = tuple(buffer(name, shape) for name in ("s", "a", "z"))
    program = Program("p", ("s",), (view("a", shape), view("z", shape)), buffers, steps, donated=("s",))
    planned = plan_memory(program)
    verify(planned)
    assert (planned.table["z"].storage == IN_DONOR + "s") is not seen
