"""Which products may end in the loop behind them, and what becomes of the program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dcompile.codegen.schedule.fusion import matmul_epilogue
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.codegen.schedule.order.cost_model import durations
from dcompile.ir.analysis import takes_over
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Extern, Loop
from dcompile.ir.text import show
from dcompile.ir.verify import verify
from dcompile.machine_model import CPU
from tests.codegen.emit import products
from tests.codegen.emit.products import SMALL, program

X, W, R = (64, 48), (48, 96), (64, 96)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(matmul_epilogue, "MIN_EPILOGUE_FLOPS", 0)


def found(function, *shapes, **how):
    return matmul_epilogue.epilogues(program(function, *shapes, **how))


AFTER = """\
program forward(x_1, w_1, r_1)
  x_1: bfloat16[64, 48] on cuda
  w_1: bfloat16[48, 96] on cuda
  r_1: bfloat16[64, 96] on cuda
  add: bfloat16[64, 96] on cuda
  0 loop add [64] x [96]  # mm, aten.add.Tensor
      mm <- aten.mm.default(x_1[64, 48], w_1[48, 96]) [out] in bfloat16 by 16x32x16, 4 warps, 2 stages  # mm
      v1 = cast(r_1[j0 + 96*i0], float32)
      v3 = cast(mm[j0 + 96*i0], float32)
      v4 = add(v1, v3)
      add[j0 + 96*i0] = cast(v4, bfloat16)
return (add[64, 96])"""


def test_text():
    before = program(products.residual, X, W, R)
    after = products.ended(before, SMALL)
    verify(after)
    assert show(after).replace("# aten.mm.default", "# mm") == AFTER
    assert matmul_epilogue.fuse_matmul_epilogues(before, {}) is before


@pytest.mark.parametrize("name", products.CASES)
def test_values_stay(name):
    function, shapes, dtype, _ = products.CASES[name]
    before, after = program(function, *shapes, dtype=dtype), products.case(name)
    verify(after)
    verify(plan_memory(after))
    inputs = products.inputs(before)
    results = [interpret(p, inputs, products.MEANINGS) for p in (before, after, plan_memory(after))]
    for want, *others in zip(*results, strict=True):
        assert all(np.array_equal(want, got) for got in others)


def test_a_product_is_written_where_others_need_it():
    saved, dropped = (products.case(name) for name in ("bias and gelu", "bias and relu"))
    assert "addmm" in saved.steps[0].writes and "addmm" in saved.table
    assert dropped.steps[0].writes == {"relu"} and "addmm" not in dropped.table
    assert all(not isinstance(step, Extern) for p in (saved, dropped) for step in p.steps)


def test_of_two_products_the_loop_ends_the_nearer_one():
    def gated(x, gate, up):
        return F.silu(x @ gate) * (x @ up)

    (ending,) = found(gated, X, W, W)
    assert ending.product == 1 and ending.joint.product.out == "mm_1" and "mm" in ending.joint.reads


def test_of_two_products_the_loop_ends_the_larger_one():
    """As of a linear layer and an adapter of low rank, whose product comes last."""

    def adapted(x, w, a, b):
        return x @ w + ((x @ a) @ b) * 2

    (ending,) = found(adapted, X, W, (48, 8), (8, 96))
    assert ending.product == 0 and ending.joint.product.call.reads == {"x_1", "w_1"}


def test_equal_layers_are_of_one_kind():
    def layers(x, w, v):
        x = x + x @ w
        x = x + x @ v
        return x * (x @ w)

    first, second, third = found(layers, (64, 64), (64, 64), (64, 64))
    assert first.kind == second.kind != third.kind
    assert first.joint != second.joint


def test_memory_of_a_factor_is_not_written_over():
    """Other programs of the kernel may have to read it still. Without the product, its place would be taken."""

    def layers(x, w):
        x = x + 1
        for _ in range(3):
            x = x + x @ w
        return x

    after = products.ended(program(layers, (64, 64), (64, 64)), SMALL)
    planned = plan_memory(after)
    verify(planned)
    for step in after.steps:
        for factor in step.product.call.reads if step.product else ():
            for name in step.writes:
                old, new = planned.table[factor], planned.table[name]
                assert not takes_over(step, old, new)
                assert (old.storage, old.offset) != (new.storage, new.offset)


NOT = {
    "sums of rows": (lambda x, w: (x @ w).sum(1), (X, W), {}),
    "elements of other places": (lambda x, w: (x @ w).flip(1) + 1, (X, W), {}),
    "float32": (lambda x, w: (x @ w) * 2, (X, W), {"dtype": torch.float32}),
    "on a CPU": (lambda x, w: (x @ w) * 2, (X, W), {"device": "cpu"}),
    "rows that do not begin at whole 16 bytes": (lambda x, w: (x @ w) * 2, (X, (48, 97)), {}),
    "a bias of one element": (lambda x, w, b: torch.addmm(b, x, w) * 2, (X, W, (1,)), {}),
    "a matrix that is added": (lambda x, w, b: torch.addmm(b, x, w) * 2, (X, W, R), {}),
    "nothing behind it": (lambda x, w: x @ w, (X, W), {}),
}


@pytest.mark.parametrize("why", NOT)
def test_other_products_stay_the_librarys(why):
    function, shapes, how = NOT[why]
    assert found(function, *shapes, **how) == []


def test_small_products_stay_the_librarys(monkeypatch):
    monkeypatch.setattr(matmul_epilogue, "MIN_EPILOGUE_FLOPS", 1 << 30)
    assert found(products.residual, X, W, R) == []
    assert len(found(products.residual, (1024, 768), (768, 1024), (1024, 1024))) == 1


def test_a_product_that_is_needed_before_stays_the_librarys():
    def twice(x, w, v):
        y = x @ w
        return y * 2, y @ v

    before = program(twice, X, W, (96, 8))
    product, other, loop = sorted(before.steps, key=lambda step: (isinstance(step, Loop), "mm_1" in step.writes))
    assert isinstance(loop, Loop) and other.reads & product.writes
    (ending,) = matmul_epilogue.epilogues(replace(before, steps=(product, loop, other)))
    assert "mm" in ending.joint.writes
    assert matmul_epilogue.epilogues(replace(before, steps=(product, other, loop))) == []


def test_a_factor_that_is_overwritten_in_between_keeps_its_product():
    before = program(products.residual, X, W, R)
    product, loop = before.steps
    (_, change) = program(lambda x, w, r: (x @ w, x + 1), X, W, R).steps
    in_place = replace(change, stores=(replace(change.stores[0], buffer="x_1"),))
    steps = product, in_place, loop
    verify(replace(before, steps=steps))
    assert matmul_epilogue.epilogues(replace(before, steps=steps)) == []
    assert len(matmul_epilogue.epilogues(replace(before, steps=(in_place, product, loop)))) == 1


def test_the_cost_model_counts_both():
    before = program(products.residual, (1024, 768), (768, 1024), (1024, 1024))
    after = products.ended(before, SMALL)
    apart, (joint,) = (durations(p, CPU, {}) for p in (before, after))
    assert max(apart) < joint < sum(apart)
