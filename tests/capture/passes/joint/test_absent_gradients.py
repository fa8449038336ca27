"""Gradients of results that nothing was computed with: left out of the program, and never missed."""

from unittest import mock

import pytest
import torch

import dcompile
from dcompile.capture.entry import find_model
from dcompile.capture.passes.joint.absent_gradients import unsure
from dcompile.compiler.caching import CachingCompiler


class Two(torch.nn.Module):
    """A loss, and something as large as logits beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 32)

    def forward(self, x, y):
        logits = self.second(torch.tanh(self.first(x)))
        return torch.nn.functional.cross_entropy(logits, y), logits


def case():
    torch.manual_seed(0)
    model = Two()
    return model, torch.randn(4, 8), torch.randint(32, (4,))


LOSSES = {
    "loss": lambda loss, logits: loss,
    "logits": lambda loss, logits: logits.square().mean(),
    "both": lambda loss, logits: loss + logits.square().mean(),
}


def gradients(call, model, x, y, use):
    model.zero_grad()
    LOSSES[use](*call(x, y)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def taken_gradients(graph):
    """Names of the gradients that the first backward program takes."""
    inputs = graph.executables["backward"].gm.graph.find_nodes(op="placeholder")
    return [node.name for node in inputs if "tangents" in node.name]


@pytest.mark.parametrize("order", [("loss",), ("both", "loss"), ("loss", "both", "loss"), ("logits", "loss", "both")])
def test_whatever_is_computed_with_gives_eagers_gradients(order):
    model, x, y = case()
    call = dcompile.compile(model, options={"receipt": False, "verify": True})
    for use in order:
        torch.testing.assert_close(gradients(call, model, x, y, use), gradients(model, model, x, y, use))
    graph = find_model(call).graphs[0]
    lacking = {"loss": 1, "logits": 1, "both": 0}[order[0]]
    assert len(taken_gradients(graph)) == 2 - lacking
    others = {"whole_backward"} if lacking and len(set(order)) > 1 else set()
    assert graph.executables.keys() == {"forward", "backward"} | others


class Apart(Two):
    """Two results of layers that share nothing but the input."""

    def forward(self, x, y):
        return self.first(x).square().mean(), self.first(x).sum() * self.second(torch.ones(16)) * x.sum()


@pytest.mark.parametrize("order", [("loss",), ("logits", "loss"), ("both", "loss", "logits"), ("loss", "both")])
def test_a_layer_that_gave_nothing_to_the_loss_gets_no_gradient(order):
    torch.manual_seed(0)
    model, x, y = Apart(), torch.randn(4, 8), torch.randint(32, (4,))
    call = dcompile.compile(model, options={"receipt": False})
    for use in order:
        found = []
        for either in (call, model):
            model.zero_grad()
            LOSSES[use](*either(x, y)).backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        assert found[0].keys() == found[1].keys()
        torch.testing.assert_close(*found)
        assert ("second.weight" in found[0]) == (use != "loss")


class Rows(Two):
    """A loss, and results of layers behind it whose sizes are the batch's."""

    def forward(self, x, y):
        hidden = torch.tanh(self.first(x))
        return hidden.square().mean(), self.second(hidden), hidden * 2


@pytest.mark.parametrize("order", [(0,), (1, 0), (2, 0, 1), (0, 2, 1)])
def test_with_symbolic_sizes_too_layers_that_gave_nothing_get_no_gradient(order):
    torch.manual_seed(0)
    model = Rows()
    call = dcompile.compile(model, dynamic=True, options={"receipt": False, "verify": True})
    for rows, use in enumerate(order, 3):
        x, y = torch.randn(rows, 8), torch.randint(32, (rows,))
        found = []
        for either in (call, model):
            model.zero_grad()
            either(x, y)[use].sum().backward(retain_graph=True)
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        assert found[0].keys() == found[1].keys()
        torch.testing.assert_close(*found)
        assert ("second.weight" in found[0]) == (use == 1)
    assert len(find_model(call).graphs) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_hook_of_a_parameter_without_a_gradient_gets_zeros_and_never_none(dynamic):
    """Eager does not call it; autograd calls it with None for what a function returns None for."""
    model = Rows()
    call, got = dcompile.compile(model, dynamic=dynamic, options={"receipt": False}), []
    model.second.weight.register_hook(lambda gradient: got.append(gradient * 2))
    call(torch.randn(3, 8), torch.randint(32, (3,)))[0].backward()
    (gradient,) = got
    assert torch.equal(gradient, torch.zeros_like(model.second.weight))
    assert model.second.bias.grad is None and model.first.weight.grad.count_nonzero()


