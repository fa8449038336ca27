"""What is compiled calls an engine that keeps parameters in step by itself: the receipt says so."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import dcompile

# Dynamo looks at .grad of what comes out of the graph before a break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Engine(nn.Module):
    """In the place of DeepSpeed's, whose timers end TorchDynamo's graph."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.module(x)


@pytest.fixture
def engine(monkeypatch):
    module = ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = Engine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Engine()


def trained(engine):
    @dcompile.compile
    def step(x):
        return engine(x).square().mean()

    step(torch.ones(2, 4)).backward()
    return dcompile.receipt(step)


def test_an_engine_inside_has_a_reason(engine):
    receipt = trained(engine)
    assert not receipt.eligible
    assert any("dcompile.integrations.deepspeed.compile(engine)" in reason for reason in receipt.reasons)


def test_an_engine_that_was_compiled_shares_the_receipt(engine):
    dcompile.compile(engine.module)
    receipt = trained(engine)
    assert receipt.eligible and not receipt.reasons and receipt.graphs == 2
