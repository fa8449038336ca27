"""What is printed is read back as it was, and what cannot be read is refused with its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.errors import ParseError
from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.collective_kinds import COLLECTIVES
from dcompile.ir.index import as_size, extreme, floordiv, modulo, var
from dcompile.ir.nodes import (
    Apply,
    Collective,
    Const,
    Extern,
    IndexOf,
    Load,
    Loop,
    Matmul,
    Program,
    Reduce,
    Scan,
    Store,
    Tile,
    Verbatim,
    View,
    Wait,
)
from dcompile.ir.ops import DTYPES, OPS, REDUCTIONS, SCANS
from dcompile.ir.parse import parse
from dcompile.ir.text import show
from dcompile.ir.verify import verify
from tests.ir.fuzz import random_program


def assert_read_back(program):
    text = show(program)
    found = parse(text)
    assert repr(found) == repr(program), text  # NaN is not equal to itself


# --- programs of loops ---


@given(st.integers(0, 1 << 30), st.booleans())
@settings(max_examples=30)
def test_random_programs_are_read_back(seed, symbolic):
    assert_read_back(random_program(seed, 4, symbolic=symbolic)[0])


# --- all that a program can hold, whether it makes sense or not ---

NAMES = st.sampled_from(("x", "y_1", "b0", "in:x", "0", "a.b", "layer 1", "ü", "q`r", "_", "loop", "None", "donated"))
OPERATORS = st.sampled_from(("aten.mm.default", "_c10d_functional.all_reduce.default", "my::op.default", "math.trunc"))
SOME_DTYPES = st.sampled_from(("float32", "bfloat16", "int64", "bool"))
SMALL = st.integers(0, 9)
SYMBOLS = [var(name) for name in ("s0", "u1", "z2")]


@st.composite
def indices(draw, atoms=("i0", "i1", "j0", "s0")):
    """Sums of products, divided and joined."""
    terms = [var(draw(st.sampled_from(atoms))) * draw(st.integers(-3, 9)) for _ in range(draw(SMALL) % 3)]
    index = sum(terms, var(draw(st.sampled_from(atoms))) * 0 + draw(st.integers(-5, 5)))
    by = draw(st.sampled_from((2, 7, SYMBOLS[0] + 1)))
    change = draw(st.sampled_from((None, floordiv, modulo)))
    return index if change is None else change(index, by, {}) * draw(st.integers(1, 4)) + draw(SMALL)


SIZES = st.one_of(
    st.integers(0, 64),
    st.sampled_from(SYMBOLS),
    indices(("s0", "u1")).map(as_size),
    st.just(extreme("max", floordiv(SYMBOLS[0], 2, {}), SYMBOLS[1] + 4)),
)
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
TEXTS = st.text(max_size=8)
ORIGINS = st.lists(st.one_of(TEXTS, st.just("layers.0: aten.mul.Tensor (model.py:88)")), max_size=3).map(tuple)


@st.composite
def views(draw):
    shape = draw(SHAPES)
    strides = draw(st.lists(SIZES, min_size=len(shape), max_size=len(shape)).map(tuple))
    return View(draw(NAMES), shape, strides, draw(SIZES))


LITERALS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
VERBATIM = st.one_of(st.sampled_from(("torch.float32", "torch.device('cuda')", "_scale", "s0", "3")), TEXTS)
ARGS = st.recursive(
    st.one_of(LITERALS, views(), SIZES, VERBATIM.map(Verbatim)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
CALLS = st.builds(
    Extern,
    op=OPERATORS,
    args=st.lists(ARGS, max_size=3).map(tuple),
    kwargs=st.lists(st.tuples(st.sampled_from(("beta", "out_dtype")), ARGS), max_size=2).map(tuple),
    outs=st.lists(st.one_of(st.none(), NAMES), max_size=3).map(tuple),
    mode=st.sampled_from(("out", "alloc", "mutate")),
    fallback=st.booleans(),
    origin=ORIGINS,
    effect=st.booleans(),
    aliases=st.booleans(),
    tells=st.lists(NAMES, max_size=2).map(tuple),
    cost_us=st.one_of(st.just(0.0), st.floats(1e-3, 1e9)),
)
KINDS = st.sampled_from(list(COLLECTIVES))
SOME_NAMES = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
TILES = st.builds(
    Tile,
    *[st.integers(1, 256)] * 5,
    st.integers(1, 4),
    st.integers(0, 132),
    flat=st.booleans(),
    descriptors=st.booleans(),
)


def values(refs):
    """A value that may refer to so many before it."""
    ref = st.integers(0, max(refs - 1, 0))
    mask = st.one_of(st.none(), ref) if refs else st.none()
    literals = st.one_of(st.booleans(), st.integers(-99, 99), st.floats())
    leaves = [
        st.builds(Const, literals, st.sampled_from(sorted(DTYPES))),
        st.builds(IndexOf, indices(), st.sampled_from(("int64", "int32"))),
        st.builds(Load, NAMES, indices(), SOME_DTYPES, mask),
    ]
    applied = st.sampled_from(sorted(OPS)).flatmap(
        lambda op: st.builds(Apply, st.just(op), st.tuples(*[ref] * OPS[op].arity), SOME_DTYPES)
    )
    folds = [(Reduce, REDUCTIONS), (Scan, SCANS)]
    return st.one_of(
        *leaves,
        *([applied] if refs else []),
        *(st.builds(kind, st.sampled_from(sorted(table)), ref, SOME_DTYPES) for kind, table in folds if refs),
    )


@st.composite
def loops(draw):
    body = []
    for _ in range(draw(st.integers(1, 7))):
        body.append(draw(values(len(body))))
    modes = st.sampled_from(("set", "sum", "max"))
    stores = st.lists(st.builds(Store, NAMES, indices(), st.integers(0, len(body) - 1), modes), max_size=3)
    product = st.builds(Matmul, CALLS.map(lambda call: replace(call, outs=("product",))), SOME_DTYPES, TILES)
    outer, inner = draw(SHAPES), draw(SHAPES)
    more = draw(st.none() | product), draw(st.none() | TILES)
    return Loop(draw(NAMES), outer, inner, tuple(body), tuple(draw(stores)), draw(ORIGINS), *more)


@st.composite
def buffers(draw, name):
    shape = draw(SHAPES)
    strides = draw(st.lists(SIZES, min_size=len(shape), max_size=len(shape)).map(tuple))
    device = draw(st.sampled_from(("cpu", "cuda", "cuda:1")))
    storage = draw(st.sampled_from((None, "arena", "bucket:b0", "in:y 2", "within:x")))
    return Buffer(name, draw(SOME_DTYPES), shape, strides, device, storage, 0 if storage is None else draw(SIZES))


NUMBERS = st.lists(SMALL, max_size=3).map(tuple)
BUCKETS = st.builds(
    Bucket, NAMES, SOME_DTYPES, st.sampled_from(("cpu", "cuda:0")), NAMES, NUMBERS, SOME_NAMES, NUMBERS, SMALL,
    wire=st.sampled_from(("", "bfloat16")), kind=st.sampled_from(("all_reduce", "all_gather", "reduce_scatter")),
    units=NUMBERS, holders=SOME_NAMES, sizes=NUMBERS, gaps=NUMBERS, scaled=NUMBERS, packed=NUMBERS, idle=NUMBERS,
    idle_offsets=NUMBERS, marks=SMALL,
)  # fmt: skip
COLLECTIVES = st.builds(Collective, KINDS, NAMES, NAMES, SOME_NAMES, st.none() | CALLS)
STEPS = st.one_of(loops(), CALLS, COLLECTIVES, st.builds(Wait, NAMES, SOME_NAMES, st.just(()) | SOME_NAMES))


@st.composite
def programs(draw):
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    pairs = st.lists(st.tuples(SMALL, SMALL), max_size=2).map(tuple)
    return Program(
        draw(NAMES),
        tuple(draw(st.lists(NAMES, max_size=3))),
        tuple(draw(st.lists(st.one_of(views(), SIZES, st.none(), st.booleans(), st.floats()), max_size=3))),
        tuple(draw(buffers(name)) for name in names),
        tuple(draw(st.lists(STEPS, max_size=3))),
        grads=draw(pairs),
        buckets=tuple(draw(st.lists(BUCKETS, max_size=2))),
        arena_bytes=draw(SIZES),
        sizes=tuple(draw(st.lists(st.tuples(NAMES, indices(("s0", "u1"))), max_size=2))),
        donated=tuple(draw(st.lists(NAMES, max_size=2))),
        parts=tuple(draw(st.lists(st.tuples(NAMES, SMALL), max_size=2))),
    )


@given(programs())
@settings(max_examples=40)
def test_whatever_a_program_holds_is_read_back(program):
    assert_read_back(program)


# --- what is written by hand ---

RMS_NORM = """
# two rows of four
program rms_norm(x, w)
  x: float32[2, 4]
  w: bfloat16[4]
  y: bfloat16[4, 2] strides [1, 4]

  loop norm [2] x [4]  # layers.0.norm
    square = row_sum(mul(x[i0, j0], x[i0, j0]))
    r = rsqrt(add(mul(square, 0.25), 1e-06))   # of the row
    scaled = mul(mul(x[i0, j0], r), cast(w[j0], float32))
    y[j0, i0] = cast(scaled, bfloat16)
  g <- aten.mm.default(x, y[4, 2], beta=1) [alloc]
  return (y, w[2] from 2)
