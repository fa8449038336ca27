"""A last pass that is taken beside the next row does to each row what it does by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import dcompile
from dcompile.codegen.emit.cpp import kernel, parallelize, printer
from dcompile.codegen.emit.cpp.compile import build
from dcompile.codegen.emit.cpp.plan import NestPlan
from dcompile.codegen.emit.target import KernelSource
from dcompile.config import Config
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, IndexOf, Program, Store
from tests.codegen.emit import loops
from tests.codegen.emit.cases import random_inputs
from tests.codegen.emit.harness import execute, source_of, store
from tests.codegen.emit.loops import I0, J0, Body, program


def labelled(rows: int, n: int, dtype: str = "float32") -> Program:
    """Cross-entropy's gradient: softmax, less 1 at each row's label; the sum of exponentials is a result, too."""
    b, at = Body(), I0 * n + J0
    x = b.load("x", at, dtype)
    e = b.op("exp", b.op("sub", x, b.reduce("max", x)))
    total = b.reduce("sum", e)
    label = b.load("labels", I0, "int64")
    hit = b.op("eq", b.put(IndexOf(J0, "int64")), label, dtype="bool")
    less = b.op("where", hit, b.const(1.0), b.const(0.0))
    y = b.op("sub", b.op("mul", e, b.op("reciprocal", total)), less)
    stores = [Store("y", at, b.narrow(y, dtype)), Store("total", I0, total)]
    shapes = {"x": (dtype, (rows, n)), "labels": ("int64", (rows,)), "y": (dtype, (rows, n))}
    return program(b, (rows,), (n,), stores, **shapes, total=("float32", (rows,)))


def residual(rows: int, n: int, dtype: str = "float32") -> Program:
    """What is read again in the last pass: the row that waits has it from memory."""
    b, at = Body(), I0 * n + J0
    x = b.load("x", at, dtype)
    e = b.op("exp", x)
    y = b.op("add", b.op("div", e, b.reduce("sum", e)), b.op("mul", x, b.load("scale", I0)))
    shapes = {"x": (dtype, (rows, n)), "scale": ("float32", (rows,)), "y": (dtype, (rows, n))}
    return program(b, (rows,), (n,), [Store("y", at, b.narrow(y, dtype))], **shapes)


def inputs_of(made: Program) -> dict[str, np.ndarray]:
    given = random_inputs(made)
    if "labels" in given:
        rows, n = made.table["x"].shape
        given["labels"] = np.random.default_rng(2).integers(0, n, rows)
        given["labels"][:2] = [0, n - 1]
    return given


KINDS = {"softmax": loops.softmax, "labelled": labelled, "residual": residual}
DTYPES = ("float32", "bfloat16")
SHAPES = ((2, 4096), (3, 8192 + 64), (130, 256), (1000, 64))
Case = tuple[str, int, int, str]


@pytest.fixture(scope="module")
def kernels() -> dict[Case, tuple[Program, KernelSource, KernelSource]]:
    """Of each program, the kernel and the one without a pass that waits, all built in one file."""
    cases = [(kind, *shape, dtype) for kind in KINDS for shape in SHAPES for dtype in DTYPES]
    made = [KINDS[kind](rows, n, dtype) for kind, rows, n, dtype in cases]
    sources = [source_of(program) for program in made]
    alone = [source_of(program, without=("pipeline_last_pass",)) for program in made]
    build([*sources, *alone], Config(), store())
    return dict(zip(cases, zip(made, sources, alone, strict=True), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_comes_out_as_by_itself(
    kind: str, rows: int, n: int, dtype: str, kernels: dict[Case, tuple[Program, KernelSource, KernelSource]]
) -> None:
    """Also of a thread that has one row, and of the last of each thread's."""
    made, source, alone = kernels[kind, rows, n, dtype]
    inputs = inputs_of(made)
    assert "waits" in source.text and "waits" not in alone.text
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            got, want = execute(made, source, inputs), execute(made, alone, inputs)
            assert all(np.array_equal(one, other) for one, other in zip(got, want, strict=True)), count
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(got, interpret(made, inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5 if dtype == "float32" else 1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_results_may_take_the_memory_of_what_is_read(kind: str) -> None:
    made = KINDS[kind](64, 1024)
    inputs, source = inputs_of(made), source_of(made)
    got, want = (execute(made, source, inputs, same) for same in ("yx", ""))
    assert "waits" in source.text and np.array_equal(got[0], want[0])


def test_what_sums_up_as_it_writes_is_not_delayed() -> None:
    """Nor a pass that has kept nothing: RMSNorm reads its row again, and gained nothing."""
    assert not any("waits" in source_of(made).text for made in (loops.rms_norm(256, 1024), loops.sum_exp(256, 1024)))


def masked(x: torch.Tensor) -> torch.Tensor:
    """Attention's weights: rows of two dimensions that cannot be merged."""
    return (x[:, :32] * 0.125).masked_fill(x[:, 32:] > 1, -torch.inf).softmax(-1) * 2


FUNCTIONS = {
    "masked": masked,
    "activated": lambda x: torch.nn.functional.layer_norm(torch.nn.functional.gelu(x), (64,)),
    "dropped": lambda x: torch.nn.functional.dropout(x.exp(), 0.5) / x.exp().sum(-1, keepdim=True) + x[:, :1],
    "normal": lambda x: torch.nn.functional.rms_norm(torch.nn.functional.silu(x + x[:, :, :1]), (64,)) + x,
    "logarithms": lambda x: x.sigmoid().log_softmax(-1).tanh(),
    "columns": lambda x: (x.softmax(-1), x.softmax(-1).sum((0, 1))),
}


MARKS = {"masked": "where", "activated": "one_plus_erf", "normal": "neg"}
"""Functions whose last pass waits, and an operation that is in no other one's kernels."""


def every(xs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """All functions in one graph, each of an input of its own size, so that no kernel serves two."""
    return {name: FUNCTIONS[name](x) for name, x in xs.items()}


@pytest.mark.parametrize(("dynamic", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (None, torch.float32)])
def test_what_models_compute_comes_out_as_without(
    dynamic: bool | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However little it is, with sizes of rows alone that vary, with random numbers.

    Known sizes are those of one call: another call would be another graph of the same kernels.
    """
    for module in (parallelize, printer):
        monkeypatch.setattr(module, "MIN_PARALLEL_WORK", 0)
    own, delayed = kernel.plan_kernel, set[str]()

    def planned(*given: Any) -> NestPlan:
        plan = own(*given)
        delayed.update(value.op for value in plan.nest.body if plan.late and isinstance(value, Apply))
        return plan

    monkeypatch.setattr(kernel, "plan_kernel", planned)

    calls = [
        {name: torch.randn(rows + place, 64, 64).to(dtype) for place, name in enumerate(FUNCTIONS)}
        for rows in ((3,) if dynamic is False else (3, 5, 2))
    ]
    for x in calls[0].values() if dynamic is None else ():
        torch._dynamo.maybe_mark_dynamic(x, 0)  # or the first call would be another graph, of known sizes
    results: list[list[dict[str, Any]]] = []
    for skip in ("", "pipeline_last_pass"):
        torch._dynamo.reset()
        options = {"receipt": False, "skip": skip, "cache_dir": str(tmp_path / str(len(results)))}
        compiled = dcompile.compile(every, dynamic=dynamic, options=options)
        results.append([])
        for xs in calls:
            torch.manual_seed(3)
            results[-1].append(compiled(xs))
    for one, other in zip(*results, strict=True):
        for name in FUNCTIONS:
            pairs = zip(*map(tree_leaves, (one[name], other[name])), strict=True)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs), name
    assert {*MARKS.values()} <= delayed
