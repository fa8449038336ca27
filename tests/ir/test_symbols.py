import numpy as np
import pytest

from dcompile.errors import VerifyError
from dcompile.ir.buffers import NUMBER, Buffer
from dcompile.ir.index import as_index, contiguous_strides, extreme, floordiv, var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Const, Extern, Load, Loop, Program, Store, View
from dcompile.ir.symbols import late_symbols, sources, specialise, symbols_of, valued_symbols
from dcompile.ir.verify import verify

S0, S1 = var("s0"), var("s1")


def buffer(name, shape):
    return Buffer(name, "float32", shape, contiguous_strides(shape))


def doubled(shape=(S0, 4), out=None):
    """y = 2 * x over a space of symbolic size."""
    index = var("i0") * 4 + var("i1")
    body = (Load("x", index, "float32"), Const(2.0, "float32"), Apply("mul", (0, 1), "float32"))
    loop = Loop("k", shape, (), body, (Store("y", index, 2),))
    y = buffer("y", out or shape)
    return Program("p", ("x",), (View("y", y.shape, y.strides), S0 * 3), (buffer("x", shape), y), (loop,))


def test_symbols_are_read_off_shapes_and_numbers_and_solved_for():
    x = buffer("x", (4 * S0 + 1, 3))
    program = Program("p", ("s1", "n", "x"), (), (x,), (), sizes=(("n", S0 * S1),))
    found = sources(program)
    assert list(found) == ["s1", "s0"]
    assert (found["s1"].input, found["s1"].what) == ("s1", "value")
    assert (found["s0"].input, found["s0"].what, found["s0"].dim) == ("x", "shape", 0)
    assert (found["s0"].factor, found["s0"].rest) == (as_index(4), as_index(1))


def test_a_product_tells_a_symbol_once_the_other_is_known():
    program = Program("p", ("n", "s1"), (), (), (), sizes=(("n", S0 * S1 + 2),))
    found = sources(program)["s0"]
    assert (found.input, found.factor, found.rest) == ("n", S1, as_index(2))


def test_what_no_argument_tells_is_late():
    u0 = var("u0")
    step = Extern("aten.nonzero.default", (View("x", (S0,), (1,)),), (), ("y",), "alloc")
    program = Program("p", ("x",), (View("y", (u0, 1), (1, 1)),), (buffer("x", (S0,)), buffer("y", (u0, 1))), (step,))
    assert symbols_of(program) == {"s0", "u0"} and late_symbols(program) == {"u0"}
    assert valued_symbols(program) == {"u0"}
    verify(program)


def test_a_late_size_that_follows_from_sizes_depends_on_no_value():
    numbers = (View("half", (), ()), View("k", (), ()))
    half = Extern("operator.mul", (S0, 0.5), (), ("half",), "alloc")
    follows = Extern("math.trunc", numbers[:1], (), ("k",), "alloc", tells=("u_k",))
    counts = Extern("aten.item.default", (View("x", (S0,), (1,)),), (), ("n",), "alloc")
    depends = Extern("operator.add", (*numbers[1:], View("n", (), ())), (), ("m",), "alloc", tells=("u_m",))
    named = tuple(Buffer(name, NUMBER, (), ()) for name in ("half", "k", "n", "m"))
    outputs = (View("k", (), ()), var("u_k"), var("u_m"))
    program = Program("p", ("x",), outputs, (buffer("x", (S0,)), *named), (half, follows, counts, depends))
    assert late_symbols(program) == {"u_k", "u_m"} and valued_symbols(program) == {"u_m"}


@pytest.mark.parametrize("rows", [2, 5])
def test_a_symbolic_program_means_what_its_special_case_means(rows):
    program, x = doubled(), np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    fixed = specialise(program, {"s0": rows})
    assert not symbols_of(fixed) and fixed.outputs[1] == 3 * rows
    general, special = interpret(program, {"x": x}), interpret(fixed, {"x": x})
    assert np.array_equal(general[0], special[0]) and np.array_equal(general[0], 2 * x) and general[1] == 3 * rows


def test_specialising_decides_what_depends_on_the_sizes():
    size = extreme("max", floordiv(S0, 2, {}), 4) + S1 * 0
    program = Program("p", ("x",), (size,), (buffer("x", (S0,)),), ())
    assert specialise(program, {"s0": 6}).outputs == (4,) and specialise(program, {"s0": 20}).outputs == (10,)


def test_bounds_are_verified_at_given_sizes():
    verify(doubled(), {"s0": 3})
    broken = doubled(out=(S0 - 1, 4))
    verify(broken)  # nothing can be said about any size
    with pytest.raises(VerifyError):
        verify(broken, {"s0": 3})
