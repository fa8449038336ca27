"""The interpreter against NumPy written by hand, and against torch where torch decides what is right."""

import numpy as np
import pytest
import torch

from dcompile.ir.index import ZERO, as_index, contiguous_strides, flatten, var
from dcompile.ir.interpret import GARBAGE, cast, execute, from_bfloat16, interpret, to_bfloat16
from dcompile.ir.nodes import (
    Apply,
    Bucket,
    Buffer,
    Collective,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Program,
    Reduce,
    Store,
    Verbatim,
    View,
    Wait,
)
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

I0, J0 = var("i0"), var("j0")
AT = flatten((I0, J0), (5, 1))
X = np.arange(20, dtype=np.float32).reshape(4, 5) - 7


def buffer(name, shape=(4, 5), dtype="float32", **more):
    return Buffer(name, dtype, shape, contiguous_strides(shape), **more)


def run(body, *stores, outs, inputs=None, outer=(4,), inner=(5,), dtypes=("float32",)):
    """One loop; `outs` are shapes of y0, y1, ... ."""
    inputs = {"x": X} if inputs is None else inputs
    names = [f"y{n}" for n in range(len(outs))]
    dtypes = dtypes * len(outs) if len(dtypes) == 1 else dtypes
    table = [buffer(n, v.shape, str(v.dtype)) for n, v in inputs.items()]
    table += [buffer(n, shape, dtype) for n, shape, dtype in zip(names, outs, dtypes, strict=True)]
    views = tuple(View(n, shape, contiguous_strides(shape)) for n, shape in zip(names, outs, strict=True))
    program = Program("p", tuple(inputs), views, tuple(table), (Loop("k", outer, inner, tuple(body), stores),))
    verify(program)
    return interpret(program, inputs)


def load(index=AT, name="x", dtype="float32", mask=None):
    return Load(name, index, dtype, mask)


