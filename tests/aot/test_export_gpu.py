"""Programs ahead of time on a GPU: exported for it, or compiled by `aot_compile` and loaded. `-m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcompile
from dcompile.runtime.measure.region_times import measure_us
from tests.aot.test_aot_compile import ahead_of_time, gradients, reloaded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Attention(nn.Module):
    """A norm, attention, and a residual feed-forward layer, with a constant among the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all_heads, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.all_heads(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + nn.functional.gelu(self.out(attended.transpose(1, 2).flatten(2))) * self.scale


def near(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


def test_an_exported_model_runs(tmp_path: Path) -> None:
    """Exported from the CPU, with a size that varies."""
    torch.manual_seed(0)
    model, name = Attention().eval(), "sm_{}{}".format(*torch.cuda.get_device_capability())
    rows = torch.export.Dim("rows", min=2, max=64)
    dcompile.export(model, (torch.randn(4, 8, 64),), dynamic_shapes=({0: rows},), path=tmp_path / "model", gpu=name)
    loaded, model = dcompile.load(tmp_path / "model"), model.cuda()
    with torch.no_grad():
        for count in (4, 9):
            x = torch.randn(count, 8, 64, device="cuda")
            near(loaded(x), model(x))


def test_a_module_computes_ahead_of_time() -> None:
    model, x = Attention().eval().cuda(), torch.randn(4, 8, 64, device="cuda")
    compiled = ahead_of_time(model, x)
    with torch.no_grad():
        for function in (compiled, reloaded(compiled)):
            near(function(model, x), model(x))


def test_a_module_trains_ahead_of_time() -> None:
    torch.manual_seed(0)
    model, x = Attention().cuda(), torch.randn(4, 8, 64, device="cuda", requires_grad=True)
    compiled = ahead_of_time(model, x, trains=True)
    leaves = (x, *model.parameters())
    expected = gradients(model(x), *leaves)
    for function in (compiled, reloaded(compiled)):
        for _ in range(2):
            near(gradients(function(model, x), *leaves), expected)


def test_a_region_is_timed_by_the_gpu() -> None:
    """A product of 137 GFLOP takes a GPU 0.1 to 50 ms, and its launch some microseconds."""
    layout = ((4096, 4096), (4096, 1), torch.float32)
    us = measure_us(lambda values: values[0] @ values[1], [layout, layout], 1 << 26, torch.device("cuda"))
    assert us is not None and 1e2 < us < 5e4
