"""Rows between normalizations are contiguous, whatever layout enters; results are the same, strides included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import dcompile
from dcompile.capture.passes.joint.contiguous_rows import keep_rows_contiguous

aten = torch.ops.aten
X, PLACES, WEIGHT = torch.randn(2, 32, 40), torch.randn(40, 32), torch.randn(32, 32)


def traced(function: Any, *args: torch.Tensor) -> Any:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def stream(x: torch.Tensor, places: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two residual layers behind features over time; also returns the sum that a caller sees permuted."""
    first = x.permute(0, 2, 1) + places
    second = first + F.layer_norm(first, (32,)) @ weight
    return first, F.layer_norm(second, (32,)).cos()


def by_mean(x: torch.Tensor, places: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same with a root mean square, from single operations."""
    first = x.permute(0, 2, 1) + places
    return (first * (first.square().mean(-1, keepdim=True) + 1e-5).rsqrt()) @ weight


@pytest.mark.parametrize("function", [stream, by_mean])
def test_sums_are_contiguous_inside_and_the_border_stays(function: Any) -> None:
    gm = traced(function, X, PLACES, WEIGHT)
    assert keep_rows_contiguous(gm).changes
    sums = [node for node in gm.graph.nodes if node.target is aten.add.Tensor and node.meta["val"].shape == (2, 40, 32)]
    assert sums and all(node.meta["val"].is_contiguous() for node in sums)
    given, wanted = gm(X, PLACES, WEIGHT), function(X, PLACES, WEIGHT)
    for found, expected in zip(*(x if isinstance(x, tuple) else (x,) for x in (given, wanted)), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, places, w: (x.permute(0, 2, 1) + places).permute(0, 2, 1) * 2,
        lambda x, places, w: F.layer_norm(x.permute(0, 2, 1) + places, (40, 32)),
        lambda x, places, w: F.layer_norm(x.permute(0, 2, 1)[:, :, :8] + 1, (8,)),
    ],
    ids=["not normalized", "along all dimensions", "short rows"],
)
def test_what_keeps_its_layout(function: Any) -> None:
    gm = traced(function, X, PLACES, WEIGHT)
    nodes = len(gm.graph.nodes)
    assert keep_rows_contiguous(gm).changes == 0 and len(gm.graph.nodes) == nodes


class Encoder(nn.Module):
    """A convolution over time, positions, and two layers with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 32, 3, padding=1)
        self.places = nn.Parameter(torch.randn(40, 32))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x)).permute(0, 2, 1) + self.places
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def test_training_gives_what_eager_gives() -> None:
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(2, 4, 40)
    compiled = dcompile.compile(model, options={"receipt": False})
    results = []
    for call in (compiled, model):
        model.zero_grad()
        found = call(x)
        found.square().mean().backward()
        results.append([found, *(parameter.grad for parameter in model.parameters())])
    assert results[0][0].stride() == results[1][0].stride()
    for ours, eagers in zip(*results, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
