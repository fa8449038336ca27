"""Copies to the buffers of the model's own collectives, and those that can go."""

from dataclasses import replace

import numpy as np

from dcompile.collectives.send_in_place import send_in_place
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Collective, Extern, Load, Loop, Program, Store, View, Wait
from dcompile.ir.verify import verify

REDUCE = "_c10d_functional.all_reduce.default"


def view(name, *shape):
    return View(name, shape, (*(shape[-1] for _ in shape[1:]), 1))


def copy(source, target, index=None):
    place = var("i0")
    body = (Load(source, place if index is None else index, "float32"),)
    return Loop(target, (8,), (), body, (Store(target, place, 0),))


def program(*, copied=None, outputs=("sum",), more=()):
    """A product, its copy, and the sum of that over the ranks, twice which is returned."""
    product = Extern("aten.mm.default", (view("x", 2, 4), view("w", 4, 4)), (), ("product",), "out")
    call = Extern(REDUCE, (view("sum", 2, 4), "sum", "0"), (), ("sum",), "mutate")
    start = Collective("all_reduce", "sum", "own0", ("sum",), call)
    steps = (product, copied or copy("product", "sum"), *more, start, Wait("sum", ("sum",)))
    sizes = {"x": (2, 4), "w": (4, 4), "product": (2, 4), "sum": (2, 4), "other": (2, 4)}
    used = {name for step in steps for name in step.reads | step.writes}
    buffers = tuple(Buffer(n, "float32", size, (size[1], 1)) for n, size in sizes.items() if n in used)
    made = Program("p", ("x", "w"), tuple(view(name, 2, 4) for name in outputs), buffers, steps)
    verify(made)
    return made


def ran(which):
    rng = np.random.default_rng(0)
    inputs = {"x": rng.random((2, 4), np.float32), "w": rng.random((4, 4), np.float32)}
    return interpret(which, inputs, {"aten.mm.default": np.matmul, REDUCE: lambda x, *_: 2 * x})


def test_a_product_is_written_where_it_is_summed_up():
    before = program()
    after = send_in_place(before)
    verify(after)
    assert [type(step).__name__ for step in after.steps] == ["Extern", "Collective", "Wait"]
    assert after.steps[0].outs == ("sum",) and "product" not in after.table
    for one, two in zip(ran(before), ran(after), strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_copy_stays_where_somebody_else_reads_what_is_copied():
    for more, outputs in (((), ("sum", "product")), ((copy("product", "other"),), ("sum", "other"))):
        before = program(more=more, outputs=outputs)
        assert send_in_place(before) is before


def test_the_copy_stays_where_it_is_of_an_input_or_changes_the_order():
    of_input = program(copied=copy("x", "sum"))
    assert send_in_place(of_input) is of_input
    turned = program(copied=copy("product", "sum", 7 - var("i0")))
    assert send_in_place(turned) is turned


def test_a_collective_of_dcompiles_own_is_left_alone():
    before = program()
    steps = tuple(replace(step, call=None) if isinstance(step, Collective) else step for step in before.steps)
    own = replace(before, steps=steps)
    assert send_in_place(own) is own
