"""What FX passes and compiled autograd hand to a compiler: GraphModules, with lists among their inputs."""

import copy

import pytest
import torch
from torch import fx, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import dcompile

pytestmark = [
    pytest.mark.usefixtures("compiled_anew", "quiet"),
    # compiled autograd itself looks at .grad of what is no leaf
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    counters.clear()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.b(torch.tanh(self.a(x)))) + 1


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.a(x))


def in_place(module):
    module.compile(backend="dcompile", fullgraph=True)
    return module


DOORS = {
    "torch.compile": lambda module: torch.compile(module, backend="dcompile", fullgraph=True),
    "dcompile.compile": lambda module: dcompile.compile(module, fullgraph=True),
    "Module.compile": in_place,
    "call": lambda module: torch.compile(module.__call__, backend="dcompile", fullgraph=True),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_graph_modules_are_compiled_whole(door):
    traced, x = fx.symbolic_trace(Net()), torch.randn(2, 4)
    expected = copy.deepcopy(traced)(x)
    call = door(traced)
    torch.testing.assert_close(call(x), expected)
    call(x).sum().backward()
    assert dcompile.receipt(traced).graphs == 1 and not counters["graph_break"]


def test_a_graph_that_is_edited_counts_from_the_next_call():
    traced, x = fx.symbolic_trace(Net()), torch.randn(2, 4)
    call = torch.compile(traced, backend="dcompile")
    before = call(x)
    for node in list(traced.graph.nodes):
        if node.op == "output":
            with traced.graph.inserting_before(node):
                node.args = (traced.graph.call_function(torch.neg, node.args),)
    traced.recompile()
    torch.testing.assert_close(call(x), -before)


def test_a_class_with_a_call_of_its_own_is_called_by_it():
    class Doubled(fx.GraphModule):
        def __call__(self, x):
            return super().__call__(x) * 2

    net, x = Net(), torch.randn(2, 4)
    module = Doubled(net, fx.symbolic_trace(net).graph)
    torch.testing.assert_close(torch.compile(module, backend="dcompile")(x), net(x) * 2)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_autograd(fullgraph):
    net, x = Small(), torch.randn(2, 4)
    stock = copy.deepcopy(net)
    for _ in range(2):
        stock(x).sum().backward()
    with compiled_autograd._enable(torch.compile(backend="dcompile", fullgraph=fullgraph)):
        for _ in range(2):
            net(x).sum().backward()
    for own, other in zip(net.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_compiled_autograd_of_a_compiled_step():
    """Its graph takes what the forward has saved as one list."""
    net, x = Small(), torch.randn(2, 4)
    stock = copy.deepcopy(net)
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="dcompile")
        def train(x):
            loss = net(x).sum()
            loss.backward()
            return loss

        for rows in (2, 3, 5):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(train(x), stock(x).sum())
            stock(x).sum().backward()
    for own, other in zip(net.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
