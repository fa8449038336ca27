"""What ranks compare of a graph is the same whichever sizes one of them has found to vary."""

import torch
from torch.utils.checkpoint import checkpoint

from dcompile.capture.fingerprint import calls_of


def captured(function, *inputs, dynamic):
    """The lines of its one graph."""
    found = []

    def backend(gm, _inputs):
        found.extend(calls_of(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    return [line for line, _ in found]


def function(x, weight):
    """Sizes in calls, in a part of the graph that has them as inputs, and worked out."""
    rows = torch.arange(x.shape[0])
    part = checkpoint(lambda y: (y.view(x.shape[0] * 2, -1) @ weight).sin(), x, use_reentrant=False)
    return part.reshape(x.shape[0], -1) + x.new_ones(x.shape[0], 1) * rows[:, None]


def test_lines_are_the_same_with_fixed_and_with_symbolic_sizes():
    inputs = torch.randn(6, 8), torch.randn(4, 4)
    fixed, symbolic = (captured(function, *inputs, dynamic=dynamic) for dynamic in (False, True))
    assert len(fixed) > 5 and fixed == symbolic


def test_lines_differ_where_calls_do():
    inputs = torch.randn(6, 8), torch.randn(4, 4)
    assert captured(function, *inputs, dynamic=True) != captured(
        lambda x, weight: function(x, weight).cos(), *inputs, dynamic=True
    )