def test_softmax_in_one_loop():
    body = [load(), Reduce("max", 0, "float32"), Apply("sub", (0, 1), "float32"), Apply("exp", (2,), "float32")]
    body += [Reduce("sum", 3, "float32"), Apply("div", (3, 4), "float32")]
    y, m = run(body, Store("y0", AT, 5), Store("y1", I0, 1), outs=[(4, 5), (4,)])
    e = np.exp(X - X.max(1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(m, X.max(1))


def test_transposed_broadcast_and_flattened_indices():
    (y,) = run(
        [load(flatten((J0, I0), (5, 1)))],
        Store("y0", flatten((I0, J0), (4, 1)), 0),
        outs=[(5, 4)],
        outer=(5,),
        inner=(4,),
    )
    np.testing.assert_array_equal(y, X.T)
    (y,) = run([load(I0 * 5)], Store("y0", AT, 0), outs=[(4, 5)])
    np.testing.assert_array_equal(y, np.broadcast_to(X[:, :1], (4, 5)))
    (y,) = run([load(19 - J0)], Store("y0", J0, 0), outs=[(20,)], outer=(), inner=(20,))
    np.testing.assert_array_equal(y, X.reshape(-1)[::-1])


def test_masked_load_is_zero_where_false():
    body = [IndexOf(J0 - 1), Const(0, "int64"), Apply("ge", (0, 1), "bool"), load(AT - 1, mask=2)]
    (y,) = run(body, Store("y0", AT, 3), outs=[(4, 5)])
    np.testing.assert_array_equal(y, np.pad(X, ((0, 0), (1, 0)))[:, :5])


def test_an_unmasked_load_outside_is_an_error():
    body = [load(name="n", index=I0, dtype="int64"), load(J0 + 5 * var("v0"))]
    with pytest.raises(IndexError, match=r"x\[0\.\.29\] is outside its 20 elements"):
        run(body, Store("y0", AT, 1), outs=[(4, 5)], inputs={"x": X, "n": np.array([0, 1, 2, 5])})


def test_positions_within_are_themselves_and_others_an_error():
    body = [
        load(name="n", index=I0, dtype="int64"), Const(0, "int64"), Const(4, "int64"),
        Apply("within", (0, 1, 2), "int64"), load(J0 + 5 * var("v3")),
    ]  # fmt: skip
    n = np.array([2, 0, 3, 1])
    (y,) = run(body, Store("y0", AT, 4), outs=[(4, 5)], inputs={"x": X, "n": n})
    np.testing.assert_array_equal(y, X[n])
    for wrong in (4, -1):
        with pytest.raises(IndexError, match="outside of 0 to 3"):
            run(body, Store("y0", AT, 4), outs=[(4, 5)], inputs={"x": X, "n": np.array([2, 0, wrong, 1])})


def test_gather_and_scatter_at_run_time():
    n = np.array([2, 0, 2, 1])
    gather = [load(name="n", index=I0, dtype="int64"), load(J0 + 5 * var("v0"))]
    (y,) = run(gather, Store("y0", AT, 1), outs=[(4, 5)], inputs={"x": X, "n": n})
    np.testing.assert_array_equal(y, X[n])
    scatter = [load(name="n", index=I0, dtype="int64"), load()]
    (y,) = run(scatter, Store("y0", J0 + 5 * var("v0"), 1, "sum"), outs=[(3, 5)], inputs={"x": X, "n": n})
    expected = np.zeros((3, 5), np.float32)
    np.add.at(expected, n, X)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("mode", "reference"), [("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)])
def test_column_reduction(mode, reference):
    columns, total = run([load()], Store("y0", J0, 0, mode), Store("y1", ZERO, 0, mode), outs=[(5,), ()])
    np.testing.assert_allclose(columns, reference(X, axis=0))
    np.testing.assert_allclose(total, reference(X))


def test_a_row_value_counts_once_per_row_in_a_row_store_and_once_per_element_in_an_element_store():
    body = [load(I0, "r"), load()]
    rows = Store("y0", ZERO, 0, "sum")
    elements = Store("y1", J0, 0, "sum")
    r = np.arange(4, dtype=np.float32)
    once, each = run(body, rows, elements, outs=[(), (5,)], inputs={"x": X, "r": r})
    assert once == r.sum()
    np.testing.assert_array_equal(each, np.full(5, r.sum()))


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "argmax", "argmin"])
def test_row_reductions_agree_with_torch(op):
    x = np.array([[3, 1, 3, 0, 0], [1, np.nan, 2, np.nan, 5], [-np.inf, 0, np.inf, 0, 0], [7, 7, 7, 7, 7]], np.float32)
    dtype = "int64" if op.startswith("arg") else "float32"
    (y,) = run([load(), Reduce(op, 0, dtype)], Store("y0", I0, 1), outs=[(4,)], inputs={"x": x}, dtypes=(dtype,))
    name = {"max": "amax", "min": "amin"}.get(op, op)
    np.testing.assert_array_equal(y, getattr(torch, name)(torch.tensor(x), dim=1).numpy())


def test_positions_count_the_inner_space_row_major():
    x = np.zeros((2, 3, 4), np.int32)
    x[0, 1, 2] = x[0, 2, 0] = x[1, 2, 3] = 9
    at = flatten((I0, J0, var("j1")), (12, 4, 1))
    body = [load(at, dtype="int32"), Reduce("argmax", 0, "int64")]
    (y,) = run(body, Store("y0", I0, 1), outs=[(2,)], inputs={"x": x}, outer=(2,), inner=(3, 4), dtypes=("int64",))
    assert y.tolist() == [6, 11]


def test_any_all_and_a_reduction_of_what_does_not_vary():
    body = [
        load(),
        Const(0.0, "float32"),
        Apply("gt", (0, 1), "bool"),
        Reduce("any", 2, "bool"),
        Reduce("all", 2, "bool"),
    ]
    body += [Reduce("sum", 1, "float32"), load(I0 * 5), Reduce("sum", 6, "float32")]
    stores = [Store(f"y{n}", I0, ref) for n, ref in enumerate((3, 4, 7))]
    some, every, five = run(body, *stores, outs=[(4,)] * 3, dtypes=("bool", "bool", "float32"))
    np.testing.assert_array_equal(some, (X > 0).any(1))
    np.testing.assert_array_equal(every, (X > 0).all(1))
    np.testing.assert_array_equal(five, 5 * X[:, 0])


def test_empty_spaces():
    empty = np.zeros((4, 0), np.float32)
    body = [load(I0 * 0 + J0), Reduce("sum", 0, "float32"), Reduce("max", 0, "float32")]
    total, most = run(body, Store("y0", I0, 1), Store("y1", I0, 2), outs=[(4,)] * 2, inputs={"x": empty}, inner=(0,))
    assert total.tolist() == [0] * 4 and most.tolist() == [-np.inf] * 4
    (y,) = run([load()], Store("y0", J0, 0, "sum"), outs=[(5,)], inputs={"x": np.zeros((0, 5), np.float32)}, outer=(0,))
    assert y.tolist() == [0] * 5


# --- numbers ---


def test_bfloat16_rounds_as_torch():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 50000, dtype=np.uint32)
    bits = np.concatenate([bits, np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0x7F800001], np.uint32)])
    x = bits.view(np.float32)
    expected = torch.tensor(x).bfloat16()
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(to_bfloat16(x)[finite], expected.view(torch.int16).numpy().view(np.uint16)[finite])
    assert np.isnan(from_bfloat16(to_bfloat16(x))[~finite]).all()


