"""One small valid program, and for each rule a way to break it."""

from dataclasses import replace

import pytest

from dcompile.errors import VerifyError
from dcompile.ir import verify as verify_module
from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.index import ZERO, Index, bounds, flatten, floordiv, modulo, var
from dcompile.ir.nodes import (
    Apply,
    Collective,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Program,
    Reduce,
    Scan,
    Store,
    View,
    Wait,
)
from dcompile.ir.verify import verify

I0, J0 = var("i0"), var("j0")
AT = flatten((I0, J0), (8, 1))


def buffer(name, dtype="float32", shape=(4, 8), **more):
    return Buffer(name, dtype, shape, (shape[-1], 1) if len(shape) == 2 else (1,) * len(shape), **more)


def view(name, shape=(4, 8), strides=(8, 1), offset=0):
    return View(name, shape, strides, offset)


def loop(body, *stores, outer=(4,), inner=(8,)):
    return Loop("k", outer, inner, tuple(body), stores)


def double(source, target):
    return loop([Load(source, AT, "float32"), Apply("add", (0, 0), "float32")], Store(target, AT, 1))


def program(*steps, outputs=("y",), buffers=(), **more):
    names = {b.name: b for b in buffers}
    used = {n for s in steps for n in s.reads | s.writes} | {"x"}
    table = tuple(names.get(n, buffer(n)) for n in sorted(used | names.keys()))
    return Program("p", ("x",), tuple(view(n) for n in outputs), table, tuple(steps), **more)


def rejects(broken, words):
    with pytest.raises(VerifyError, match=words):
        verify(broken)


def test_a_good_program():
    verify(program(double("x", "t"), double("t", "y")))


def test_what_was_verified_before_is_not_gone_through_again(monkeypatch):
    asked = []
    own = verify_module.check_loop
    monkeypatch.setattr(verify_module, "check_loop", lambda loop, *rest: (asked.append(loop), own(loop, *rest)))
    first, second, third = double("x", "t"), double("t", "y"), double("t", "z")
    before = program(first, second)
    verify(before)
    verify(program(first, second, third, outputs=("y", "z")), before=before)
    assert asked == [first, second, third]
    verify(replace(before, name="q"), before=before)
    assert len(asked) == 3
    monkeypatch.setattr(verify_module, "_verify", lambda *_: pytest.fail("it is what it was"))
    verify(replace(before), before=before)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (lambda p: replace(p, buffers=tuple(replace(b, shape=(4, 7)) for b in p.buffers)), "outside x"),
        (lambda p: replace(p, buffers=tuple(replace(b, dtype="int32") for b in p.buffers)), "loads x, int32"),
        (lambda p: replace(p, steps=p.steps[::-1]), "t is read before it is written"),
        (lambda p: replace(p, buffers=p.buffers[1:]), "x"),
        (lambda p: replace(p, outputs=(view("z"),)), "unknown buffer z"),
    ],
)
def test_what_becomes_wrong_around_a_step_is_noticed(after, words):
    """Though the step itself is as it was when it was verified."""
    before = program(double("x", "t"), double("t", "y"))
    verify(before)
    with pytest.raises(VerifyError, match=words):
        verify(after(before), before=before)


def test_sizes_that_are_known_no_longer_are_noticed():
    rows = buffer("t", shape=(var("s0"), 8))
    step = loop([Load("x", AT, "float32")], Store("t", AT, 0), outer=(var("s0"),))
    whole = View("t", (var("s0"), 8), (8, 1))
    before = replace(program(step, buffers=[rows, buffer("x", shape=(var("s0"), 8))]), outputs=(whole,))
    verify(before)
    fixed = tuple(replace(b, shape=(4, 8)) if b.name == "x" else b for b in before.buffers)
    with pytest.raises(VerifyError, match="unknown symbol"):
        verify(replace(before, buffers=fixed), before=before)


def test_the_message_shows_the_step_and_its_neighbours():
    steps = [double("x", "a"), double("a", "b"), double("nowhere", "c"), double("b", "d"), double("d", "y")]
    with pytest.raises(VerifyError) as caught:
        verify(program(*steps))
    text = str(caught.value)
    assert "p: nowhere is read before it is written" in text
    assert ">  2 loop k" in text and "   1 loop k" in text and "   3 loop k" in text
    assert "   0 loop" not in text and "   4 loop" not in text


