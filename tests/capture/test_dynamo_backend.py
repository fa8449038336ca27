"""Inputs that are not just what lies in their memory, compared with eager mode."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint

import dcompile
from dcompile.capture.dynamo_backend import _copy_graph


@pytest.fixture(autouse=True)
def compilers(monkeypatch):
    """Programs of ours run here: they read memory."""
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    torch._dynamo.reset()


class Send(torch.autograd.Function):
    """As the last step of a layer under tensor parallelism: its result may be used before it is received."""

    @staticmethod
    def forward(ctx, x):
        return AsyncCollectiveTensor(x * 2)

    @staticmethod
    def backward(ctx, gradient):
        assert type(gradient) is torch.Tensor
        return gradient * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_a_tensor_that_is_still_received_has_its_gradient():
    w = torch.randn(8, 4, requires_grad=True)
    own = dcompile.compile(lambda x: (x @ w).unflatten(0, (-1, 2)).sin() + x.mean(), options={"kernels": "aten"})
    for rows in (4, 4, 6):
        data = torch.randn(rows, 8, requires_grad=True)
        found = torch.autograd.grad(own(Send.apply(data)).sum(), (data, w))
        sent = data * 2
        torch.testing.assert_close(found, torch.autograd.grad(((sent @ w).sin() + sent.mean()).sum(), (data, w)))
    with torch.no_grad():
        assert torch.equal(own(Send.apply(data)), own(sent))


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


def imaginary(z):
    """What lies in the memory of a conjugate, marked as the negative of it."""
    x = z.conj().imag
    assert x.is_neg()
    return x


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_tensor_marked_as_the_negative_of_its_memory_has_its_sign(dynamic):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    model = dcompile.compile(copy.deepcopy(eager), dynamic=dynamic)
    z = torch.randn(3, 8, dtype=torch.complex64)
    for make in (lambda z: z.imag, imaginary, lambda z: z.imag, imaginary):
        found = []
        for module in (eager, model):
            module.zero_grad()
            x = make(z).detach().requires_grad_()
            y = module(x)
            y.sum().backward()
            found.append([y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())])
        torch.testing.assert_close(found[1], found[0])


def test_it_changes_in_place_as_eagers_does():
    function = dcompile.compile(lambda x: x.mul_(2).sum())
    for make in (lambda z: z.imag, imaginary, imaginary):
        z = torch.arange(4.0) + 1j * torch.arange(1.0, 5.0)
        stock = z.clone()
        result, expected = function(make(z)), make(stock).mul_(2).sum()
        torch.testing.assert_close([result, z], [expected, stock])
    fallbacks = dcompile.receipt(function).fallbacks
    assert fallbacks == {"input marked as negative, copied": 1, "input marked as negative, copied back": 2}


def test_copies_of_what_is_marked_are_told_of_the_calls_that_make_them():
    function = dcompile.compile(lambda x, y: x + y)
    z = torch.arange(4.0) + 1j * torch.arange(1.0, 5.0)
    torch.testing.assert_close(function(imaginary(z), imaginary(2 * z)), imaginary(3 * z).resolve_neg())
    receipt = dcompile.receipt(function)
    assert receipt.fallbacks == {"input marked as negative, copied": 2}
    assert [note for note in receipt.notes if "marked as the negative of its memory" in note]
    torch.testing.assert_close(function(z.imag, z.real), z.imag + z.real)
    receipt = dcompile.receipt(function)  # of the newest kind of call
    assert receipt.fallbacks == {} and not [note for note in receipt.notes if "marked" in note]


def test_a_copy_of_a_graph_has_the_bodies_of_its_operators():
    def function(x):
        y = checkpoint(lambda z: z.sin() * 2, x, use_reentrant=False)
        return torch.cond(y.sum() > 0, lambda z: z + 1, lambda z: z - 1, (y.detach(),))

    found = []

    def backend(gm, inputs):
        copied = _copy_graph(gm)
        copied.graph.lint()
        found.append([copied(*inputs)[0], gm(*inputs)[0], copied.graph is not gm.graph])
        return gm

    x = torch.ones(3)
    torch.compile(function, backend=backend, fullgraph=True)(x)
    own, first, apart = found[0]
    assert apart and torch.equal(own, first) and torch.equal(own, function(x))


def test_a_dump_lists_what_stands_around_a_compiled_graph(tmp_path):
    """Only what the graph needs, the outermost first: a copy of the negative input, and a check of the changed one."""

    def function(x, y):
        return y.add_(x.sin())

    call = dcompile.compile(function, options={"dump": str(tmp_path), "receipt": False})
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    y = torch.ones(3)
    torch.testing.assert_close(call(negative, y.clone()), y + negative.sin())
    (listed,) = tmp_path.glob("rank0/graph0/wrappers.txt")
    assert listed.read_text().splitlines() == [
        "1. run_new_overlaps_eagerly", "2. convert_subclasses", "3. view_results_without_gradients",
        "4. the compiled graph",
    ]  # fmt: skip