CASTS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("source", CASTS)
@pytest.mark.parametrize("target", CASTS)
def test_casts_agree_with_torch(source, target):
    values = torch.tensor([0, 1, 2, 3, 100, 7.5, 0.3, 1.0039063] + ([-1, -2.5, -100] if target != "uint8" else []))
    x = values.to(getattr(torch, source))
    held = x.float().numpy() if source == "bfloat16" else x.numpy()
    expected = x.to(getattr(torch, target))
    ours = cast(held, target)
    np.testing.assert_array_equal(ours, expected.float().numpy() if target == "bfloat16" else expected.numpy())


def test_integers_wrap_around():
    x = np.array([[127, -128, 100, 5, 2]], np.int8)
    body = [
        load(J0, dtype="int8"),
        Apply("add", (0, 0), "int8"),
        Apply("mul", (0, 0), "int8"),
        Apply("neg", (0,), "int8"),
    ]
    stores = [Store(f"y{n}", J0, n + 1) for n in range(3)]
    y = run(body, *stores, outs=[(5,)] * 3, inputs={"x": x}, outer=(), dtypes=("int8",))
    t = torch.tensor(x[0])
    for ours, theirs in zip(y, (t + t, t * t, -t), strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy())


# --- memory, calls, programs ---


def copy(source, target, source_at=AT, target_at=AT, dtype="float32"):
    return Loop("k", (4,), (5,), (Load(source, source_at, dtype),), (Store(target, target_at, 0),))


def test_buffers_are_flat_elements():
    """A transposed input, a padded intermediate, and an output that views part of it."""
    table = (Buffer("x", "float32", (4, 5), (1, 4)), Buffer("t", "float32", (4, 5), (8, 1)))
    step = copy("x", "t", flatten((I0, J0), (1, 4)), flatten((I0, J0), (8, 1)))
    program = Program("p", ("x",), (View("t", (2, 2), (16, 2), 1),), table, (step,))
    verify(program)
    np.testing.assert_array_equal(interpret(program, {"x": X})[0], X[::2, 1:4:2])


def test_bfloat16_buffers():
    table = tuple(buffer(n, dtype="bfloat16") for n in "xy")
    program = Program("p", ("x",), (View("y", (4, 5), (5, 1)),), table, (copy("x", "y", dtype="bfloat16"),))
    (y,) = interpret(program, {"x": X + 0.001})
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, torch.tensor(X + 0.001).bfloat16().float().numpy())


def test_memory_starts_as_garbage_and_overlap_shows():
    """Two buffers wrongly in one place: the second write is seen through the first."""
    table = (buffer("x", storage="input"), buffer("y", storage="out"))
    table += tuple(buffer(n, storage="arena") for n in "ab")
    double = Loop("d", (4,), (5,), (Load("x", AT, "float32"), Apply("add", (0, 0), "float32")), (Store("b", AT, 1),))
    steps = (copy("x", "a"), double, copy("a", "y"))
    program = Program("p", ("x",), (View("y", (4, 5), (5, 1)),), table, steps, arena_bytes=80)
    np.testing.assert_array_equal(interpret(program, {"x": X})[0], 2 * X)
    assert interpret(Program("p", (), (View("g", (1,), (1,)),), (buffer("g", (1,), "uint8"),), ()), {})[0] == GARBAGE


