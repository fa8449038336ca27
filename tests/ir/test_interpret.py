"""The interpreter against NumPy written by hand, and against torch where torch decides what is right."""

import numpy as np
import pytest
import torch

from dcompile.ir.interpret import GARBAGE, cast, execute, from_bfloat16, interpret, to_bfloat16
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program

X = np.arange(20, dtype=np.float32).reshape(4, 5) - 7


def run(lines, *outs, inputs=None, space="[4] x [5]"):
    """The results of one loop; `outs` declare them, as "y: float32[4, 5]"."""
    inputs = {"x": X} if inputs is None else inputs
    given = [f"{name}: {value.dtype}{list(value.shape)}" for name, value in inputs.items()]
    program = parse(f"""
        program p({", ".join(inputs)})
          {chr(10).join([*given, *outs])}
        loop k {space}
          {lines}
        return ({", ".join(out.partition(":")[0] for out in outs)})
    """)
    verify(program)
    return interpret(program, inputs)


def test_softmax_in_one_loop():
    lines = """
        v = x[i0, j0]
        top = row_max(v)
        e = exp(sub(v, top))
        y[i0, j0] = div(e, row_sum(e))
        m[i0] = top
    """
    y, m = run(lines, "y: float32[4, 5]", "m: float32[4]")
    e = np.exp(X - X.max(1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(m, X.max(1))


def test_transposed_broadcast_and_flattened_indices():
    (y,) = run("y[i0, j0] = x[j0, i0]", "y: float32[5, 4]", space="[5] x [4]")
    np.testing.assert_array_equal(y, X.T)
    (y,) = run("y[i0, j0] = x[i0, 0]", "y: float32[4, 5]")
    np.testing.assert_array_equal(y, np.broadcast_to(X[:, :1], (4, 5)))
    (y,) = run("y[j0] = x[19 - j0]", "y: float32[20]", space="[] x [20]")
    np.testing.assert_array_equal(y, X.reshape(-1)[::-1])


def test_masked_load_is_zero_where_false():
    (y,) = run("y[i0, j0] = x[i0, j0 - 1] if ge(index(j0 - 1), 0) else 0", "y: float32[4, 5]")
    np.testing.assert_array_equal(y, np.pad(X, ((0, 0), (1, 0)))[:, :5])


GATHER = """
    row = n[i0]
    y[i0, j0] = x[row, j0]
"""


def test_an_unmasked_load_outside_is_an_error():
    with pytest.raises(IndexError, match=r"x\[0\.\.29\] is outside its 20 elements"):
        run(GATHER, "y: float32[4, 5]", inputs={"x": X, "n": np.array([0, 1, 2, 5])})


def test_positions_within_are_themselves_and_others_an_error():
    checked = GATHER.replace("n[i0]", "within(n[i0], 0, 4)")
    n = np.array([2, 0, 3, 1])
    (y,) = run(checked, "y: float32[4, 5]", inputs={"x": X, "n": n})
    np.testing.assert_array_equal(y, X[n])
    for wrong in (4, -1):
        with pytest.raises(IndexError, match="outside of 0 to 3"):
            run(checked, "y: float32[4, 5]", inputs={"x": X, "n": np.array([2, 0, wrong, 1])})


def test_gather_and_scatter_at_run_time():
    n = np.array([2, 0, 2, 1])
    (y,) = run(GATHER, "y: float32[4, 5]", inputs={"x": X, "n": n})
    np.testing.assert_array_equal(y, X[n])
    scatter = """
        row = n[i0]
        y[row, j0] sum= x[i0, j0]
    """
    (y,) = run(scatter, "y: float32[3, 5]", inputs={"x": X, "n": n})
    expected = np.zeros((3, 5), np.float32)
    np.add.at(expected, n, X)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("mode", "reference"), [("sum", np.sum), ("max", np.max), ("min", np.min), ("prod", np.prod)])
def test_column_reduction(mode, reference):
    lines = f"""
        v = x[i0, j0]
        columns[j0] {mode}= v
        total[0] {mode}= v
    """
    columns, total = run(lines, "columns: float32[5]", "total: float32[]")
    np.testing.assert_allclose(columns, reference(X, axis=0))
    np.testing.assert_allclose(total, reference(X))


def test_a_row_value_counts_once_per_row_in_a_row_store_and_once_per_element_in_an_element_store():
    lines = """
        v = r[i0]
        once[0] sum= v
        each[j0] sum= v
    """
    r = np.arange(4, dtype=np.float32)
    once, each = run(lines, "once: float32[]", "each: float32[5]", inputs={"r": r})
    assert once == r.sum()
    np.testing.assert_array_equal(each, np.full(5, r.sum()))


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min", "argmax", "argmin"])
def test_row_reductions_agree_with_torch(op):
    x = np.array([[3, 1, 3, 0, 0], [1, np.nan, 2, np.nan, 5], [-np.inf, 0, np.inf, 0, 0], [7, 7, 7, 7, 7]], np.float32)
    dtype = "int64" if op.startswith("arg") else "float32"
    (y,) = run(f"y[i0] = row_{op}(x[i0, j0])", f"y: {dtype}[4]", inputs={"x": x})
    name = {"max": "amax", "min": "amin"}.get(op, op)
    np.testing.assert_array_equal(y, getattr(torch, name)(torch.tensor(x), dim=1).numpy())


def test_positions_count_the_inner_space_row_major():
    x = np.zeros((2, 3, 4), np.int32)
    x[0, 1, 2] = x[0, 2, 0] = x[1, 2, 3] = 9
    (y,) = run("y[i0] = row_argmax(x[i0, j0, j1])", "y: int64[2]", inputs={"x": x}, space="[2] x [3, 4]")
    assert y.tolist() == [6, 11]


def test_any_all_and_a_reduction_of_what_does_not_vary():
    lines = """
        positive = gt(x[i0, j0], 0.0)
        some[i0] = row_any(positive)
        every[i0] = row_all(positive)
        five[i0] = row_sum(x[i0, 0])
    """
    some, every, five = run(lines, "some: bool[4]", "every: bool[4]", "five: float32[4]")
    np.testing.assert_array_equal(some, (X > 0).any(1))
    np.testing.assert_array_equal(every, (X > 0).all(1))
    np.testing.assert_array_equal(five, 5 * X[:, 0])


def test_empty_spaces():
    empty = np.zeros((4, 0), np.float32)
    lines = """
        v = x[j0]
        total[i0] = row_sum(v)
        most[i0] = row_max(v)
    """
    total, most = run(lines, "total: float32[4]", "most: float32[4]", inputs={"x": empty}, space="[4] x [0]")
    assert total.tolist() == [0] * 4 and most.tolist() == [-np.inf] * 4
    nothing = {"x": np.zeros((0, 5), np.float32)}
    (y,) = run("y[j0] sum= x[i0, j0]", "y: float32[5]", inputs=nothing, space="[0] x [5]")
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
    lines = """
        v = x[j0]
        a[j0] = add(v, v)
        b[j0] = mul(v, v)
        c[j0] = neg(v)
    """
    y = run(lines, "a: int8[5]", "b: int8[5]", "c: int8[5]", inputs={"x": x}, space="[] x [5]")
    t = torch.tensor(x[0])
    for ours, theirs in zip(y, (t + t, t * t, -t), strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy())


# --- memory, calls, programs ---


def test_buffers_are_flat_elements():
    """A transposed input, a padded intermediate, and an output that views part of it."""
    program = parse("""
        program p(x)
          x: float32[4, 5] strides [1, 4]
          t: float32[4, 5] strides [8, 1]
        loop k [4] x [5]
          t[i0, j0] = x[i0, j0]
        return (t[2, 2] strides [16, 2] from 1)
    """)
    verify(program)
    np.testing.assert_array_equal(interpret(program, {"x": X})[0], X[::2, 1:4:2])


def test_bfloat16_buffers():
    program = parse("""
        program p(x)
          x: bfloat16[4, 5]
          y: bfloat16[4, 5]
        loop k [4] x [5]
          y[i0, j0] = x[i0, j0]
        return (y)
    """)
    (y,) = interpret(program, {"x": X + 0.001})
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, torch.tensor(X + 0.001).bfloat16().float().numpy())


