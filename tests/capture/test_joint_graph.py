"""The sync token, which compiled programs never see, and the minimum cut: as networkx finds it."""

from __future__ import annotations

import copy
import functools
import math
import random

import networkx
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dcompile
from dcompile.capture.joint_graph import TOKEN, add_sync_token, minimum_cut, take_sync_token


def graph(inputs, outputs, mode):
    """A module with these inputs (tensors unless the name says n...), returning some of them."""
    made = torch.fx.Graph()
    nodes = {}
    with mode:
        for name in inputs:
            nodes[name] = made.placeholder(name)
            nodes[name].meta["val"] = 3 if name.startswith("n") else torch.empty(2)
    made.output(tuple(nodes[name] for name in outputs))
    return torch.fx.GraphModule(torch.nn.Module(), made)


def names(nodes):
    return [node.name for node in nodes]


def outputs(gm):
    return names(gm.graph.output_node().args[0])


@pytest.fixture
def pair():
    mode = FakeTensorMode()
    forward = graph(["x", "w", "n0"], ["x", "w", "x", "n0"], mode)  # one result; saved: w, x, n0
    backward = graph(["n0", "w", "x", "t"], ["t", "w"], mode)
    add_sync_token(forward, backward, num_fwd_outputs=1, fake_mode=mode)
    return forward, backward


def test_it_is_the_first_saved_tensor_on_both_sides(pair):
    forward, backward = pair
    assert outputs(forward) == ["x", TOKEN, "w", "x", "n0"]
    assert names(backward.graph.find_nodes(op="placeholder")) == ["n0", TOKEN, "w", "x", "t"]
    forward.graph.lint()
    backward.graph.lint()


def test_taking_it_out_leaves_the_graphs_as_they_were(pair):
    forward, backward = pair
    assert take_sync_token(forward) == 1 and take_sync_token(backward) == 1
    assert outputs(forward) == ["x", "w", "x", "n0"]
    assert names(backward.graph.find_nodes(op="placeholder")) == ["n0", "w", "x", "t"]
    assert not [n for gm in pair for n in gm.graph.nodes if n.name == TOKEN]
    x, w = torch.ones(2), torch.zeros(2)
    assert forward(x, w, 3)[1] is w


def test_without_a_token_there_is_nothing_to_take():
    gm = graph(["x"], ["x"], FakeTensorMode())
    assert take_sync_token(gm) is None and outputs(gm) == ["x"]


def test_a_backward_of_tangents_alone():
    mode = FakeTensorMode()
    forward, backward = graph(["x"], ["x"], mode), graph(["t"], ["t"], mode)
    add_sync_token(forward, backward, num_fwd_outputs=1, fake_mode=mode)
    assert (outputs(forward), take_sync_token(forward), take_sync_token(backward)) == (["x", TOKEN], 1, 0)


@functools.cache
def saved_and_gradients(**options):
    """How many bytes a model of several layers saves for its backward, and what that computes."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))]
    model, x = torch.nn.Sequential(*layers), torch.randn(64, 32)
    own, saved = {p.data_ptr() for p in model.parameters()}, dict[int, int]()

    def pack(tensor):
        saved[tensor.data_ptr()] = 0 if tensor.data_ptr() in own else tensor.nbytes
        return tensor

    torch._dynamo.reset()
    call = torch.compile(model, backend="dcompile", options=options)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = call(x).square().sum()
    return sum(saved.values()), torch.autograd.grad(loss, [*model.parameters()])


@pytest.mark.parametrize(
    ("options", "part"), [({"activation_memory_budget": 0.4}, 0.5), ({"recompute": "memory"}, 0.7)], ids=str
)
def test_what_is_saved_can_be_less_and_is_computed_again(options, part):
    usual, expected = saved_and_gradients()
    less, gradients = saved_and_gradients(**options)
    assert less <= part * usual
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)


class Counting(nn.Module):
    """Its counter changes before it is used; what a backward needs of it is not what lies there by then."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(3))
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        before = self.n.clone() * self.weight
        self.n += 1
        return (x.sin() * self.n + before).tanh()


def pushed_on(x, weight):
    """An argument that is read, and then changed."""
    y = (x * 2).tanh() * weight
    x.add_(1)
    return y


def test_the_backward_computes_with_inputs_as_they_were_before_the_forward_changed_them():
    module = Counting()
    stock, compiled = copy.deepcopy(module), dcompile.compile(module, options={"receipt": False})
    for _ in range(3):
        x = torch.randn(4, 3)
        results = []
        for call in (stock, compiled):
            given = x.clone().requires_grad_()
            call(given).square().sum().backward()
            results.append((given.grad, call.weight.grad, call.n.clone()))
            call.weight.grad = None
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_leaf", [False, True])
def test_an_argument_that_is_changed_behind_its_use_has_eagers_gradients(is_leaf):
    x, weight, results = torch.randn(3, requires_grad=not is_leaf), torch.randn(3, requires_grad=True), []
    for call in (pushed_on, dcompile.compile(pushed_on, options={"receipt": False})):
        given = x.clone()
        wanted = (weight,) if is_leaf else (weight, x)
        results.append((given, *torch.autograd.grad(call(given, weight).sum(), wanted)))
    torch.testing.assert_close([t.detach() for t in results[1]], [t.detach() for t in results[0]])


def random_graph(seed: int) -> networkx.DiGraph:
    """In the manner of the partitioner: nodes in halves, joined by what may be cut; other edges mostly cannot be."""
    draw = random.Random(seed)
    graph = networkx.DiGraph()
    count = draw.randint(1, 30)
    for n in range(count):
        graph.add_edge(f"{n}_in", f"{n}_out", capacity=draw.choice([1, 2, 2, 3, 5, 8.0, math.inf]))
        for later in range(n + 1, min(n + 6, count)):
            if draw.random() < 0.4:
                graph.add_edge(f"{n}_out", f"{later}_in", **({"capacity": math.inf} if draw.random() < 0.8 else {}))
        if draw.random() < 0.3:
            graph.add_edge("source", f"{n}_in", capacity=math.inf)
        if draw.random() < 0.3:
            graph.add_edge(f"{n}_out", "sink", capacity=draw.choice([math.inf, 4]))
    graph.add_nodes_from(("source", "sink"))
    return graph


@pytest.mark.parametrize("seed", range(200))
def test_the_same_cut_as_networkx(seed):
    graph = random_graph(seed)
    try:
        value, (near, far) = networkx.minimum_cut(graph, "source", "sink")
    except networkx.NetworkXUnbounded:
        with pytest.raises(networkx.NetworkXUnbounded):
            minimum_cut(graph, "source", "sink", networkx.minimum_cut)
        return
    found, (mine, theirs) = minimum_cut(graph, "source", "sink", lambda *_: pytest.fail("there is a finite cut"))
    assert (found, mine, theirs) == (value, near, far)


def test_both_kinds_of_graph_occur():
    finite = 0
    for seed in range(200):
        try:
            value, _ = networkx.minimum_cut(random_graph(seed), "source", "sink")
        except networkx.NetworkXUnbounded:
            continue
        finite += value > 0
    assert 20 < finite < 180
