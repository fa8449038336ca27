import random

from dcompile.codegen.schedule.order.overlap_collectives import start_early_wait_late
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import var
from dcompile.ir.nodes import Apply, Collective, Load, Loop, Program, Store, View, Wait
from dcompile.ir.verify import verify
from tests.codegen.schedule.order.test_dependences import respects


def loop(reads, writes):
    body = (*(Load(r, var("i0"), "float32") for r in reads), Apply("neg", (0,), "float32"))
    return Loop(f"k_{'_'.join(writes)}", (4,), (), body, tuple(Store(w, var("i0"), len(reads)) for w in writes))


def start(bucket, *buffers):
    return Collective("all_reduce", bucket, "ddp", buffers)


def program(steps, outputs=()):
    names = sorted({n for s in steps for n in s.reads | s.writes} | {"x"})
    views = tuple(View(name, (4,), (1,)) for name in outputs)
    return Program("p", ("x",), views, tuple(Buffer(n, "float32", (4,), (1,)) for n in names), tuple(steps))


def test_start_behind_the_last_writer_and_wait_at_the_end():
    g1, a, b = loop("x", ["g1"]), loop("x", ["a"]), loop("a", ["b"])
    s1, w1 = start("b1", "g1"), Wait("b1", ("g1",))
    before = program([g1, a, s1, w1, b], ["g1", "b"])
    after = start_early_wait_late(before)
    verify(after)
    assert after.steps == (g1, s1, a, b, w1)


def test_wait_just_before_the_first_reader():
    g, a, use, b = loop("x", ["g"]), loop("x", ["a"]), loop("g", ["h"]), loop("x", ["b"])
    s, w = start("b0", "g"), Wait("b0", ("g",))
    after = start_early_wait_late(program([g, s, w, a, use, b], ["h"]))
    verify(after)
    assert after.steps == (g, s, a, w, use, b)


def test_a_reader_of_the_unreduced_value_holds_the_start_back():
    g, norm, a = loop("x", ["g"]), loop("g", ["n"]), loop("x", ["a"])
    s, w = start("b0", "g"), Wait("b0", ("g",))
    assert start_early_wait_late(program([g, norm, a, s, w], ["n"])).steps == (g, norm, s, a, w)


def test_starts_keep_their_order():
    """Every rank must start the same collectives in the same order, even where a later one could go first."""
    g1, a, g0 = loop("x", ["g1"]), loop("x", ["a"]), loop("x", ["g0"])
    s0, s1 = start("b0", "g0"), start("b1", "g1")
    after = start_early_wait_late(program([g1, a, g0, s0, s1, Wait("b0", ("g0",)), Wait("b1", ("g1",))]))
    verify(after)
    assert after.steps == (g1, a, g0, s0, s1, Wait("b0", ("g0",)), Wait("b1", ("g1",)))


def test_a_second_exchange_of_the_same_buffer_waits_for_the_first():
    g, a = loop("x", ["g"]), loop("x", ["a"])
    steps = [g, start("b0", "g"), a, Wait("b0", ("g",)), start("b1", "g"), Wait("b1", ("g",))]
    after = start_early_wait_late(program(steps))
    verify(after)
    assert [type(s) for s in after.steps] == [Loop, Collective, Loop, Wait, Collective, Wait]


def test_without_collectives_nothing_changes():
    before = program([loop("x", ["a"])])
    assert start_early_wait_late(before) is before


def test_random_programs_keep_their_dependences_and_settle():
    for seed in range(100):
        rng = random.Random(seed)
        gradients = [f"g{n}" for n in range(8)]
        steps = []
        for name in gradients:
            steps += [loop(rng.sample(["x", *gradients[: gradients.index(name)]], 1), [name])]
        for n in range(4):
            mine = tuple(gradients[2 * n : 2 * n + 2])
            steps += [start(f"b{n}", *mine)]
        for n in range(4):
            steps += [Wait(f"b{n}", tuple(gradients[2 * n : 2 * n + 2]))]
        for n in range(4):
            steps += [loop(rng.sample([*gradients, "x"], 2), [f"y{n}"])]
        before = program(steps, [f"y{n}" for n in range(4)])
        verify(before)
        after = start_early_wait_late(before)
        verify(after)
        assert respects(after.steps, before.steps)
        assert start_early_wait_late(after) == after
