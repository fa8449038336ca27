"""Calls that go to compiled code as soon as its guards hold, and those that Dynamo has to see."""

import threading
import warnings

import pytest
import torch
from torch import nn

import dcompile


class Counted:
    """Stands in for what a compiled callable calls through Dynamo, and counts."""

    def __init__(self, compiled, *args):
        entry = (compiled._compiled_call_impl if isinstance(compiled, nn.Module) else compiled)._dcompile_entry
        compiled(*args)
        self.through, self.calls = entry._compiled, 0
        entry._compiled = self

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.through(*args, **kwargs)


def test_only_calls_that_guards_refuse_come_by_dynamo():
    @dcompile.compile
    def function(x, y=1, *, z=2):
        return x * y + z

    dynamo = Counted(function, torch.ones(3))
    for _ in range(3):
        assert torch.equal(function(torch.ones(3)), torch.full((3,), 3.0))
    assert dynamo.calls == 0
    assert torch.equal(function(torch.ones(3), 4, z=5), torch.full((3,), 9.0)) and dynamo.calls == 1
    assert torch.equal(function(torch.ones(3), 4, z=5), torch.full((3,), 9.0)) and dynamo.calls == 1
    assert torch.equal(function(torch.ones(3)), torch.full((3,), 3.0)) and dynamo.calls == 1  # both serve
    assert function(torch.ones(2, 2)).shape == (2, 2) and dynamo.calls == 2
    assert function(torch.ones(3, dtype=torch.float64)).dtype == torch.float64 and dynamo.calls == 3
    with torch.no_grad():
        assert not function(torch.ones(3, requires_grad=True)).requires_grad and dynamo.calls == 4
    x = torch.ones(3, requires_grad=True)
    function(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3)) and dynamo.calls == 5
    function(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and dynamo.calls == 5


FACTOR = 2


def test_what_a_function_looks_up_may_change():
    global FACTOR
    held = {"more": 1}

    @dcompile.compile
    def function(x):
        return x * FACTOR + held["more"]

    dynamo = Counted(function, torch.ones(2))
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 3.0)) and dynamo.calls == 0
    FACTOR = 5
    try:
        assert torch.equal(function(torch.ones(2)), torch.full((2,), 6.0)) and dynamo.calls == 1
        held["more"] = 2
        assert torch.equal(function(torch.ones(2)), torch.full((2,), 7.0)) and dynamo.calls == 2
    finally:
        FACTOR = 2


def test_modules_and_their_hooks():
    module = dcompile.compile(nn.Linear(3, 2))
    x = torch.randn(4, 3)
    dynamo = Counted(module, x)
    expected = nn.functional.linear(x, module.weight, module.bias)
    assert torch.allclose(module(x), expected) and dynamo.calls == 0
    handle = module.register_forward_hook(lambda module, args, result: result * 2)
    assert torch.allclose(module(x), expected * 2) and dynamo.calls == 1
    handle.remove()
    assert torch.allclose(module(x), expected) and dynamo.calls == 1
    module.train(False)
    with torch.no_grad():
        module.weight.zero_()
    assert torch.allclose(module(x), module.bias.expand(4, 2))


def test_what_dynamo_has_dropped_serves_no_longer():
    @dcompile.compile
    def function(x):
        return x + 1

    dynamo = Counted(function, torch.ones(2))
    function(torch.ones(2))
    assert dynamo.calls == 0
    torch._dynamo.reset()
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0)) and dynamo.calls == 1
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0)) and dynamo.calls == 1


def test_a_function_with_a_graph_break_comes_by_dynamo():
    @dcompile.compile
    def function(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    dynamo = Counted(function, torch.ones(2))
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 4.0)) and dynamo.calls == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_calls_in_another_stance_and_while_something_traces_are_eager():
    ran = []

    @dcompile.compile
    def function(x):
        if not torch.compiler.is_compiling():
            ran.append("eager")
        return x.sin()

    given = torch.ones(2)
    dynamo = Counted(function, given)
    with torch.compiler.set_stance("force_eager"):
        function(torch.ones(2))
    assert ran == ["eager"] and dynamo.calls == 1
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        torch.jit.trace(function, (torch.ones(2),), check_trace=False)
    assert ran == ["eager"] * 2
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        assert isinstance(function(mode.from_tensor(torch.ones(2))), torch._subclasses.FakeTensor)
    assert ran == ["eager"] * 3
    # of a mode of the compiler's own a tensor's guard sees nothing
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(function(torch.ones(2)), torch._subclasses.FakeTensor)
        assert isinstance(function(given), torch._subclasses.FakeTensor)
    assert ran == ["eager"] * 5
    function(torch.ones(2))
    assert len(ran) == 5 and dynamo.calls == 1


def test_a_compiled_function_inside_another_one():
    inner = dcompile.compile(lambda x: x + 1)
    inner(torch.ones(2))
    inner(torch.ones(2))
    outer = torch.compile(lambda x: inner(x) * 2, backend="eager")
    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 4.0))


