"""Broadcast tensors are added to matmuls behind them, no further from float64 than in the matmul."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import dcompile
from dcompile.capture.passes.joint.broadcast_addends import separate_broadcast_addends
from tests.traits import change_cpu

aten = torch.ops.aten
ADDING = (aten.addmm.default, aten.baddbmm.default)
HEADS, ROWS, WIDTH = 4, 48, 32


@pytest.fixture(autouse=True)
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a device whose matmuls copy what they add."""
    change_cpu(monkeypatch, copies_broadcast_addends=True)


def in_float32(added: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores as in BLOOM, read in float32 alone."""
    scores = torch.baddbmm(added, q, k.mT, beta=0.5, alpha=0.125).view(2, HEADS // 2, ROWS, ROWS)
    return F.softmax(scores, -1, dtype=torch.float32)


def in_16_bits(added: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores that are masked and normalized in 16 bits."""
    scores = torch.baddbmm(added, q, k.mT).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -100.0)
    return F.softmax(scores, -1) * 2


def of_matrices(added: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """One value for each row, and another matmul's bias scaled."""
    first = torch.addmm(added[0, :1].mT, q[0], k[0].mT, alpha=0.2)
    return F.softmax(first, 0) + F.softmax(torch.addmm(added[1, 0], q[1], k[1].mT, beta=2, alpha=0.2), -1)


def masked(added: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A mask of zeros in 16 bits, which eager adds without rounding, before a softmax in float32."""
    scores = torch.baddbmm(added, q, k.mT, alpha=0.2)
    return F.softmax(scores + torch.zeros(ROWS, ROWS, dtype=q.dtype), -1, dtype=torch.float32)


def given(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (HEADS, 1, ROWS), (HEADS, ROWS, WIDTH), (HEADS, ROWS, WIDTH)
    return [torch.randn(*size).to(dtype).requires_grad_() for size in sizes]


def traced(function: Any, *args: torch.Tensor) -> Any:
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def results(function: Any, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and its gradients."""
    result = function(*args)
    return [result, *torch.autograd.grad(result.float().square().sum(), args)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("function", "count"), [(in_float32, 1), (in_16_bits, 1), (masked, 1), (of_matrices, 2)])
def test_no_matmul_adds(function: Any, count: int, dtype: torch.dtype) -> None:
    args = given(dtype)
    gm = traced(function, *args)
    assert separate_broadcast_addends(gm).changes == count
    gm.graph.lint()
    left = [node for node in gm.graph.nodes if node.target in ADDING]
    assert all(node.kwargs["beta"] == 0 and node.kwargs["alpha"] != 1 for node in left)
    with torch.no_grad():
        found, eager = gm(*args), function(*args)
    assert found.dtype == eager.dtype and found.stride() == eager.stride()
    exact = function(*(x.detach().double() for x in args))
    assert (found - exact).norm() <= 1.05 * (eager - exact).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("function", [in_float32, in_16_bits, masked, of_matrices])
def test_compiled_results_are_as_near_as_eagers(function: Any, dtype: torch.dtype) -> None:
    args = given(dtype)
    exact = results(function, [x.detach().double().requires_grad_() for x in args])
    eager = results(function, args)
    torch._dynamo.reset()
    found = results(dcompile.compile(function), args)
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        off, allowed = ((one.double() - true).norm() for one in (ours, theirs))
        assert off <= 1.1 * allowed


def test_checkpointed_matmuls_are_still_recomputed() -> None:
    gm = traced(in_float32, *given(torch.bfloat16))
    (matmul,) = (node for node in gm.graph.nodes if node.target in ADDING)
    matmul.meta |= {"recompute": "as the region says", "ac_graph_id": 3}
    assert separate_broadcast_addends(gm).changes
    (product, total) = (n for n in gm.graph.nodes if n.target in (*ADDING, aten.add.Tensor))
    assert all(n.meta["recompute"] == "as the region says" and n.meta["ac_graph_id"] == 3 for n in (product, total))


def test_a_factor_stays_in_the_matmul() -> None:
    """Without it, scores exceed the range of float16."""
    added, q, k = (torch.full(shape, 256.0).half() for shape in ((1, 1, 4), (1, 4, 4), (1, 4, 4)))

    def scores(added: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(added, q, k, alpha=2**-6).float()

    gm = traced(scores, added, q, k)
    assert separate_broadcast_addends(gm).changes
    assert gm(added, q, k).eq(4 * 256 * 256 / 64 + 256).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda added, q, k: torch.baddbmm(added.expand(HEADS, ROWS, ROWS).clone(), q, k.mT).float(),
        lambda added, q, k: torch.baddbmm(added, q, k.mT, beta=0).float(),
        lambda added, q, k: torch.addmm(added[0, 0], q[0], k[0].mT).float(),
        lambda added, q, k: torch.baddbmm(added, q, k.mT),
        lambda added, q, k: torch.baddbmm(added, q, k.mT).mT @ q,
        lambda added, q, k: torch.baddbmm(added, q, k.mT).tanh(),
        lambda added, q, k: (torch.baddbmm(added, q, k.mT) + 1) @ q,
    ],
    ids=[
        "a full addend",
        "nothing added",
        "a bias",
        "returned",
        "read by a matmul",
        "read by tanh",
        "rounded for a matmul",
    ],
)
def test_what_stays(function: Any) -> None:
    gm = traced(function, *given(torch.bfloat16))
    assert not separate_broadcast_addends(gm).changes
    assert any(node.target in ADDING for node in gm.graph.nodes)


def test_cpus_matmuls_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gm = traced(in_float32, *given(torch.bfloat16))
    assert not separate_broadcast_addends(gm).changes