def test_mutation_shows_in_execute_and_leaves_the_arrays_alone():
    negate = Loop("k", (4,), (5,), (Load("x", AT, "float32"), Apply("neg", (0,), "float32")), (Store("x", AT, 1),))
    program = Program("p", ("x",), (), (buffer("x"),), (negate,))
    x = X.copy()
    np.testing.assert_array_equal(execute(program, {"x": x}).inputs["x"], -X)
    np.testing.assert_array_equal(x, X)


def test_library_calls():
    table = (buffer("x"), buffer("m", (4, 4)), buffer("s", (4,)), buffer("i", (4,), "int64"))
    full, turned = View("x", (4, 5), (5, 1)), View("x", (5, 4), (1, 5))
    row = View("x", (5,), (1,), 5)
    steps = (
        Extern("aten.mm.default", (full, turned), (), ("m",), "out"),
        Extern("aten.max.dim", (View("m", (4, 4), (4, 1)), 1), (("keepdim", Verbatim("False")),), ("s", "i"), "alloc"),
        Extern("aten.zero_.default", (row,), (), ("x",), "mutate"),
    )
    views = (View("m", (4, 4), (4, 1)), View("s", (4,), (1,)), View("i", (4,), (1,)), full, as_index(3), None, 2.5)
    program = Program("p", ("x",), views, table, steps)
    verify(program)
    externs = {
        "aten.mm.default": np.matmul,
        "aten.max.dim": lambda x, dim, keepdim: (x.max(dim), x.argmax(dim)),
        "aten.zero_.default": np.zeros_like,
    }
    m, s, i, x, three, none, scalar = interpret(program, {"x": X}, externs)
    np.testing.assert_array_equal(m, X @ X.T)
    np.testing.assert_array_equal(s, (X @ X.T).max(1))
    np.testing.assert_array_equal(i, (X @ X.T).argmax(1))
    np.testing.assert_array_equal(x, np.concatenate([X[:1], np.zeros((1, 5)), X[2:]]))
    assert (three, none, scalar) == (3, None, 2.5)
    with pytest.raises(AssertionError, match=r"no meaning for aten\.mm\.default"):
        interpret(program, {"x": X})


def test_collectives():
    bucket = Bucket("b0", "float32", "cpu", "ddp", (0,), ("g",), (0,), 20)
    steps = (copy("x", "g"), Collective("all_reduce", "b0", "ddp", ("g",)), Wait("b0", ("g",)))
    table = (buffer("x"), buffer("g", storage="bucket:b0"))
    program = Program("p", ("x",), (View("g", (4, 5), (5, 1)),), table, steps, buckets=(bucket,))
    np.testing.assert_array_equal(interpret(program, {"x": X})[0], X)
    mean = {"all_reduce": lambda arrays: [a / 2 for a in arrays]}
    np.testing.assert_array_equal(interpret(program, {"x": X}, mean)[0], X / 2)


def test_symbolic_sizes_come_from_arguments_or_shapes():
    s0 = var("s0")
    table = tuple(Buffer(n, "float32", (s0, 5), (5, 1)) for n in "xy")
    step = Loop("k", (s0,), (5,), (Load("x", AT, "float32"),), (Store("y", AT, 0),))
    for inputs in (("x",), ("s0", "x")):
        program = Program("p", inputs, (View("y", (s0, 5), (5, 1)), s0 * 2), table, (step,))
        verify(program)
        y, twice = interpret(program, {"x": X, "s0": 4})
        np.testing.assert_array_equal(y, X)
        assert twice == 8


def test_interpreting_twice_gives_the_same_bits():
    for seed in range(10):
        program, inputs = random_program(seed)
        for a, b in zip(interpret(program, inputs), interpret(program, inputs), strict=True):
            np.testing.assert_array_equal(a, b)
