"""Dynamic graphs planned for a GPU where there is none: every stage up to the host program takes symbolic sizes."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcompile.codegen.emit.host import program
from dcompile.compiler import driver
from dcompile.compiler.driver import ProgramPlan

pytestmark = pytest.mark.usefixtures("compiled_anew")


class Tagger(nn.Module):
    """What a model with symbolic lengths has: attention, norms, sums over symbolic rows, tables, a loss, dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.places = nn.LayerNorm(32), nn.Parameter(torch.randn(64, 32))
        self.qkv, self.out, self.head = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 9)

    def forward(self, x, labels):
        x = x + self.places[: x.shape[1]]
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        scores = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1)
        x = torch.cat([x, self.out((scores @ v).transpose(1, 2).reshape(x.shape)).tanh()], 1)
        return F.cross_entropy(self.head(F.gelu(x)).mean(1), labels)


@pytest.fixture
def plans(monkeypatch) -> list[tuple[ProgramPlan, str]]:
    """Each graph's plan and host program for a GPU; what runs are the library's calls."""
    found: list[tuple[ProgramPlan, str]] = []
    plan, lower = driver.Pipeline.plan, driver.lower

    def elsewhere(*args, **more):
        lowered = lower(*args, **more)
        buffers = tuple(replace(buffer, device="cuda:0") for buffer in lowered.program.buffers)
        return replace(lowered, program=replace(lowered.program, buffers=buffers))

    def both(self, gm, request, *measure):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "lower", elsewhere)
            made = plan(self, gm, request, *measure)
        found.append((made, program.emit(made.program, made.kernels, recycle=request.kind == "inference")))
        return plan(driver.Pipeline(replace(self.config, kernels="aten")), gm, request, *measure)

    monkeypatch.setattr(driver.Pipeline, "plan", both)
    return found


@pytest.mark.parametrize("model", [Tagger, lambda: nn.BatchNorm1d(5)], ids=["tagger", "norm over symbols"])
def test_every_stage_takes_symbolic_sizes(model, plans):
    module = model()
    inputs = (torch.randn(4, 5, 32), torch.randint(0, 9, (4,)))[: 2 if isinstance(module, Tagger) else 1]
    call = torch.compile(module, backend="dcompile", dynamic=True, fullgraph=True, options={"receipt": False})
    call(*inputs).square().sum().backward()
    assert len(plans) == 2
    for plan, text in plans:
        assert plan.kernels.calls and all(kernel.launches for kernel in plan.kernels.calls)
        assert any(kernel.sizes for kernel in plan.kernels.calls) and "run.number(s" in text
        for source in (text, *(kernel.text for kernel in plan.kernels.sources)):
            ast.parse(source)
