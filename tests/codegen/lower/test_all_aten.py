"""Graphs left to ATen: bit-identical to running the FX graph, whatever is in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.lower import lower
from dcompile.ir.nodes import Extern, Loop
from dcompile.ir.verify import verify
from tests.codegen.lower.lowered import run_aten


def trace(function: Any, *args: torch.Tensor, mode: str = "fake") -> torch.fx.GraphModule:
    return make_fx(lambda *a: function(*a), tracing_mode=mode)(*args)


def check(gm: torch.fx.GraphModule, *args: Any, **settings: Any) -> list[str]:
    """Runs the program and the graph; returns the ops of the program."""
    lowered = lower(gm, "graph", **settings)
    verify(lowered.program)
    ours, theirs = [[a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2)]
    torch.manual_seed(0)
    expected = gm(*theirs)
    torch.manual_seed(0)
    actual = run_aten(lowered.program, lowered.constants, ours)
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    for a, e in zip([*actual, *ours], [*expected, *theirs], strict=True):
        if isinstance(e, torch.Tensor):
            assert a.dtype == e.dtype and a.stride() == e.stride()
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == e
    return [step.op for step in lowered.program.steps if isinstance(step, Extern)]


def test_every_op_is_a_call() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = torch.nn.functional.dropout(torch.mm(x, w.t()).relu(), 0.5)
        values, positions = y.view(2, -1).topk(3)
        return values.to(torch.bfloat16).sum(), positions[:, ::2], y.transpose(0, 1)

    gm = trace(model, torch.randn(4, 6), torch.randn(4, 6))
    ops = check(gm, torch.randn(4, 6), torch.randn(4, 6), aten=True)
    assert "aten.mm.default" in ops and "aten.topk.default" in ops


def test_symbolic_sizes() -> None:
    def model(x: torch.Tensor) -> Any:
        n = x.shape[0] * 2
        return torch.cat([x, x * 2]).reshape(n // 2, -1).sum(1) + torch.arange(x.shape[0]), n

    gm = trace(model, torch.randn(4, 6), mode="symbolic")
    ops = check(gm, torch.randn(5, 6), aten=True)
    assert "aten.sym_size.int" in ops and "operator.mul" in ops
    check(gm, torch.randn(7, 2), aten=True)


def test_writing_to_an_input() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x + y
        x.copy_(total * 2)
        return total

    check(trace(model, torch.randn(3), torch.randn(3)), torch.randn(3), torch.randn(3), aten=True)


def test_an_intermediate_whose_shape_is_changed_in_place() -> None:
    check(trace(lambda x: torch.ops.aten.squeeze_.dim(x * 2, 0) + 1, torch.randn(1, 3)), torch.randn(1, 3))


def test_attributes_become_constants() -> None:
    gm = trace(lambda x: x + torch.tensor([0.0, 1, 2, 3, 4]), torch.randn(5))
    lowered = lower(gm, "graph", aten=True)
    assert len(lowered.constants) == 1 and lowered.program.inputs[-1] in lowered.constants
    check(gm, torch.randn(5), aten=True)


def test_an_intermediate_changed_in_place_is_left_to_aten_and_counted() -> None:
    gm = trace(lambda x: (x * 2).add_(1).relu_(), torch.randn(4))
    lowered = lower(gm, "graph")
    assert all(isinstance(step, Extern) and step.fallback for step in lowered.program.steps)
    assert any("not an input" in line for line in lowered.program.steps[0].origin)
    check(gm, torch.randn(4))


@pytest.mark.parametrize("aten", [True, False])
def test_arguments_that_have_no_text(aten: bool) -> None:
    """torch.cond takes graphs: they are bound into a function among the constants."""

    def model(p: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.cond(p, lambda x: x.sin() + 1, lambda x: x.cos(), (x * 2,))

    gm = trace(model, torch.tensor(True), torch.randn(4))
    lowered = lower(gm, "graph", aten=aten)
    verify(lowered.program)
    (call,) = [s for s in lowered.program.steps if isinstance(s, Extern) and s.op == "dcompile.call"]
    assert call.effect and call.fallback is not aten
    assert aten or any(isinstance(s, Loop) for s in lowered.program.steps)
    if aten:
        for p in (True, False):
            check(gm, torch.tensor(p), torch.randn(4), aten=True)


@pytest.mark.parametrize("aten", [True, False])
def test_a_function_without_schema_returns_its_only_result_by_itself(aten: bool) -> None:
    """torch.cond returns a tuple of one, and nothing in the program says so: the bound function unpacks it."""

    def model(p: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.cond(p, lambda x: x.sin() + 1, lambda x: x.cos(), (x * 2,))

    lowered = lower(trace(model, torch.tensor(True), torch.randn(4)), "graph", aten=aten)
    (call,) = [s for s in lowered.program.steps if isinstance(s, Extern) and s.op == "dcompile.call"]
    assert len(call.outs) == 1
    x = torch.randn(4)
    result = lowered.constants[call.args[0].buffer](torch.tensor(True), x)
    assert torch.equal(result, x.sin() + 1)