class Heads(torch.nn.Module):
    """Two results, both of which look at what was computed, in this or another order."""

    def __init__(self, look):
        super().__init__()
        self.first, self.second, self.look = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6), look

    def forward(self, x):
        return self.look(self.first(x).sin()), self.look(self.second(x).sin())


@pytest.mark.parametrize("use", [(0,), (1, 0), (0, 0, 1)])
@pytest.mark.parametrize(
    ("look", "dynamic"),
    [
        (lambda x: x.view(-1), False),
        (lambda x: x.view(-1), True),
        (lambda x: x.t(), False),
        (lambda x: x.view(-1, 2, 3).permute(2, 0, 1), False),
    ],
)
def test_a_head_that_nothing_was_computed_with_gets_no_gradient(look, dynamic, use):
    """As in eager mode: an optimizer lets its parameters be, where zeros would have it decay them."""
    model = Heads(look)
    call = dcompile.compile(model, dynamic=dynamic, options={"receipt": False, "verify": True})
    for head in use:
        x, found = torch.randn(5, 4), []
        for run in (call, Heads.forward.__get__(model)):
            model.zero_grad()
            result = run(x)[head]
            (result * torch.linspace(1, 2, result.numel()).view(result.shape)).sum().backward()
            found.append([p.grad for p in model.parameters()])
        got, want = found
        assert [g is None for g in got] == [g is None for g in want]
        torch.testing.assert_close([g for g in got if g is not None], [g for g in want if g is not None])


@pytest.mark.parametrize("use", ["loss", "both"])
def test_the_program_neither_takes_nor_reads_what_is_absent(use):
    model, x, y = case()
    call = dcompile.compile(model, options={"receipt": False})
    gradients(call, model, x, y, use)
    assert (
        taken_gradients(find_model(call).graphs[0])
        == {"loss": ["tangents_1"], "both": ["tangents_1", "tangents_2"]}[use]
    )


def test_one_result_always_has_its_gradient():
    model, x, y = case()
    call = dcompile.compile(lambda x, y: model(x, y)[0], options={"receipt": False})
    call(x, y).backward()
    assert not find_model(call).graphs[0].facts.may_have_absent_grads


