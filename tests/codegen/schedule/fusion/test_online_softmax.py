"""Sums of exponentials below a row's largest element become one pass, on GPUs, whatever is fused with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dcompile.codegen.schedule.fusion import loop_order
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.loop_order import use_online_softmax
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Load, Loop, Program, Reduce, Store
from dcompile.ir.parse import parse
from dcompile.ir.verify import verify
from tests.codegen.emit import cpp_kernel, loops
from tests.codegen.emit.harness import run


@pytest.fixture(autouse=True)
def _short_rows_are_long(monkeypatch):
    monkeypatch.setattr(loop_order, "MAX_PERSISTENT_ELEMENTS", 16)
    monkeypatch.setattr(loop_order, "MULTIPROCESSORS", 4)


def on_gpu(program: Program) -> Program:
    return replace(program, buffers=tuple(replace(b, device="cuda") for b in program.buffers))


def apart(rows: int = 5, n: int = 40, device: str = "cuda") -> Program:
    """As a log-softmax comes from lowering: a maximum, differences, the sum of their exponentials, each a loop."""
    return parse(f"""
        program apart(x)
          x: float32[{rows}, {n}] on {device}
          top: float32[{rows}] on {device}
          below: float32[{rows}, {n}] on {device}
          total: float32[{rows}] on {device}
        loop top [{rows}] x [{n}]
          top[i0] = row_max(x[i0, j0])
        loop below [{rows}, {n}]
          below[i0, i1] = sub(x[i0, i1], top[i0])
        loop total [{rows}] x [{n}]
          total[i0] = row_sum(exp(below[i0, j0]))
        return (top, total)
    """)


def sums(program: Program) -> list[str]:
    bodies = [value for step in program.steps if isinstance(step, Loop) for value in step.body]
    return [value.op for value in bodies if isinstance(value, Reduce)]


def test_a_maximum_and_a_sum_in_loops_of_their_own_are_joined():
    before = apart()
    after = use_online_softmax(before)
    verify(after)
    assert sums(after) == ["max", "sum_exp"] and len(after.steps) == 2
    assert len(fuse(after).steps) == 1, "the differences are not needed any more"
    x = np.random.default_rng(0).normal(size=(5, 40)).astype(np.float32) * 9
    for want, got in zip(interpret(before, {"x": x}), interpret(after, {"x": x}), strict=True):
        assert np.allclose(want, got, rtol=1e-6)


def test_it_does_not_matter_what_was_fused_before():
    assert sums(use_online_softmax(fuse(apart()))) == sums(fuse(use_online_softmax(apart())))


def test_a_softmax_keeps_its_maximum():
    after = use_online_softmax(on_gpu(loops.softmax(5, 40)))
    verify(after)
    assert sorted(sums(after)) == ["max", "sum_exp"]


@pytest.mark.parametrize(
    "program",
    [
        apart(device="cpu"),
        apart(rows=5, n=16),
        apart(rows=3),
        on_gpu(loops.rms_norm(5, 40)),
    ],
    ids=["on the CPU", "short rows", "few rows", "no exponentials"],
)
def test_other_sums_stay_as_they_are(program):
    assert use_online_softmax(program) == program


def test_a_sum_stays_where_what_it_reads_changes_before_it():
    """Another loop overwrites x between the maximum and the sum."""
    program = apart()
    top, below, total = program.steps
    at = var("i0")
    change = Loop("change", (200,), (), (Load("x", at, "float32"), Apply("neg", (0,), "float32")), (Store("x", at, 1),))
    changed = replace(program, steps=(top, change, below, total))
    assert "sum_exp" not in sums(use_online_softmax(changed))


@pytest.mark.parametrize("row", [[-np.inf] * 40, [np.inf] + [0.0] * 39, [np.nan] * 40, [-np.inf] * 39 + [2.0]])
def test_infinities_mean_what_they_mean_in_two_passes(row):
    x = np.array([row] * 5, np.float32)
    want, got = (interpret(program, {"x": x})[1] for program in (apart(), use_online_softmax(apart())))
    assert np.array_equal(want, got, equal_nan=True)


def test_the_cpu_sums_in_two_passes():
    """No pass makes such sums for it, but the operation means the same there."""
    program = loops.sum_exp(6, 50)
    x = np.random.default_rng(1).normal(size=(6, 50)).astype(np.float32)
    (kernel,) = cpp_kernel.emit_all(program).calls
    assert "sum_exp" not in kernel.text.replace(kernel.name, "")
    for want, got in zip(interpret(program, {"x": x}), run(program, {"x": x}), strict=True):
        assert np.allclose(want, got, rtol=1e-6)
