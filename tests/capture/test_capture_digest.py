"""What ranks compare of a graph is the same whichever sizes one of them has found to vary."""

import torch
from torch.utils.checkpoint import checkpoint

from dcompile.capture.capture_digest import calls_of
from dcompile.compat.aot_metadata import user_line


def captured(function, *inputs, dynamic):
    """The lines of its one graph."""
    found = []

    def backend(gm, _inputs):
        found.extend(calls_of(gm, {}))
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


def test_inputs_that_have_other_names_in_a_frame_with_a_break_are_the_same():
    class Model(torch.nn.Module):
        def __init__(self, breaks):
            super().__init__()
            self.layer, self.breaks = torch.nn.Linear(4, 4), breaks

        def forward(self, x):
            y = self.layer(x).relu()
            if self.breaks:
                torch._dynamo.graph_break()
            return y.cos()

    def lines(model):
        found = []

        def backend(gm, inputs):
            params = {n: "weight" for n, value in enumerate(inputs) if value is model.layer.weight}
            found.append([*calls_of(gm, params)])
            return gm.forward

        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(lambda *args: model(*args), backend=backend)(torch.randn(2, 4))
        return found[0]

    whole, first = lines(Model(False)), lines(Model(True))
    assert len(whole) == 3 and whole[:2] == first
    assert "(input0, weight, input2)" in whole[0][0]


def test_a_line_is_the_users_where_dcompile_calls_its_modules():
    node = torch.fx.Graph().placeholder("x")
    ours = calls_of.__globals__["__file__"]
    node.meta["stack_trace"] = f'  File "/home/m.py", line 3, in forward\n    x\n  File "{ours}", line 9, in _forward\n'
    assert user_line(node) == "m.py:3"


def test_lines_differ_where_calls_do():
    inputs = torch.randn(6, 8), torch.randn(4, 4)
    assert captured(function, *inputs, dynamic=True) != captured(
        lambda x, weight: function(x, weight).cos(), *inputs, dynamic=True
    )
