"""Tensors of classes of the user's own at the border of a graph, compared with eager mode."""

import copy

import pytest
import torch
from torch import nn

import dcompile


class Image(torch.Tensor):
    """As data libraries have them: it keeps its class through functions, and has methods of its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})

    def thrice(self):
        return self * 3


class Model(nn.Module):
    def __init__(self, changes):
        super().__init__()
        self.linear, self.changes = nn.Linear(8, 4), changes

    def forward(self, x):
        if self.changes:
            x.mul_(2)
        return self.linear(x.thrice())


@pytest.mark.parametrize("changes", [False, True])
def test_a_class_of_tensors_that_changes_no_operator_comes_and_goes(changes):
    torch.manual_seed(0)
    eager = Model(changes)
    own = dcompile.compile(copy.deepcopy(eager))
    for rows in (3, 3, 5):
        data, found = torch.randn(rows, 8), []
        for model in (eager, own):
            x = data.clone().as_subclass(Image).requires_grad_(not changes)
            y = model(x)
            y.sum().backward()
            found.append([type(y), type(x.grad), *(t.as_subclass(torch.Tensor) for t in (y.detach(), x.detach()))])
            found[-1] += [parameter.grad for parameter in model.parameters()]
            found[-1] += [] if changes else [x.grad.as_subclass(torch.Tensor)]
        assert found[0][:2] == found[1][:2] and found[0][0] is Image
        torch.testing.assert_close(found[1][2:], found[0][2:])