"""


def test_what_is_written_by_hand_may_be_shorter():
    program = parse(RMS_NORM)
    (loop, call) = program.steps
    assert (loop.outer, loop.inner, loop.origin) == ((2,), (4,), ("layers.0.norm",))
    at = var("i0") * 4 + var("j0")
    squares = (Load("x", at, "float32"), Load("x", at, "float32"), Apply("mul", (0, 1), "float32"))
    assert loop.body[:4] == (*squares, Reduce("sum", 2, "float32"))
    assert loop.stores == (Store("y", at, len(loop.body) - 1),)
    assert call.args == (View("x", (2, 4), (4, 1)), View("y", (4, 2), (2, 1)))
    assert program.outputs == (View("y", (4, 2), (1, 4)), View("w", (2,), (1,), 2))
    verify(replace(program, steps=(loop,)))
    assert_read_back(program)


@pytest.mark.parametrize(
    ("right", "wrong", "place", "message"),
    [
        ("program rms_norm", "rms_norm", (3, 1), "expected `program`"),
        ("rms_norm(x, w)", "rms_norm(x w)", (3, 20), "expected `)`"),
        ("w: bfloat16[4]", "x: bfloat16[4]", (5, 3), "there is a buffer x already"),
        ("strides [1, 4]", "strides [1, 4", (6, 34), "expected `,`"),
        ("loop norm [2]", "loop norm 2", (8, 13), "expected `[`"),
        (
            "loop norm",
            "loops norm",
            (8, 3),
            "expected a step (`loop`, `start`, `wait`, or a call with `<-`)",
        ),
        ("mul(x[i0, j0]", "mul(z[i0, j0]", (9, 28), "z has 0 dimensions, not 2"),
        ("cast(w[j0]", "cast(z[j0]", (11, 42), "unknown buffer z"),
        ("cast(w[j0]", "cast(w[j0]:", (11, 48), "expected a dtype"),
        ("rsqrt(add", "rsqrt_(add", (10, 9), "unknown operation rsqrt_"),
        ("row_sum(", "row_median(", (9, 14), "unknown operation row_median"),
        ("mul(square", "mul(squared", (10, 23), "squared has no value so far"),
        ("r = rsqrt", "square = rsqrt", (10, 5), "square has a value already"),
        ("y[j0, i0] =", "y[j0, i0]", (12, 15), "expected `=`"),
        ("y[j0, i0]", "y[j0, i0, 0]", (12, 7), "y has 2 dimensions, not 3"),
        ("cast(w[j0]", "cast(w[j0 //0]", (11, 49), "expected a positive divisor"),
        ("0.25)", "0.25", (10, 47), "expected `)`"),
        ("[alloc]", "[allocate]", (13, 45), "expected `out`, `alloc` or `mutate`"),
        ("from 2)", "from 2) 3", (14, 27), "expected the end of the program"),
        ("return (y,", "(y,", (14, 3), "or `return`"),
    ],
)
def test_an_error_says_where_it_is_and_what_should_be_there(right, wrong, place, message):
    assert RMS_NORM.count(right) >= 1
    with pytest.raises(ParseError) as caught:
        parse(RMS_NORM.replace(right, wrong, 1))
    first, line, mark = str(caught.value).split("\n")
    assert first.startswith(f"line {place[0]}, column {place[1]}: ") and message in first, first
    assert line.strip() in RMS_NORM.replace(right, wrong, 1) and mark == " " * (place[1] + 1) + "^"


def test_a_value_that_is_used_by_an_index_is_found_by_its_name():
    program = parse("""
        program embedding(t, w)
          t: int64[3]
          w: float32[10, 8]
          y: float32[3, 8]
        loop k [3] x [8]
          token = t[i0]
          y[i0, j0] = w[token, j0]
        return (y)
    """)
    assert program.steps[0].body[1] == Load("w", var("v0") * 8 + var("j0"), "float32")
    verify(program)