X = Load("x", AT, "float32")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([Apply("add", (0, 1), "float32"), X], "not earlier"),
        ([X, Apply("add", (0, -1), "float32")], "not earlier"),
        ([X, Apply("frobnicate", (0,), "float32")], "unknown operation"),
        ([X, Apply("add", (0,), "float32")], "takes 2 arguments"),
        ([X, Apply("add", (0, 0), "float64")], "gives float32"),
        ([X, Apply("lt", (0, 0), "float32")], "gives bool"),
        ([X, Apply("and", (0, 0), "float32")], "not for float32"),
        ([X, Const(1, "int64"), Apply("add", (0, 1), "float32")], "mixes"),
        ([X, Apply("cast", (0,), "int32"), Apply("exp", (1,), "int32")], "not for int32"),
        ([X, Apply("where", (0, 0, 0), "float32")], "where"),
        ([X, Apply("cast", (0,), "bfloat16"), Apply("add", (1, 1), "bfloat16")], "16 bits"),
        ([X, Apply("cast", (0,), "float16"), Reduce("sum", 1, "float16")], "cast to float32 first"),
        ([Const(1.0, "bfloat16")], "make it float32"),
        ([X, Apply("cast", (0,), "complex64")], "cannot compute complex64"),
        ([X, Reduce("median", 0, "float32")], "unknown reduction"),
        ([X, Reduce("argmax", 0, "float32")], "gives int64"),
        ([X, Reduce("sum", 0, "float64")], "cannot give"),
        ([X, Reduce("any", 0, "float32")], "cannot give"),
        ([X, Scan("median", 0, "float32")], "unknown scan"),
        ([X, Scan("sum", 0, "float64")], "in a scan"),
        ([X, Apply("lt", (0, 0), "bool"), Scan("sum", 1, "bool")], "in a scan"),
        ([X, Apply("cast", (0,), "bfloat16"), Scan("sum", 1, "bfloat16")], "cast to float32 first"),
        ([Load("z", AT, "float32")], "z is read before"),
        ([Load("x", AT, "float64")], "as float64"),
        ([X, Load("x", AT, "float32", mask=0)], "not a truth value"),
        ([Load("x", AT + var("i1"), "float32")], "unknown i1"),
        ([Load("x", var("v0"), "float32")], "unknown v0"),
        ([X, Load("x", var("v0"), "float32")], "not an integer"),
        ([Load("x", AT + 1, "float32")], "outside x of 32"),
        ([Load("x", AT - 1, "float32")], "runs from -1"),
        ([IndexOf(I0, "float32")], "index in float32"),
    ],
)
def test_values(body, words):
    number = len(body)
    extra = [X, Apply("neg", (number,), "float32")]  # so that the loop stores something valid in any case
    rejects(program(loop([*body, *extra], Store("y", AT, number + 1))), words)


def test_a_scan_needs_a_row():
    body = [Load("x", I0, "float32"), Scan("sum", 0, "float32")]
    rejects(program(loop(body, Store("y", I0, 1), outer=(32,), inner=())), "needs an inner space")


def test_masked_loads_may_point_outside():
    low = [IndexOf(J0 - 1), Const(0, "int64"), Apply("ge", (0, 1), "bool")]
    verify(program(loop([*low, Load("x", AT - 1, "float32", mask=2)], Store("y", AT, 3))))


def test_bounds_that_the_algebra_cannot_see_are_looked_at():
    """6*(j0//6) + j0%3 reaches 7 for j0 < 8; the bounds of its terms add up to 8."""
    index = 8 * I0 + 6 * floordiv(J0, 6, {"j0": 8}) + modulo(J0, 3, {"j0": 8})
    assert bounds(index, {"i0": 4, "j0": 8}) == (0, 32)
    verify(program(loop([Load("x", index, "float32")], Store("y", AT, 0))))
    rejects(program(loop([Load("x", index + 1, "float32")], Store("y", AT, 0))), "outside x")


def test_runtime_integers():
    body = [Load("n", J0, "int64"), Load("x", 8 * I0 + var("v0"), "float32")]
    step = loop(body, Store("y", AT, 1))
    verify(replace(program(step, buffers=[buffer("n", "int64", (8,))]), inputs=("x", "n")))


