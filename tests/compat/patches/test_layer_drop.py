"""Branches on random numbers that go one way break no graph; others do, and tensors stay tensors."""

from __future__ import annotations

import operator

import pytest
import torch

import dcompile
from dcompile.compat.patches.layer_drop import certain_branches_taken


class Stack(torch.nn.Module):
    """Layers with LayerDrop, as in transformers' encoders up to version 5.17."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers, self.probability = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)), probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            skipped = self.training and torch.rand([]) < self.probability
            if not skipped:
                x = x + layer(x).tanh()
        return x


def graphs_of(function, *args):
    """Return the number of graphs of a call, and its result."""
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    with certain_branches_taken():
        result = torch.compile(function, backend=backend)(*args)
    return len(graphs), result


@pytest.mark.parametrize("probability", [0.0, pytest.param(1.0, marks=pytest.mark.full), 0.5])
def test_layers_are_one_graph_where_the_outcome_is_certain(probability):
    model, x = Stack(probability), torch.randn(2, 4)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    count, result = graphs_of(model, x)
    assert count == (0 if probability == 0.5 else 1), "Dynamo leaves a loop with a break to eager"
    torch.testing.assert_close(result, expected)


@pytest.mark.full
@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge], ids=lambda one: one.__name__)
@pytest.mark.parametrize("bound", [-1.0, 0.0, 0.5, 1, 2.0])
@pytest.mark.parametrize("mirrored", [False, True])
def test_outcomes_are_eagers(compare, bound, mirrored):
    def branch(x):
        number = torch.rand(())
        return x + 1 if (compare(bound, number) if mirrored else compare(number, bound)) else x - 1

    torch.manual_seed(0)
    expected = branch(torch.zeros(2))
    torch.manual_seed(0)
    count, result = graphs_of(branch, torch.zeros(2))
    assert torch.equal(result, expected)
    greater = (compare in (operator.gt, operator.ge)) != mirrored
    strict = compare in (operator.lt, operator.gt)
    certain = bound != 0.5 and not (bound == 0 and greater == strict)
    assert (count == 1) == certain, "otherwise a graph before the branch, and one behind it"


def test_comparisons_stay_tensors():
    def scaled(x):
        return x * (torch.rand(()) < 0.0).to(x.dtype)

    assert graphs_of(scaled, torch.ones(2))[0] == 1


@pytest.mark.full
def test_eagers_random_numbers_are_drawn_where_they_are_asked_for():
    model, x = Stack(0.0), torch.randn(2, 4)
    for options, graphs in (({}, 1), ({"fallback_random": True}, 0)):
        torch._dynamo.reset()
        call = dcompile.compile(model, options={**options, "receipt": False, "kernels": "aten"})
        torch.manual_seed(0)
        call(x).sum().backward()
        found = torch.rand(())
        torch.manual_seed(0)
        model(x)
        assert dcompile.receipt(call).graphs == graphs
        assert not options or torch.equal(found, torch.rand(()))
