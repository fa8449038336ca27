"""Methods that a class gets after its instance was compiled and called, as kernel and adapter libraries do it."""

import pytest
import torch
from torch import nn

import dcompile

# Dynamo itself looks at .grad of a non-leaf when it goes on after a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def in_place(module):
    module.compile(backend="dcompile")
    return module


DOORS = {
    "dcompile.compile": dcompile.compile,
    "torch.compile": lambda module: torch.compile(module, backend="dcompile"),
    "Module.compile": in_place,
}


def classes():
    class Base(nn.Module):
        def forward(self, x):
            return self.helper(x) + self.amount

        def helper(self, x):
            return x * 1

        @property
        def amount(self):
            return 1

    class Derived(Base):
        pass

    return Base, Derived


def assert_noticed(call, change, before, after):
    x = torch.ones(2)
    assert [call(x).tolist() for _ in range(2)] == [[before] * 2] * 2
    change()
    assert [call(x).tolist() for _ in range(2)] == [[after] * 2] * 2


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("owner", ["own", "inherited", "given to the class itself"])
def test_another_forward_counts_from_the_next_call(door, owner):
    base, derived = classes()
    module = (base if owner == "own" else derived)()
    patched = derived if owner.startswith("given") else base
    assert_noticed(door(module), lambda: setattr(patched, "forward", lambda self, x: x * 10), 2, 10)


def test_with_hooks_and_back():
    base, _ = classes()
    module = base()
    module.register_forward_hook(lambda _module, _given, made: made + 0)
    call, original = torch.compile(module, backend="dcompile"), base.forward
    assert_noticed(call, lambda: setattr(base, "forward", lambda self, x: x * 10), 2, 10)
    assert_noticed(call, lambda: setattr(base, "forward", original), 10, 2)
    assert dcompile.receipt(call).graphs == 1 and len(dcompile.receipt(call).variants) == 2  # the first serves again


@pytest.mark.parametrize("name", ["forward", "__call__", "helper"])
def test_methods_of_submodules(name):
    base, _ = classes()
    module = dcompile.compile(nn.Sequential(base(), base()))
    assert_noticed(module, lambda: setattr(base, name, lambda self, x: x * 10), 3, 111 if name == "helper" else 100)


def test_properties_and_methods_of_other_objects():
    base, _ = classes()
    module = dcompile.compile(base())
    assert_noticed(module, lambda: setattr(base, "amount", property(lambda self: 4)), 2, 5)

    class Rule:
        def of(self, x):
            return x + 1

    rule = Rule()
    compiled = dcompile.compile(lambda x: rule.of(x))
    assert_noticed(compiled, lambda: setattr(Rule, "of", lambda self, x: x * 10), 2, 10)


def test_methods_behind_a_graph_break_and_of_torchs_own_classes(monkeypatch):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = classes()[0]()

        def forward(self, x):
            x = self.part(x)
            torch._dynamo.graph_break()
            return self.part(x)

    module = Broken()
    call = dcompile.compile(module)
    assert_noticed(call, lambda: setattr(type(module.part), "forward", lambda self, x: x * 10), 3, 100)

    relu = dcompile.compile(nn.Sequential(nn.ReLU()))
    assert_noticed(relu, lambda: monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x - 9), 1, -8)


def test_gradients_are_the_new_methods():
    base, _ = classes()
    module, x = dcompile.compile(base()), torch.ones(2, requires_grad=True)
    module(x).sum().backward()
    base.forward = lambda self, x: x * 10
    x.grad = None
    module(x).sum().backward()
    assert x.grad.tolist() == [10, 10]


def test_a_method_that_stays_costs_no_second_graph():
    base, _ = classes()
    module = dcompile.compile(nn.Sequential(*(base() for _ in range(3))))
    for _ in range(3):
        module(torch.ones(2))
    assert len(dcompile.receipt(module).variants) == 1