@pytest.mark.parametrize(
    ("stores", "words"),
    [
        ([], "stores nothing"),
        ([Store("z", AT, 0)], "unknown buffer"),
        ([Store("y", AT, 5)], "unknown value 5"),
        ([Store("y", AT, 1)], "bool into float32"),
        ([Store("y", AT, 0, "mean")], "unknown mode"),
        ([Store("y", AT, 0, "argmax")], "unknown mode"),
        ([Store("y", I0, 0)], "again for every j0"),
        ([Store("y", J0, 0)], "again for every i0"),
        ([Store("y", AT + 8, 0)], "outside y"),
        ([Store("y", 4 * I0 + J0, 0)], "twice"),
        ([Store("y", AT, 0), Store("y", AT, 0)], "twice"),
        ([Store("y", AT, 0), Store("y", AT, 0, "sum")], "more than one way"),
        ([Store("y", AT + var("v2"), 0)], "only at run time"),
    ],
)
def test_stores(stores, words):
    body = [X, Apply("isnan", (0,), "bool"), IndexOf(I0)]
    rejects(Program("p", ("x",), (), (buffer("x"), buffer("y")), (loop(body, *stores),)), words)


def test_part_of_a_buffer_is_not_enough_unless_it_is_an_input():
    body = [X, Apply("neg", (0,), "float32")]
    half = loop(body, Store("y", AT, 1), outer=(2,))
    rejects(program(half), "16 of the 32")
    verify(program(replace(half, stores=(Store("x", AT, 1),)), outputs=()))
    both = loop(body, Store("y", AT, 0), Store("y", AT + 16, 1), outer=(2,))
    verify(program(both))  # a concatenation in one loop


def test_a_loop_without_elements_writes_nothing_twice():
    empty = loop([X], Store("y", J0, 0), inner=(0,))
    verify(program(empty, buffers=[buffer("y", shape=(4, 0))], outputs=()))


def test_one_number_may_be_written_to_an_input_again():
    """`zero_` of an input that looks at its elements twice."""
    row = Apply("cast", (1,), "float32")
    one = loop([Const(2.0, "float32"), IndexOf(I0), row], Store("x", I0 + J0, 0))
    verify(program(one, outputs=()))
    rejects(program(replace(one, stores=(Store("x", I0 + J0, 2),)), outputs=()), "twice")
    rejects(program(replace(one, stores=(Store("y", I0 + J0, 0), Store("y", AT, 0)))), "twice")


def test_column_reductions_and_scatter():
    columns = loop([X], Store("y", J0, 0, "sum"))
    verify(program(columns, buffers=[buffer("y", shape=(8,))], outputs=()))
    scatter = loop([X, IndexOf(J0)], Store("y", var("v1"), 0, "sum"))
    verify(program(scatter, buffers=[buffer("y", shape=(8,))], outputs=()))
    cast = loop([X, Apply("cast", (0,), "bfloat16")], Store("y", J0, 1, "sum"))
    rejects(program(cast, buffers=[buffer("y", "bfloat16", (8,))], outputs=()), "cast to float32 first")


# --- order ---


def test_one_writer():
    rejects(program(double("x", "y"), double("x", "y")), "second writer")
    call = Extern("aten.mul_.Scalar", (view("y"), 2), (), ("y",), "mutate")
    verify(program(double("x", "y"), call))


def test_reading_before_writing():
    rejects(program(double("t", "y"), double("x", "t")), "t is read before it is written")
    rejects(program(double("x", "t"), outputs=("y",), buffers=[buffer("y")]), "output y is never written")


def test_overwriting_an_input():
    verify(program(double("x", "y"), double("x", "x")))
    rejects(program(double("x", "x"), double("x", "y")), "after it is overwritten")
    transposed = loop([Load("x", flatten((I0, J0), (1, 4)), "float32")], Store("x", AT, 0))
    rejects(program(transposed, outputs=()), "still to be read")
    row = loop([X, Reduce("sum", 0, "float32"), Apply("div", (0, 1), "float32")], Store("x", AT, 2))
    verify(program(row, outputs=()))
    early = [X, Apply("neg", (0,), "float32"), Reduce("sum", 0, "float32"), Apply("div", (0, 2), "float32")]
    rejects(program(loop(early, Store("x", AT, 1), Store("y", AT, 3))), "still to be read")
    rejects(program(double("x", "t"), double("t", "t"), outputs=()), "read by the step that writes")


