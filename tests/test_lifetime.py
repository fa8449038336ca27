"""Compiled models that come and go: what was compiled goes with them, and they go with their last name."""

import ctypes
import gc
import os
import types
import weakref

import pytest
import torch
from torch import nn

import dcompile
from dcompile.capture.captured_graph import CapturedGraph
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.entry import Entry

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    # Dynamo itself looks at .grad of a non-leaf when it goes on after a graph break
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.part = nn.Linear(width, width)

    def forward(self, x):
        return self.part(x).relu()

    def score(self, x):
        return self.part(x).sum(-1)


def by_method(module):
    module.compile(backend="dcompile")
    return module


def around(module):
    return torch.compile(module, backend="dcompile")


DOORS = {
    "in place": dcompile.compile,
    "in place by torch": by_method,
    "around": around,
    "bound method": lambda module: torch.compile(module.score, backend="dcompile"),
    "own bound method": lambda module: dcompile.compile(module.score),
    "function": lambda module: torch.compile(lambda x: module(x).relu(), backend="dcompile"),
    "its call": lambda module: torch.compile(module.__call__, backend="dcompile"),
}


@pytest.fixture(scope="module", autouse=True)
def earlier_tests_are_not_looked_through():
    """What others have left is not collected again and again: that took nine tenths of these tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(*kinds):
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_model_goes_with_its_last_name_and_what_was_compiled_with_it(door, trains, no_collector):
    """The model at once, for its memory counts; what was compiled when Python next looks for cycles."""
    before = {id(thing) for thing in alive(Entry, CompiledModel, CapturedGraph)}
    module = Net()
    gone = [weakref.ref(thing) for thing in (module, module.part, module.part.weight)]
    call = door(module)
    for rows in (2, 2, 3, 5):
        result = call(torch.ones(rows, 4)).sum()
        if trains:
            result.backward()
    del module, call, result
    assert [ref() for ref in gone] == [None] * 3
    gc.collect()
    assert not [thing for thing in alive(Entry, CompiledModel, CapturedGraph) if id(thing) not in before]
    functions = [thing for thing in alive(types.FunctionType) if "dcompile_entry_" in thing.__name__]
    assert not [function for function in functions if gc.get_referrers(function) == [functions]]


@pytest.mark.parametrize("kind", ["module", "function"])
def test_model_after_model_leaves_neither_memory_nor_objects(kind):
    width, models = 1200, 4

    def one():
        module = Net(width)
        call = around(module) if kind == "module" else around(lambda x: module(x).relu())
        call(torch.ones(2, width)).sum().backward()

    for _ in range(2):
        one()
    gc.collect()
    objects, memory = len(gc.get_objects()), resident()
    for _ in range(models):
        one()
        gc.collect()
    assert (len(gc.get_objects()) - objects) / models < 150
    assert (resident() - memory) / models < width**2 * 4 / 2  # bytes: a parameter of each would be twice this


def resident():
    """Without what the allocator keeps of what was freed, which is up to twice as much as the largest that was."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_backward_may_come_when_the_model_has_gone(evaluated):
    """Also where a graph of the model is gone that no backward holds, and so cannot be in the receipt."""
    torch.manual_seed(0)
    module = Net()
    x, stock = torch.ones(2, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    module(stock).sum().backward()
    call = around(module)
    with torch.no_grad():
        _ = call(x) if evaluated else None
    result = call(x).sum()
    del module, call
    gc.collect()
    result.backward()
    torch.testing.assert_close(x.grad, stock.grad)


def test_another_model_of_the_class_goes_on():
    """Compiled code of parts behind a graph break belongs to code that all models of a class share."""

    class Broken(Net):
        def forward(self, x):
            x = self.part(x)
            torch._dynamo.graph_break()
            return self.part(x)

    stays, goes = dcompile.compile(Broken()), dcompile.compile(Broken())
    x = torch.ones(2, 4)
    expected = stays(x)
    goes(x)
    del goes
    gc.collect()
    assert torch.equal(stays(x), expected) and dcompile.receipt(stays).graphs == 2


def test_what_a_module_is_called_by_does_not_keep_it():
    module = dcompile.compile(Net())
    module(torch.ones(2, 4))
    call = module._compiled_call_impl
    del module
    with pytest.raises(dcompile.errors.DcompileError, match="is gone; call the module, and keep it"):
        call(torch.ones(2, 4))
    assert around(Net()).forward(torch.ones(2, 4)).shape == (2, 4)  # what torch.compile returned is kept by its parts