def test_retained_graphs_and_gradients_of_some_results_alone():
    model, x, y = case()
    call = dcompile.compile(model, options={"receipt": False})
    loss, logits = call(x, y)
    once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    other = torch.autograd.grad(logits, list(model.parameters()), torch.ones_like(logits), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    loss, logits = model(x, y)
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    torch.testing.assert_close(once, expected)
    torch.testing.assert_close(again, expected)
    torch.testing.assert_close(other, torch.autograd.grad(logits, list(model.parameters()), torch.ones_like(logits)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at that of its inputs
def test_another_compilers_backward_behind_an_input_keeps_its_zeros():
    def before(x):
        return x.sin(), x.cos()

    def after(sin, cos):
        return sin.exp(), cos  # the second result is the other function's own

    x = torch.randn(5, requires_grad=True)
    other = torch.compile(before, backend="aot_eager")
    sin, _ = dcompile.compile(after, options={"receipt": False})(*other(x))
    sin.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, x.sin().exp() * x.cos())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_gradient_marked_as_the_negative_of_its_memory_has_its_sign(dynamic):
    torch._dynamo.reset()
    x, both = (
        torch.arange(6.0).view(2, 3),
        [lambda x: x.sin() * 2, dcompile.compile(lambda x: x.sin() * 2, dynamic=dynamic)],
    )
    for make in (torch.ones_like, lambda y: torch._neg_view(torch.ones_like(y)), torch.ones_like):
        gradients = []
        for function in both:
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            y.backward(make(y))
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)
    assert dcompile.receipt(both[1]).fallbacks == {"gradient marked as negative, copied": 1}


def test_what_follows_from_absent_gradients_alone_is_not_computed(monkeypatch):
    """Of complex numbers, zeros would be made by ATen, and their transforms too."""
    monkeypatch.setattr("dcompile.api.CachingCompiler", CachingCompiler)  # the one that builds kernels

    def function(x, w):
        return x.sin().sum(), torch.fft.ifft(w.exp())

    call = dcompile.compile(function)
    x, w = torch.randn(4, requires_grad=True), torch.randn(8, requires_grad=True)
    call(x, w)[0].backward()
    assert w.grad is None and not any("full" in name for name in dcompile.receipt(call).fallbacks)
    torch.testing.assert_close(x.grad, x.cos())
    loss, found = call(x, w)
    (loss + found.abs().sum()).backward()  # now it is there
    expected = torch.autograd.grad(torch.fft.ifft(w.exp()).abs().sum(), w)
    torch.testing.assert_close((w.grad,), expected)


def test_results_that_need_not_every_gradient_follow_from_the_graph():
    """Whatever the sizes: ranks with others lay out the same."""
    graph = torch.fx.Graph()
    x, first, second = (graph.placeholder(name) for name in ("x", "first", "second"))
    size = graph.call_method("size", (second, 0))
    size.meta["val"] = torch.SymInt.__new__(torch.SymInt)
    alone = graph.call_method("view", (graph.call_method("neg", (first,)), size))
    both = graph.call_function(torch.add, (alone, second))
    graph.output((alone, both, x, second))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with mock.patch("dcompile.compat.aot_metadata.is_tangent", lambda node: node.name in ("first", "second")):
        assert unsure(module, (0, 1, 2, 3)) == (0, 2, 3)
        assert unsure(module, (1,)) == ()


class Side(torch.nn.Module):
    """Two layers apart from one another, whose results are shown in some way; the loss uses the first one's alone."""

    def __init__(self, show):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.show = show

    def forward(self, x):
        used, unused = self.used(x).relu(), self.unused(x).relu()
        return self.show(used), self.show(unused)


class SideBroken(Side):
    """Each layer is a graph of its own."""

    def forward(self, x):
        used = self.used(x).relu()
        torch._dynamo.graph_break()
        unused = self.unused(x).relu()
        torch._dynamo.graph_break()
        return self.show(used), self.show(unused)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads that of what crosses a graph break
@pytest.mark.parametrize(
    ("kind", "show"),
    [
        (Side, lambda y: y[:, ::2]),
        (Side, lambda y: (y.t(), y[1:])),
        (Side, lambda y: y.sum(0, keepdim=True).expand(4, 6)),
        (SideBroken, lambda y: y * 2),
    ],
    ids=["gaps", "views", "expanded", "graphs"],
)
def test_what_only_an_unused_result_follows_from_has_no_gradient(kind, show):
    torch.manual_seed(0)
    model = kind(show)
    call = dcompile.compile(model, options={"kernels": "aten", "receipt": False})
    x = torch.randn(4, 6)
    for both in (False, True, False):
        found = []
        for each in (model, call):
            model.zero_grad()
            with torch.compiler.set_stance("force_eager" if each is model and not found else "default"):
                results = torch.utils._pytree.tree_leaves(each(x))
            (results[0].sum() + (results[-1].square().sum() if both else 0)).backward()
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        assert (found[1][2] is None) == (not both)
        torch.testing.assert_close(found[0], found[1])
