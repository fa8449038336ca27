"""With ATen's kernels nothing is free to recompute: a forward saves what eager mode saves."""

from __future__ import annotations

import pytest
import torch

import dcompile


class Gated(torch.nn.Module):
    """Two gated blocks with norms, as language models have them."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (
            torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for _ in range(2))
            for a, b in ((8, 24), (8, 24), (24, 8))
        )

    def forward(self, x):
        for up, gate, down in zip(self.up, self.gate, self.down, strict=True):
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
            x = x + down(torch.nn.functional.silu(gate(y)) * up(y))
        return x.square().mean()


@pytest.mark.parametrize(("more", "again"), [({}, 0), ({"recompute": "memory"}, 2)], ids=["time", "memory"])
def test_the_backward_recomputes_only_where_memory_counts(tmp_path, more, again):
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(5, 8)
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled = dcompile.compile(model, options={"kernels": "aten", "receipt": False, "dump": str(tmp_path), **more})
    compiled(x).backward()
    assert all(map(torch.equal, (parameter.grad for parameter in model.parameters()), expected))
    backward = next(tmp_path.rglob("backward0/graph.py")).read_text()
    assert backward.count("aten.silu.default") == again
