"""dynamic=None, True and False as torch.compile means them: how often Dynamo compiles, and which graph then runs."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import dcompile
from dcompile import compat
from dcompile.capture.entry import find_model


@pytest.fixture(autouse=True)
def fresh_counters(compiled_anew):
    counters.clear()


def function(x, w):
    return torch.relu(x @ w).softmax(-1) * x.shape[0]


SEQUENCES = {
    "one size": [(4, 6)] * 3,
    "rows vary": [(4, 6), (7, 6), (4, 6), (9, 6), (2, 6), (7, 6)],
    "both vary": [(4, 6), (7, 6), (7, 5), (4, 6), (7, 6), (4, 5), (3, 2)],
    "one row, none": [(4, 6), (1, 6), (5, 6), (0, 6), (1, 6), (4, 6)],
    "both at once": [(4, 6), (5, 7), (6, 8), (4, 6), (4, 8)],
}


def compiles(compile_, sequence, mark=None):
    """How many graphs there are after each call."""
    torch.compiler.reset()
    counters.clear()
    compiled = compile_(lambda x, w: function(x, w))
    found = []
    for rows, columns in sequence:
        x, w = torch.randn(rows, columns), torch.randn(columns, 3)
        if mark is not None:
            torch._dynamo.mark_dynamic(x, mark)
        torch.testing.assert_close(compiled(x, w), function(x, w))
        found.append(counters["stats"]["unique_graphs"])
    return found


def sequences():
    """Each with each setting; fixed sizes of both kinds at once are, in a usual run, those of rows."""
    for dynamic in (None, True, False):
        for name, sequence in SEQUENCES.items():
            marks = pytest.mark.full if dynamic is False and name.startswith("both") else ()
            yield pytest.param(sequence, dynamic, id=f"{name}-{dynamic}", marks=marks)


@pytest.mark.parametrize(("sequence", "dynamic"), [*sequences()])
def test_as_many_graphs_as_stock_torch_compile_makes(sequence, dynamic):
    ours = compiles(lambda f: dcompile.compile(f, dynamic=dynamic, options={"receipt": False}), sequence)
    assert ours == compiles(lambda f: torch.compile(f, dynamic=dynamic, backend="eager"), sequence)


def test_a_marked_dimension_is_dynamic_from_the_first_call_on():
    sequence = [(4, 6), (7, 6), (9, 6)]
    ours = compiles(lambda f: dcompile.compile(f, options={"receipt": False}), sequence, mark=0)
    assert ours == compiles(lambda f: torch.compile(f, backend="eager"), sequence, mark=0) == [1, 1, 1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return nn.functional.cross_entropy(self.second(torch.tanh(self.norm(self.first(x)))), x.argmax(-1) % 4)


@pytest.mark.skipif(not compat.dynamo.keeps_static_graphs(), reason="this torch always asks the newest graph first")
def test_a_ragged_last_batch_never_demotes_the_usual_size():
    model, theirs = Net(), Net()
    theirs.load_state_dict(model.state_dict())
    dcompile.compile(model, options={"receipt": False})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    ran = []
    for rows in (32, 32, 7, 32, 32, 5, 32):
        x = torch.randn(rows, 6)
        for net, optimizer in zip((model, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            net(x).backward()
            optimizer.step()
        (graph,) = find_model(model).newest.graphs
        ran.append(graph)
    assert ran == [0, 0, 1, 0, 0, 1, 0], "the static graph serves its size before and after the odd batch"
    assert counters["stats"]["unique_graphs"] == 2
    static, dynamic = find_model(model).graphs
    assert not any("def sizes" in e.source for e in static.executables.values())
    assert all("def sizes" in e.source for e in dynamic.executables.values())
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_size_met_before_is_not_prepared_again():
    compiled = dcompile.compile(lambda x: (x * 2).sum(-1) + 1, dynamic=True, options={"receipt": False})
    for rows in (4, 9, 4, 9):
        compiled(torch.randn(rows, 5))
    (graph,) = find_model(compiled).graphs
    program = graph.executables["inference"]
    (workspace,) = program._workspaces.idle[-1]
    prepared = workspace._prepared[program]
    assert sorted(prepared.calls) == [(4, 5), (9, 5)]
