import time
from collections import defaultdict, deque
from collections.abc import Sequence

import pytest

from dcompile.codegen.schedule.order.dependences import edges, remove_dead_steps, touches
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Collective, Extern, IndexOf, Load, Loop, Program, Step, Store, View, Wait
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

I0 = var("i0")


def loop(name, reads, writes):
    body = [Load(r, I0, "float32") for r in reads]
    body.append(Apply("neg", (0,), "float32"))
    return Loop(name, (4,), (), tuple(body), tuple(Store(w, I0, len(body) - 1) for w in writes))


def view(name):
    return View(name, (4,), (1,))


def call(outs, *names, mode="alloc", **more):
    return Extern("aten.odd.default", tuple(map(view, names)), (), tuple(outs), mode, **more)


def program(inputs, outputs, steps):
    names = sorted({n for s in steps for n in s.reads | s.writes} | set(inputs))
    buffers = tuple(Buffer(n, "float32", (4,), (1,)) for n in names)
    return Program("p", tuple(inputs), tuple(map(view, outputs)), buffers, tuple(steps))


def respects(after: Sequence[Step], before: Sequence[Step]) -> bool:
    """Are these the same steps, in an order that keeps every edge of the old order?"""
    places: dict[Step, deque[int]] = defaultdict(deque)
    for place, step in enumerate(after):
        places[step].append(place)
    moved = [places[step].popleft() if places[step] else -1 for step in before]
    if len(after) != len(before) or -1 in moved:
        return False
    return all(moved[first] < moved[number] for number, firsts in enumerate(edges(before)) for first in firsts)


def test_reads_follow_writes_and_mutation_follows_reads():
    steps = [loop("a", "x", "a"), loop("b", "x", "b"), loop("c", "ab", "x"), call([None], "x", effect=True)]
    assert [sorted(e) for e in edges(steps)] == [[], [], [0, 1], [2]]


def test_a_call_in_place_waits_for_readers_and_holds_back_later_ones():
    steps = [loop("a", "x", "a"), loop("b", "a", "b"), call("a", "a", mode="mutate"), loop("c", "a", "c")]
    assert [sorted(e) for e in edges(steps)] == [[], [0], [0, 1], [2]]


def test_the_result_of_an_allocation_may_show_its_argument():
    steps = [call("v", "x"), loop("a", "v", "a"), loop("m", "a", "x"), loop("b", "v", "b")]
    assert [sorted(e) for e in edges(steps)] == [[], [0], [0, 1], [0, 2]]
    assert touches(steps)[3] == {"v", "x", "b"}


def test_collectives_keep_their_order_and_hold_their_buffers():
    one, two = (Collective("all_reduce", f"b{n}", "ddp", (f"g{n}",)) for n in (0, 1))
    steps = [loop("a", "x", ["g0"]), loop("b", "x", ["g1"]), one, two, Wait("b0", ("g0",)), Wait("b1", ("g1",))]
    assert [sorted(e) for e in edges(steps)] == [[], [], [0], [1, 2], [2], [3]]


def test_what_uses_a_size_follows_the_call_that_tells_it():
    """A loop over a late size may read nothing of what told it."""
    u0 = var("u0")
    count = Loop("count", (u0,), (), (IndexOf(I0, "int64"),), (Store("n", I0, 0),))
    taken = Extern("aten.odd.default", (u0,), (), ("t",), "alloc")
    steps = [loop("a", "x", "a"), call("f", "a", effect=True, tells=("u0",)), count, taken]
    assert [sorted(e) for e in edges(steps)] == [[], [0], [1], [1]]
    assert respects([steps[0], steps[1], taken, count], steps) and not respects([count, *steps[:2], taken], steps)


def test_calls_with_effects_keep_their_order():
    steps = [call("a", effect=True), call("b"), call("c", effect=True)]
    assert [sorted(e) for e in edges(steps)] == [[], [], [0]]


def test_respects():
    a, b, c = loop("a", "x", "a"), loop("b", "x", "b"), loop("c", "ab", "c")
    assert respects([b, a, c], [a, b, c])
    assert not respects([a, c, b], [a, b, c])
    assert not respects([a, c], [a, b, c])
    assert not respects([a, b, c, c], [a, b, c])
    draw = call([None], effect=True)  # equal steps are told apart by their order
    assert respects([draw, a, draw], [draw, draw, a])


def test_dead_steps_and_buffers_go():
    steps = [loop("a", "x", "a"), loop("b", "a", "b"), loop("c", "x", "c"), loop("d", "c", "d")]
    after = remove_dead_steps(program("xy", "b", steps))
    assert [s.name for s in after.steps] == ["a", "b"]
    assert set(after.table) == {"x", "y", "a", "b"}


def test_what_is_observable_stays():
    bucket = (Collective("all_reduce", "b0", "ddp", ("g",)), Wait("b0", ("g",)))
    steps = [
        loop("a", "x", "a"),
        call("a", "a", mode="mutate"),
        call([None], effect=True),
        loop("g", "x", "g"),
        *bucket,
        loop("m", "x", "x"),
    ]
    before = program("x", "", steps)
    assert remove_dead_steps(before) == before


def test_unused_results_become_none():
    before = program("x", "b", [call("ab", "x"), call("cd", "x")])
    (step,) = remove_dead_steps(before).steps
    assert step.outs == (None, "b")
    assert set(remove_dead_steps(before).table) == {"x", "b"}


@pytest.mark.parametrize("seed", range(20))
def test_dropping_keeps_outputs(seed):
    before, inputs = random_program(seed)
    before = Program(**{f: getattr(before, f) for f in before.__dataclass_fields__} | {"outputs": before.outputs[:1]})
    after = remove_dead_steps(before)
    verify(after)
    assert (interpret(before, inputs)[0] == interpret(after, inputs)[0]).all()
    assert remove_dead_steps(after) == after


def test_thousands_of_steps_take_well_under_a_millisecond_each():
    steps = [loop(f"k{n}", ["x", f"a{n}"], [f"a{n + 1}"]) for n in range(3000)]
    started = time.process_time()
    edges(steps)
    assert time.process_time() - started < 1.0
