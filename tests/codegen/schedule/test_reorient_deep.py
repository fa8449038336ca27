"""A variance about the mean over the slow axis: on a GPU two walks over the rows, on the CPU one row a column."""

import numpy as np

from dcompile.codegen.schedule.fusion.interchange_reductions import interchange_reductions
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Buffer, Const, Load, Loop, Program, Reduce, Store, View
from dcompile.ir.verify import verify

ROWS, COLUMNS = 40, 16


def variance(device: str) -> Program:
    """Mean and variance of each column of x, stored as a batch norm does."""
    body = (
        Load("x", var("j0") * COLUMNS + var("i0"), "float32"),
        Reduce("sum", 0, "float32"),
        Const(float(ROWS), "float32"),
        Apply("div", (1, 2), "float32"),
        Apply("sub", (0, 3), "float32"),
        Apply("mul", (4, 4), "float32"),
        Reduce("sum", 5, "float32"),
        Apply("div", (6, 2), "float32"),
    )
    stores = (Store("mean", var("i0"), 3), Store("var", var("i0"), 7))
    buffers = (
        Buffer("x", "float32", (ROWS, COLUMNS), (COLUMNS, 1), device),
        Buffer("mean", "float32", (COLUMNS,), (1,), device),
        Buffer("var", "float32", (COLUMNS,), (1,), device),
    )
    outputs = (View("mean", (COLUMNS,), (1,)), View("var", (COLUMNS,), (1,)))
    return Program("p", ("x",), outputs, buffers, (Loop("loop", (COLUMNS,), (ROWS,), body, stores),))


def test_on_a_gpu_each_reduction_walks_over_the_rows():
    before = variance("cuda")
    after = interchange_reductions(before)
    verify(after)
    walks = [step for step in after.steps if any(store.mode == "sum" for store in step.stores)]
    assert len(walks) == 2 and all(step.outer == (ROWS,) and step.inner == (COLUMNS,) for step in walks)
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    for found, wanted in zip(interpret(after, {"x": x}), (x.mean(0), x.var(0)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_on_the_cpu_it_stays_one_loop():
    (step,) = interchange_reductions(variance("cpu")).steps
    assert step.outer == (COLUMNS,) and step.inner == (ROWS,)
