"""The last reductions of a backward with sharded parameters: what hides them, in hand-built programs."""

import pytest

from dcompile.collectives.contract import ParamInfo, Shard
from dcompile.collectives.fsdp_reduce_scatter import insert_reduce_scatters
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.nodes import Apply, Collective, Extern, Load, Loop, Program, Store, View, Wait
from dcompile.ir.verify import verify

WIDTH = 512
"""A weight of this width has 1 MiB: less is not worth a collective of its own."""
SQUARE = (WIDTH, WIDTH)


def buffer(name):
    return Buffer(name, "float32", SQUARE, contiguous_strides(SQUARE))


def whole(name):
    return View(name, SQUARE, contiguous_strides(SQUARE))


def mm(a, b, out):
    return Extern("aten.mm.default", (whole(a), whole(b)), (), (out,), "out")


def loop(source, out):
    index = var("i0") * WIDTH + var("i1")
    body = (Load(source, index, "float32"), Apply("neg", (0,), "float32"))
    return Loop(f"make_{out}", SQUARE, (), body, (Store(out, index, 1),))


def backward(layers=2, between=(), keeps=()):
    """Of an embedding (parameter 0) and layers, each with one weight: for each the gradient of its input, then its own.

    `between` comes behind the first layer's gradients; gradients in `keeps` are read by something else.
    """
    steps, names, flowing = [], ["x"], "x"
    for number in reversed(range(1, layers + 1)):
        steps += [mm(flowing, "x", f"d{number}"), mm("x", flowing, f"g{number}")]
        names += [f"g{number}", f"d{number}"]
        flowing = f"d{number}"
    for number, (make, source) in enumerate(between):
        steps.append(make(flowing if source == "flowing" else source, f"more{number}"))
        names.append(f"more{number}")
        flowing = f"more{number}"
    steps.append(loop(flowing, "g0"))
    for name in keeps:
        steps.append(loop(name, f"from_{name}"))
        names.append(f"from_{name}")
    outputs = tuple(whole(f"g{n}") for n in range(layers + 1)) + tuple(whole(f"from_{name}") for name in keeps)
    grads = tuple((n, n) for n in range(layers + 1))
    return Program("backward", ("x",), outputs, tuple(map(buffer, (*names, "g0"))), tuple(steps), grads)


def params(layers=2):
    shards = [Shard(n, n, 0, WIDTH * WIDTH, "float32", reshard=True) for n in range(layers + 1)]
    return tuple(
        ParamInfo(n, f"p{n}", SQUARE, "float32", "cpu", "sharded", f"fsdp{n}", s) for n, s in enumerate(shards)
    )


def words(program):
    """Steps as short words: + a start, - a wait, by group; else what is made."""
    group = {bucket.name: f"fsdp{bucket.params[0]}" for bucket in program.buckets}
    signs = {Collective: "+", Wait: "-"}
    return " ".join(
        f"{signs[type(s)]}{group[s.bucket]}" if type(s) in signs else ",".join(sorted(s.writes)) for s in program.steps
    )


def test_the_first_layers_weights_are_made_behind_the_embeddings_reduction():
    program = insert_reduce_scatters(backward(), params())
    verify(program)
    assert words(program) == "d2 g2 +fsdp2 d1 g0 -fsdp2 +fsdp0 g1 -fsdp0 +fsdp1 -fsdp1"


def by_a_product(source, out):
    return mm(source, "x", out)


@pytest.mark.parametrize(
    ("how", "order"),
    [
        # with one layer, nothing behind it held the memory that its operands hold longer
        ({"layers": 1}, "d1 g1 +fsdp1 g0 -fsdp1 +fsdp0 -fsdp0"),
        # something else hides the first layer's reduction
        (
            {"between": [(by_a_product, "flowing")]},
            "d2 g2 +fsdp2 d1 g1 -fsdp2 +fsdp1 more0 g0 -fsdp1 +fsdp0 -fsdp0",
        ),
    ],
)
def test_otherwise_the_order_is_the_programs(how, order):
    program = insert_reduce_scatters(backward(**how), params(how.get("layers", 2)))
    verify(program)
    assert words(program) == order


def test_a_gradient_that_something_else_reads_stays_before_it():
    program = insert_reduce_scatters(backward(keeps=("g1",)), params())
    verify(program)
    made = words(program).split()
    assert made.index("g1") < made.index("g0") < made.index("from_g1")


def test_as_many_reductions_are_in_flight_as_were_asked_for():
    program = insert_reduce_scatters(backward(layers=1), params(1), flying=2)
    verify(program)
    assert words(program) == "d1 g1 +fsdp1 g0 +fsdp0 -fsdp1 -fsdp0"
