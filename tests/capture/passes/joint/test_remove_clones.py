"""Copies that change nothing are gone from joint graphs; those that matter stay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile.capture.passes.joint.remove_clones import remove_clones

aten = torch.ops.aten


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def copies(gm):
    return len(gm.graph.find_nodes(op="call_function", target=aten.clone.default))


def test_a_copy_of_a_computed_value_goes():
    gm = traced(
        lambda x: (x.relu().clone() * 2, x.sin().clone(memory_format=torch.preserve_format) + 1), torch.randn(3, 4)
    )
    assert copies(gm) == 2 and remove_clones(gm).changes == 2 and copies(gm) == 0
    x = torch.randn(3, 4)
    torch.testing.assert_close(gm(x)[0], x.relu() * 2, rtol=0, atol=0)


def test_copies_of_inputs_results_and_other_layouts_stay():
    def function(x):
        y = x.exp()
        return x.t().clone().sin(), y.clone(), y, y.t().clone(memory_format=torch.contiguous_format).cos()

    gm = traced(function, torch.randn(3, 4))
    assert copies(gm) == 3 and remove_clones(gm).changes == 0


def test_nothing_goes_where_a_graph_writes():
    gm = traced(lambda x: x.exp().clone().add_(1) * 2, torch.randn(3))
    assert remove_clones(gm).changes == 0


def test_dropout_of_zero_saves_nothing():
    """Of two linear layers with a ReLU and an idle dropout between them, the ReLU's result alone is saved."""
    first, second = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)
    saved = []

    def model(x):
        return second(F.dropout(first(x).relu(), 0.0))

    def step(call, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            loss = call(x).square().sum()
        loss.backward()
        found = [loss.detach(), first.weight.grad.clone(), second.weight.grad.clone()]
        first.zero_grad(), second.zero_grad()
        return found

    x = torch.randn(2, 5, 8)
    wanted = step(model, x)
    saved.clear()
    found = step(dcompile.compile(model, options={"receipt": False}), x)
    torch.testing.assert_close(found, wanted)
    assert sum(shape.numel() == 2 * 5 * 16 for shape in saved) == 1