def collective(name="g", bucket="b0"):
    return Collective("all_reduce", bucket, "ddp", (name,)), Wait(bucket, (name,))


def test_collectives():
    start, wait = collective()
    verify(program(double("x", "g"), start, double("x", "y"), wait))
    rejects(program(double("x", "g"), start, double("g", "y"), wait), "touched while b0 is in flight")
    rejects(program(double("x", "g"), start, double("x", "y")), "nothing waits for b0")
    rejects(program(double("x", "g"), wait, start), "not in flight")
    rejects(program(double("x", "g"), start, wait, start, wait, outputs=()), "started a second time")
    rejects(program(double("x", "g"), start, wait, wait, outputs=()), "not in flight")
    rejects(program(start, wait, double("x", "g"), outputs=()), "sent before it is written")
    rejects(program(double("x", "g"), start, Wait("b0", ("x",)), outputs=()), "other buffers")
    bucket = Bucket("b1", "float32", "cpu", "ddp", (0,), ("g",), (0,), 32)
    rejects(program(double("x", "g"), start, wait, outputs=(), buckets=(bucket,)), "unknown bucket b0")


# --- library calls, outputs, table ---


def test_library_calls():
    call = Extern("aten.mm.default", (view("x"), view("x", (8, 4), (1, 8))), (), ("y",), "out")
    small = [buffer("y", shape=(4, 4))]
    good = replace(program(call, buffers=small), outputs=(view("y", (4, 4), (4, 1)),))
    verify(good)
    rejects(program(replace(call, args=(view("x", offset=1),)), buffers=small, outputs=()), "outside x")
    rejects(program(replace(call, args=(view("z"),)), buffers=small, outputs=()), "z is read before")
    rejects(program(replace(call, outs=(None,)), outputs=()), "drop a result")
    rejects(program(replace(call, outs=("y", "y")), buffers=small, outputs=()), "one result twice")
    rejects(program(replace(call, outs=("x",)), outputs=()), "reads what it writes")
    rejects(program(replace(call, mode="mutate"), buffers=small, outputs=()), "not an argument")
    rejects(program(replace(call, args=(view("x"), (var("s3"),))), buffers=small, outputs=()), "unknown symbol")


def test_outputs_and_gradients():
    good = program(double("x", "y"))
    rejects(replace(good, outputs=(view("y", offset=1),)), "outside y")
    rejects(replace(good, outputs=(view("nothing"),)), "unknown buffer")
    rejects(replace(good, outputs=(var("s0"),)), "unknown symbol")
    rejects(replace(good, grads=((3, 0),)), "gradient of parameter 0")
    verify(replace(good, inputs=("x", "s0"), outputs=(var("s0"), 3, None, view("y"))))


def test_table():
    good = program(double("x", "y"))
    rejects(replace(good, buffers=(*good.buffers, buffer("y"))), "one name")
    rejects(replace(good, inputs=("x", "x")), "listed twice")
    rejects(replace(good, buffers=(buffer("x"), replace(buffer("y"), dtype="float7"))), "unknown dtype")
    rejects(replace(good, buffers=(buffer("x"), replace(buffer("y"), strides=(1,)))), r"y has \(4, 8\) but")


def test_symbolic_sizes():
    s0 = var("s0")
    shape = Buffer("x", "float32", (s0, 8), (8, 1))
    step = replace(double("x", "y"), outer=(s0,))
    out = View("y", (s0, 8), (8, 1))
    verify(Program("p", ("x",), (out,), (shape, replace(shape, name="y")), (step,)))
    rejects(Program("p", ("x",), (), (shape, replace(shape, name="y")), (replace(step, outer=(var("s1"),)),)), "symbol")


def test_a_stride_may_be_a_symbol_where_all_sizes_of_a_loop_are_numbers():
    s0 = var("s0")
    given, apart = Buffer("x", "float32", (s0, 8), (8, 1)), Buffer("y", "float32", (4, 8), (s0, 1))
    step = loop([Const(0.0, "float32")], Store("y", I0 * s0 + J0, 0))
    verify(Program("p", ("x",), (View("y", (4, 8), (s0, 1)),), (given, apart), (step,)))


# --- memory ---


