"""A variance about the mean over the slow axis: on a GPU two walks over the rows, on the CPU one row a column."""

import numpy as np

from dcompile.codegen.schedule.fusion.loop_order import interchange_reductions
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Program
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify

ROWS, COLUMNS = 40, 16


def variance(device: str) -> Program:
    """Mean and variance of each column of x, stored as a batch norm does."""
    return parse(f"""
        program p(x)
          x: float32[40, 16] on {device}
          mean: float32[16] on {device}
          var: float32[16] on {device}
        loop statistics [16] x [40]
          v = x[j0, i0]
          m = div(row_sum(v), 40.0)
          below = sub(v, m)
          mean[i0] = m
          var[i0] = div(row_sum(mul(below, below)), 40.0)
        return (mean, var)
    """)


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