def test_a_compiled_function_in_a_frame_that_another_backend_leaves_alone():
    """Dynamo then meets the call by itself, and is to leave it to what it was compiled with."""
    inner, seen = dcompile.compile(lambda x: x + 1), []
    dynamo = Counted(inner, torch.ones(2))

    def backend(gm, inputs):
        seen.append(gm)
        return gm

    @torch._dynamo.disable(recursive=False)
    def left_alone(x):
        return inner(x) * 2

    def outer(x):
        return left_alone(x.sin())

    compiled = torch.compile(outer, backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), 2.0))
    assert len(seen) == 1 and dynamo.calls == 0


def test_an_argument_may_have_any_name():
    function = dcompile.compile(lambda x, hooked, self: x * hooked + self)
    for _ in range(2):
        assert torch.equal(function(torch.ones(2), hooked=3, self=4), torch.full((2,), 7.0))


def test_a_call_beside_one_of_another_thread_is_a_call_of_its_own():
    """What runs in a thread's call through Dynamo is part of it, in that thread alone."""

    @dcompile.compile
    def function(x):
        y = x + 1
        torch._dynamo.graph_break()
        meet()
        return y * 2

    def beside():
        other["result"] = other["function"](torch.ones(2))

    @torch.compiler.disable
    def meet():
        if "function" in other:
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()

    other = {}
    function(torch.ones(2))
    graphs = function._dcompile_entry.model.newest.graphs
    other["function"] = lambda x: function._dcompile_entry(x) if other.pop("function") else None
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 4.0))
    assert torch.equal(other["result"], torch.full((2,), 4.0))
    model = function._dcompile_entry.model
    assert len(graphs) == 2 and list(model.variants) == [graphs] and not model.calls


def test_transforms_of_functions_see_what_they_wrap():
    function = dcompile.compile(lambda x: x.sin())
    x = torch.linspace(0, 1, 6).reshape(2, 3)
    function(x[0])
    assert torch.allclose(function(x[0]), x[0].sin())
    assert torch.allclose(torch.func.vmap(function)(x), x.sin())
    assert torch.allclose(torch.func.grad(lambda x: function(x).sum())(x[0]), x[0].cos())


def test_errors_of_the_program_come_up_as_they_are():
    @dcompile.compile
    def function(x, positions):
        return x[positions]

    x, inside = torch.arange(4.0), torch.tensor([1, 3])
    dynamo = Counted(function, x, inside)
    assert torch.equal(function(x, inside), x[inside])
    with pytest.raises(IndexError):
        function(x, torch.tensor([1, 9]))
    assert dynamo.calls == 0 and torch.equal(function(x, inside), x[inside])


@pytest.mark.parametrize("learns", [False, True])
def test_hooks_for_saved_tensors_that_are_set_later(learns):
    function, seen = dcompile.compile(lambda x: x.exp()), []
    x = torch.randn(3, requires_grad=learns)
    dynamo = Counted(function, x)
    function(x)
    assert dynamo.calls == 0
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            found = function(x)
        torch.testing.assert_close(found, x.exp())
    assert bool(seen) == learns and dynamo.calls == 0
    seen.clear()
    function(x)
    assert not seen and dynamo.calls == 0


def test_an_optimizers_step_is_one_graph():
    torch.manual_seed(0)
    start = [torch.randn(5), torch.randn(2, 3)]
    stock, own = ([nn.Parameter(x.clone()) for x in start] for _ in range(2))
    expected, optimizer = (torch.optim.AdamW(p, lr=0.1, foreach=True) for p in (stock, own))
    step = dcompile.compile(optimizer.step, fullgraph=True)
    dynamo = None
    for number in range(4):
        for one, other in zip(stock, own, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        expected.step()
        step()
        if number == 2:  # the first makes the state, the second reads it
            dynamo = Counted(step)
            expected.step()
    assert dynamo.calls == 0
    torch.testing.assert_close(own, stock)
    assert all(parameter.requires_grad for parameter in own) and torch.is_grad_enabled()


def test_a_graph_break_of_ones_own_stays_one():
    @dcompile.compile(fullgraph=True)
    def function(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        function(torch.ones(2))


def test_hooks_for_saved_tensors_that_are_graphs_are_part_of_the_program():
    """Each of two programs serves again when its hooks, or none, are set, and the hooks see what is saved once."""
    function = dcompile.compile(lambda x: x.exp().sin().sum())
    twice, same = (torch.fx.symbolic_trace(f) for f in (lambda t: t * 2, lambda t: t * 1))
    x, gradients = torch.ones(3, requires_grad=True), []
    for compiled in [lambda x: x.exp().sin().sum(), *[function] * 3]:
        with torch.autograd.graph.saved_tensors_hooks(twice, same):
            hooked = torch.autograd.grad(compiled(x), x)[0]
        gradients.append((torch.autograd.grad(compiled(x), x)[0], hooked))
    (plain, _), *found = gradients
    assert not torch.allclose(found[0][1], plain)
    for own, hooked in found:
        torch.testing.assert_close(own, plain)
        torch.testing.assert_close(hooked, found[0][1])
