"""Arguments that share memory from a later call on, or otherwise than in the first one: results are eager's."""

import pytest
import torch
from torch import nn

import dcompile
from dcompile.capture.aliasing.overlapping_inputs import COUNTED


def update(x, y):
    x.mul_(2)
    return x + y


LAYOUTS = {
    "apart": lambda base: (base[:4].clone(), base[4:].clone()),
    "overlapping": lambda base: (base[:4], base[2:6]),
    "otherwise": lambda base: (base[1:5], base[:4]),
    "one memory": lambda base: (base[:4], base[:4].view(2, 2).view(4)),
    "neighbours": lambda base: (base[:4], base[4:]),
    "interleaved": lambda base: (base[::2], base[1::2]),
}


def assert_like_eager(compiled, function, make, *shape):
    base = torch.arange(1.0, 9.0).view(shape or (8,))
    other = base.clone()
    expected = function(*make(base))
    assert torch.equal(compiled(*make(other)), expected) and torch.equal(other, base)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("first", LAYOUTS)
def test_memory_is_shared_as_each_call_has_it(first, dynamic):
    compiled = dcompile.compile(update, dynamic=dynamic)
    for kind in (first, *LAYOUTS):
        assert_like_eager(compiled, update, LAYOUTS[kind])


def test_what_runs_eagerly_is_counted_and_nothing_else():
    compiled = dcompile.compile(update)
    for kind in ("apart", "neighbours", "apart"):
        assert_like_eager(compiled, update, LAYOUTS[kind])
    assert not dcompile.receipt(compiled).fallbacks
    for _ in range(2):
        assert_like_eager(compiled, update, LAYOUTS["overlapping"])
    assert dcompile.receipt(compiled).fallbacks == {COUNTED: 2}


def test_gradients_of_what_runs_eagerly():
    def scaled(weight, x, y):
        x.mul_(2)
        return (weight * x * y).sum()

    compiled = dcompile.compile(scaled)
    for make in (LAYOUTS["apart"], LAYOUTS["overlapping"], LAYOUTS["apart"]):
        found = []
        for function in (scaled, compiled):
            weight = torch.ones(4, requires_grad=True)
            function(weight, *make(torch.arange(1.0, 9.0))).backward()
            found.append(weight.grad)
        assert torch.equal(*found)


def test_a_buffer_that_changes_and_a_window_of_it():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("held", torch.arange(1.0, 9.0))

        def forward(self, x):
            self.held.mul_(2)
            return x + self.held[:4]

    own, stock = dcompile.compile(Memory()), Memory()
    for x in (torch.ones(4), None, torch.ones(4)):
        given = [module.held[2:6] if x is None else x for module in (own, stock)]
        assert torch.equal(own(given[0]), stock(given[1])) and torch.equal(own.held, stock.held)


def test_a_parameter_and_an_argument_that_is_a_window_of_it():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.arange(1.0, 9.0), requires_grad=False)

        def forward(self, x):
            x.add_(1)
            return x * self.w[:4]

    own, stock = dcompile.compile(Adds()), Adds()
    for window in (False, True):
        given = [module.w.data[:4] if window else torch.ones(4) for module in (own, stock)]
        assert torch.equal(own(given[0]), stock(given[1])) and torch.equal(own.w, stock.w)


def test_many_tensors():
    def step(params, grads):
        torch._foreach_add_(params, grads, alpha=-1.0)

    compiled = dcompile.compile(step)
    for shared in (False, True):
        found = []
        for function in (step, compiled):
            params = list(torch.arange(40.0).clone().view(10, 4).unbind())
            grads = [params[(n + 1) % 10][:] if shared else torch.ones(4) * n for n in range(10)]
            function(params, grads)
            found.append(torch.stack(params))
        assert torch.equal(*found)


def test_functions_that_change_nothing_are_asked_nothing(compilers):
    compiled = dcompile.compile(lambda x, y: x + y)
    for kind in LAYOUTS:
        assert_like_eager(compiled, lambda x, y: x + y, LAYOUTS[kind])
    assert not dcompile.receipt(compiled).fallbacks