def test_memory_starts_as_garbage_and_overlap_shows():
    """Two buffers wrongly in one place: the second write is seen through the first."""
    program = parse("""
        program p(x)
          arena: 80 bytes
          x: float32[4, 5] @ input+0
          y: float32[4, 5] @ out+0
          a: float32[4, 5] @ arena+0
          b: float32[4, 5] @ arena+0
        loop a [4] x [5]
          a[i0, j0] = x[i0, j0]
        loop b [4] x [5]
          b[i0, j0] = mul(x[i0, j0], 2.0)
        loop y [4] x [5]
          y[i0, j0] = a[i0, j0]
        return (y)
    """)
    np.testing.assert_array_equal(interpret(program, {"x": X})[0], 2 * X)
    assert interpret(parse("program p()\ng: uint8[1]\nreturn (g)"), {})[0] == GARBAGE


def test_mutation_shows_in_execute_and_leaves_the_arrays_alone():
    program = parse("""
        program p(x)
          x: float32[4, 5]
        loop k [4] x [5]
          x[i0, j0] = neg(x[i0, j0])
        return ()
    """)
    x = X.copy()
    np.testing.assert_array_equal(execute(program, {"x": x}).inputs["x"], -X)
    np.testing.assert_array_equal(x, X)


def test_library_calls():
    program = parse("""
        program p(x)
          x: float32[4, 5]
          m: float32[4, 4]
          s: float32[4]
          i: int64[4]
        m <- aten.mm.default(x, x[5, 4] strides [1, 5]) [out]
        s, i <- aten.max.dim(m, 1, keepdim=`False`) [alloc]
        x <- aten.zero_.default(x[5] from 5) [mutate]
        return (m, s, i, x, index(3), None, 2.5)
    """)
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
    program = parse("""
        program p(x)
          bucket b0: all_reduce float32[20] on cpu over ddp, params (0), buffers (g), offsets (0)
          x: float32[4, 5]
          g: float32[4, 5] @ bucket:b0+0
        loop k [4] x [5]
          g[i0, j0] = x[i0, j0]
        start all_reduce b0 over ddp: g
        wait b0: g
        return (g)
    """)
    np.testing.assert_array_equal(interpret(program, {"x": X})[0], X)
    mean = {"all_reduce": lambda arrays: [a / 2 for a in arrays]}
    np.testing.assert_array_equal(interpret(program, {"x": X}, mean)[0], X / 2)


def test_symbolic_sizes_come_from_arguments_or_shapes():
    for inputs in ("x", "s0, x"):
        program = parse(f"""
            program p({inputs})
              x: float32[s0, 5]
              y: float32[s0, 5]
            loop k [s0] x [5]
              y[i0, j0] = x[i0, j0]
            return (y, 2*s0)
        """)
        verify(program)
        y, twice = interpret(program, {"x": X, "s0": 4})
        np.testing.assert_array_equal(y, X)
        assert twice == 8


def test_interpreting_twice_gives_the_same_bits():
    for seed in range(10):
        program, inputs = random_program(seed)
        for a, b in zip(interpret(program, inputs), interpret(program, inputs), strict=True):
            np.testing.assert_array_equal(a, b)
