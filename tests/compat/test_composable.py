"""Layers that hooks of theirs run again in the backward, in compiled models of one process, against eager mode."""

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import dcompile

# Dynamo itself looks at .grad of a non-leaf when it goes on after a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(8, 16), nn.Linear(16, 8), breaks

    def forward(self, x, scale=1.0):
        x = self.up(x).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(x) * scale


class Model(nn.Module):
    def __init__(self, breaks=False, **how):
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks) for _ in range(2))
        self.last = nn.Linear(8, 4)
        for block in self.blocks:
            checkpoint(block, **how)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x, scale=0.5)
        return self.last(x)


def keep_products(_context, operation, *_args, **_kwargs):
    return (
        CheckpointPolicy.MUST_SAVE if operation is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
    )


def contexts():
    return create_selective_checkpoint_contexts(keep_products)


def see_that_it_learns_as_eager(own, eager):
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for model in (own, eager):
            model(x).square().sum().backward()
    found, expected = ([parameter.grad for parameter in model.parameters()] for model in (own, eager))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "how",
    [{}, {"preserve_rng_state": False}, {"context_fn": contexts}],
    ids=["usual", "without random numbers", "selective"],
)
def test_such_a_model_is_one_graph(how):
    torch.manual_seed(0)
    own, eager = Model(**how), Model(**how)
    own.load_state_dict(eager.state_dict())
    tables = [[*block._forward_pre_hooks.values(), *block._forward_hooks.values()] for block in own.blocks]
    dcompile.compile(own, fullgraph=True)
    see_that_it_learns_as_eager(own, eager)
    receipt = dcompile.receipt(own)
    assert (receipt.graphs, receipt.graph_breaks) == (1, 0)
    assert tables == [[*block._forward_pre_hooks.values(), *block._forward_hooks.values()] for block in own.blocks]
    assert all("forward" not in vars(block) for block in own.blocks)


def test_where_a_break_cuts_a_layer_it_runs_eagerly_whole():
    torch.manual_seed(0)
    own, eager = Model(breaks=True), Model(breaks=True)
    own.load_state_dict(eager.state_dict())
    dcompile.compile(own)
    see_that_it_learns_as_eager(own, eager)


def test_hooks_that_come_later_are_found():
    torch.manual_seed(0)
    own, eager = (nn.Sequential(Block(), nn.Linear(8, 4)) for _ in range(2))
    own.load_state_dict(eager.state_dict())
    dcompile.compile(own)
    see_that_it_learns_as_eager(own, eager)
    checkpoint(own[0])
    see_that_it_learns_as_eager(own, eager)
    assert dcompile.receipt(own).graph_breaks == 0
