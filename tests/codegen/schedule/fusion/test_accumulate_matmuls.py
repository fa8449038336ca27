"""Products that add to one another: which sums are taken, the values, and the memory that is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import dcompile
from dcompile.capture.entry import find_model
from dcompile.codegen.schedule.fusion.matmul_epilogue import accumulate_matmuls
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import contiguous_strides, flatten, var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Extern, Load, Loop, Program, Store, View
from dcompile.ir.verify import verify

N = 64
AT = flatten([var("i0"), var("i1")], (N, 1))
MEANING = {"aten.mm.default": np.matmul, "aten.addmm.default": lambda c, a, b: c + a @ b}


def square(name, dtype="float32"):
    return Buffer(name, dtype, (N, N), (N, 1))


def view(name):
    return View(name, (N, N), (N, 1))


def product(out, a, b):
    return Extern("aten.mm.default", (view(a), view(b)), (), (out,), "out")


def total(out, *names, dtype="float32"):
    """out = ((names[0] + names[1]) + ...), as lowering writes it."""
    body = [Load(names[0], AT, dtype), Load(names[1], AT, dtype), Apply("add", (0, 1), dtype)]
    for name in names[2:]:
        body += [Load(name, AT, dtype), Apply("add", (len(body) - 1, len(body)), dtype)]
    return Loop("total", (N, N), (), tuple(body), (Store(out, AT, len(body) - 1),))


def doubled(out, name):
    body = (Load(name, AT, "float32"), Apply("add", (0, 0), "float32"))
    return Loop("doubled", (N, N), (), body, (Store(out, AT, 1),))


def program(*steps, outputs=("y",), dtype="float32"):
    names = {"x", "w", *(name for step in steps for name in step.reads | step.writes)}
    buffers = tuple(square(name, dtype) for name in sorted(names))
    return Program("p", ("x", "w"), tuple(map(view, outputs)), buffers, steps)


def changed(before):
    after = accumulate_matmuls(before)
    verify(after)
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((N, N)).astype(np.float32) for name in before.inputs}
    for a, b in zip(interpret(before, inputs, MEANING), interpret(after, inputs, MEANING), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2)
    return after


def ops(changed_program):
    return [step.op.split(".")[1] if isinstance(step, Extern) else step.name for step in changed_program.steps]


def test_many_products_need_the_memory_of_one():
    names = [f"m{n}" for n in range(6)]
    before = program(*(product(name, "x", "w") for name in names), total("y", *names))
    after = changed(before)
    assert ops(after) == ["mm"] + ["addmm"] * 5
    assert plan_memory(before).arena_bytes >= 5 * 4 * N * N
    planned = plan_memory(after)
    verify(planned)
    assert planned.arena_bytes <= 4 * N * N


def test_a_value_in_front_that_ends_there():
    after = changed(
        program(doubled("d", "x"), product("m", "x", "w"), product("k", "w", "x"), total("y", "m", "d", "k"))
    )
    assert ops(after) == ["doubled", "addmm", "addmm"]
    late = program(product("m", "x", "w"), doubled("d", "x"), product("k", "w", "x"), total("y", "m", "d", "k"))
    assert ops(changed(late)) == ["doubled", "addmm", "addmm"], "the product waits for what it adds to"


@pytest.mark.parametrize(
    "steps, outputs",
    [
        ((product("m", "x", "w"), product("k", "w", "x"), total("y", "m", "k"), doubled("z", "k")), ("y", "z")),
        ((product("m", "x", "w"), total("y", "m", "x")), ("y",)),
        ((product("m", "x", "w"), product("k", "w", "x"), total("y", "m", "k")), ("y", "k")),
        ((doubled("d", "x"), doubled("e", "w"), product("m", "x", "w"), total("y", "m", "d", "e")), ("y",)),
    ],
    ids=["read twice", "an input in front", "shown", "two other addends"],
)
def test_what_is_left_alone(steps, outputs):
    before = program(*steps, outputs=outputs)
    after = accumulate_matmuls(before)
    assert "addmm" not in ops(after) or ops(after).count("mm") == 1
    if ops(after) != ops(before):
        changed(before)


def test_half_precision_is_rounded_after_each_product():
    before = program(product("m", "x", "w"), product("k", "w", "x"), total("y", "m", "k", dtype="float32"))
    narrow = replace(before, buffers=tuple(replace(b, dtype="bfloat16") for b in before.buffers))
    assert accumulate_matmuls(narrow) is narrow


def test_transposed_memory_is_not_added_to():
    before = program(product("m", "x", "w"), product("k", "w", "x"), total("y", "m", "k"))
    turned = tuple(replace(b, strides=(1, N)) if b.name == "k" else b for b in before.buffers)
    assert accumulate_matmuls(replace(before, buffers=turned)) == replace(before, buffers=turned)
    assert contiguous_strides((N, N)) == (N, 1)


@pytest.mark.parametrize("matmul", ["own", "aten"])
def test_a_recurrent_weight(matmul):
    """Gradients of a weight that is used five times: the values, and one matrix of memory instead of five."""
    torch.manual_seed(0)
    cell, x = torch.nn.Linear(128, 128), torch.randn(16, 128)

    def run(x):
        for _ in range(5):
            x = torch.tanh(cell(x))
        return x.square().sum()

    expected = torch.autograd.grad(run(x), [*cell.parameters()])
    compiled = dcompile.compile(run, options={"receipt": False, "matmul": matmul})
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(x), [*cell.parameters()]), expected)
    (graph,) = find_model(compiled).graphs
    assert graph.executables["backward"].needs() < 2 * 128 * 128 * 4