def planned(**places):
    """x -> a -> b -> y with the given offsets in the arena."""
    steps = (
        double("x", "a"),
        double("x", "b"),
        loop([Load("a", AT, "float32"), Load("b", AT, "float32"), Apply("add", (0, 1), "float32")], Store("y", AT, 2)),
    )
    buffers = [buffer("x", storage="input"), buffer("y", storage="out")]
    buffers += [buffer(n, storage="arena", offset=at) for n, at in places.items()]
    return Program("p", ("x",), (view("y"),), tuple(buffers), steps, arena_bytes=256)


def test_a_late_size_is_used_behind_the_call_that_tells_it():
    u0 = var("u0")
    told = Extern("aten.nonzero.default", (view("x"),), (), ("found",), "alloc", tells=("u0",))
    count = Loop("count", (u0,), (), (IndexOf(I0, "int64"),), (Store("n", I0, 0),))
    shapes = (buffer("found", "int64", (u0, 2)), buffer("n", "int64", (u0,)))
    good = program(told, count, outputs=("n",), buffers=shapes)
    good = replace(good, outputs=(View("n", (u0,), (1,)),))
    verify(good)
    with pytest.raises(VerifyError, match="u0 is used before a library call tells it"):
        verify(replace(good, steps=(count, told)))


def test_memory():
    verify(planned(a=0, b=128))
    rejects(planned(a=0, b=64), "alive together and overlap")
    rejects(planned(a=0, b=0), "alive together and overlap")
    rejects(planned(a=0, b=192), "outside arena")
    rejects(planned(a=0, b=129), "not on an element")
    good = planned(a=0, b=128)

    def put(name, storage):
        return replace(good, buffers=tuple(replace(b, storage=storage) if b.name == name else b for b in good.buffers))

    rejects(put("a", None), "no place")
    rejects(put("y", "arena"), "output y lies in the arena")
    rejects(put("x", "arena"), "x cannot lie in arena")
    rejects(put("a", "input"), "a cannot lie in input")


def test_what_a_fallback_allocates_may_be_a_view_of_its_argument():
    """x -> a -> t (a fallback's result) -> y, with b written while t may still look at a."""
    fallback = Extern("aten.odd.default", (view("a"),), (), ("t",), "alloc", fallback=True)
    buffers = [buffer("x", storage="input"), buffer("t", storage="library")]
    buffers += [buffer(n, storage="arena") for n in "ab"] + [buffer(n, storage="out") for n in "yz"]
    steps = (double("x", "a"), fallback, double("x", "b"), double("b", "z"), double("t", "y"))
    broken = Program("p", ("x",), (view("y"), view("z")), tuple(buffers), steps, arena_bytes=128)
    rejects(broken, "a and b are alive together")
    verify(replace(broken, steps=(*steps[:1], replace(fallback, fallback=False), *steps[2:])))


def test_in_place_is_allowed_only_element_by_element():
    def chain(step):
        buffers = (buffer("x", storage="input"), buffer("y", storage="out"))
        buffers += tuple(buffer(n, storage="arena") for n in "ab")
        steps = (double("x", "a"), step, double("b", "y"))
        return Program("p", ("x",), (view("y"),), buffers, steps, arena_bytes=128)

    verify(chain(double("a", "b")))
    flipped = loop([Load("a", 31 - AT, "float32")], Store("b", AT, 0))
    rejects(chain(flipped), "overlap")
    twice = loop(
        [Load("a", AT, "float32"), Load("a", 31 - AT, "float32"), Apply("add", (0, 1), "float32")], Store("b", AT, 2)
    )
    rejects(chain(twice), "overlap")


def test_scalars_have_an_index_without_variables():
    one = Loop("k", (), (), (Const(1.0, "float32"),), (Store("s", ZERO, 0),))
    assert isinstance(ZERO, Index)
    verify(Program("p", (), (View("s", (), ()),), (Buffer("s", "float32", (), ()),), (one,)))


def test_a_step_uses_memory_of_one_device():
    elsewhere = buffer("y", device="cuda")
    rejects(program(double("x", "y"), buffers=(elsewhere,)), "one step uses memory of cpu and cuda")
    copied = Extern("aten._to_copy.default", (view("x"),), (), ("y",), mode="alloc")
    verify(program(copied, buffers=(elsewhere,)))
    checked = Extern("dcompile.check_bounds", (view("x"), 0, 4), (), ("y",), mode="alloc", effect=True)
    rejects(program(checked, buffers=(elsewhere,)), "one step uses memory of cpu and cuda")
