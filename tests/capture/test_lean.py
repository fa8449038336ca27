"""The short way from a compiled graph to its programs: for which graphs, and what it leaves to torch's own."""

import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad

import dcompile
from dcompile import compat
from dcompile.backend import dcompile_backend
from dcompile.compat.tensors import quick_view_function
from dcompile.errors import DcompileError
from dcompile.results import result_steps

# Dynamo itself looks at .grad of a non-leaf
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def is_lean(result):
    return result.grad_fn._forward_cls.forward.__module__ == compat.lean_wrappers.__name__


def compared(function, *inputs, times=3):
    """Results and gradients of a function, compiled and not. The first call goes torch's way."""
    compiled = dcompile.compile(function)
    for _ in range(times):
        given = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        plain = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        found, expected = compiled(*given), function(*plain)
        assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad
        found.square().sum().backward()
        expected.square().sum().backward()
        for x, y in zip(given, plain, strict=True):
            assert (x.grad is None) == (y.grad is None) and (x.grad is None or torch.allclose(x.grad, y.grad))
    return compiled


def test_a_plain_graph_takes_the_short_way():
    compiled = compared(lambda x, y: x.sin() * y, torch.randn(3, requires_grad=True), torch.randn(3))
    assert is_lean(compiled(torch.randn(3, requires_grad=True), torch.randn(3)))


class TimesWeight(torch.nn.Module):
    """A product in bfloat16 under autocast, and a sum in float32."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))

    def forward(self, x):
        return (x @ self.weight).float().square().sum()


@pytest.mark.parametrize("around", [False, True])
def test_a_graph_under_autocast_takes_the_short_way_and_casts_what_eager_casts(around):
    """`around`: whether the backward runs under autocast, too, where the graph's operators must cast nothing."""
    eager, model = TimesWeight(), TimesWeight()
    dcompile.compile(model)
    for _ in range(3):
        x = torch.randn(5, 4)
        losses = []
        for each in (eager, model):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(x)
                if around:
                    loss.backward()
            if not around:
                loss.backward()
            losses.append(loss.detach())
        assert is_lean(model_result(model, x))
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(model.weight.grad, eager.weight.grad)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), eager(x))


def model_result(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def test_tensors_that_a_graph_holds_are_inputs_too():
    """torch then puts them before the others, which it would not where its function is left out."""
    graph, held = torch.fx.Graph(), torch.nn.Linear(3, 2)
    graph.output((graph.call_module("held", (graph.placeholder("x"),)),))
    gm, x = torch.fx.GraphModule({"held": held}, graph), torch.randn(4, 3)
    compiled = dcompile_backend(gm, [x], options={"receipt": False})
    for _ in range(3):
        torch.testing.assert_close(compiled(x)[0], held(x))


def test_inputs_that_look_at_one_another_go_through_torchs_function_around_ours():
    """A program then gets the tensor that both are made of in place of them."""

    def step(function):
        base, weight = torch.arange(4.0), torch.ones(3, requires_grad=True)
        results = []
        for _ in range(3):
            result = function(base, base[1:], weight)
            result.sum().backward()
            results += [result.detach(), base.clone(), weight.grad.clone()]
        return results

    def function(whole, part, weight):
        part.mul_(2)
        return whole[:3] * weight

    for found, expected in zip(step(dcompile.compile(function, fullgraph=True)), step(function), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_input_that_gets_no_gradient_is_left_alone():
    compared(lambda x, y: x.sin() * y.detach(), *(torch.randn(3, requires_grad=True) for _ in range(2)))


def test_what_is_saved_may_be_a_view():
    base = torch.randn(4, 3, requires_grad=True)
    compiled = dcompile.compile(lambda x: (x * x).t().sin())
    for _ in range(3):
        gradient = torch.autograd.grad(compiled(base[1:]).sum(), base)[0]
        expected = torch.autograd.grad((base[1:] * base[1:]).t().sin().sum(), base)[0]
        assert torch.allclose(gradient, expected)


def rows_and_loss(x, y):
    """A view of what the loss's backward needs, and the loss."""
    rows = (x.flatten(0, 1) @ y).unflatten(0, x.shape[:2])
    return rows, rows.flatten(0, 1).logsumexp(1).sum()


def test_a_result_may_be_a_view():
    compiled = dcompile.compile(rows_and_loss)
    x, y = torch.randn(3, 2, 5, requires_grad=True), torch.randn(5, 7)
    for _ in range(3):
        (rows, loss), (expected, other) = compiled(x, y), rows_and_loss(x, y)
        assert torch.equal(rows, expected) and not rows._is_view()
        found = torch.autograd.grad((rows.square().sum(), loss), x)
        torch.testing.assert_close(found, torch.autograd.grad((expected.square().sum(), other), x))
    assert is_lean(rows)


def test_looks_are_made_of_tuples(monkeypatch):
    """torch 2.15's quick look takes no torch.Size: graphs that save a view of a result were an error there."""
    kinds = []

    def look(tensor, shape, strides, more):
        kinds.extend((type(shape), type(strides)))
        return quick_view_function()(tensor, shape, strides, more)

    monkeypatch.setattr(result_steps, "quick_view", look)
    torch._dynamo.reset()
    rows, _ = dcompile.compile(rows_and_loss)(torch.randn(3, 2, 5, requires_grad=True), torch.randn(5, 7))
    rows.sum().backward()
    assert kinds and set(kinds) == {tuple}


def test_a_result_that_is_changed_before_the_backward_is_an_error():
    """Not gradients of other values: what the backward needs lies where the result does."""
    compiled = dcompile.compile(rows_and_loss)
    for _ in range(3):
        rows, loss = compiled(torch.randn(3, 2, 5, requires_grad=True), torch.randn(5, 7))
        with torch.no_grad():
            rows.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_results_without_gradients_and_results_that_nobody_uses():
    def function(x):
        return x.sin(), (x > 0).sum(), x * 2

    compiled = dcompile.compile(function)
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        first, count, last = compiled(x)
        assert not count.requires_grad and is_lean(first) == is_lean(last)
        last.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("gradient", [torch.randn(3, 4).t(), torch.ones(()).expand(4, 3), torch.randn(4, 6)[:, ::2]])
def test_gradients_may_lie_in_another_way(gradient):
    compiled = dcompile.compile(torch.sin)
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        compiled(x).backward(gradient)
        assert torch.allclose(x.grad, x.detach().cos() * gradient)


def test_a_graph_may_be_retained_and_is_freed_otherwise():
    compiled = dcompile.compile(torch.sin)
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        y = compiled(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        assert torch.allclose(x.grad, 2 * x.detach().cos())
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()


def test_the_gradient_function_of_a_result_may_be_called_by_hand():
    """No backward runs then, at whose end anything could be done."""
    compiled = dcompile.compile(lambda x: x * x)
    x = torch.randn(3, requires_grad=True)
    for _ in range(2):
        result = compiled(x)  # torch 2.11 frees what is saved together with the result
        assert torch.allclose(result.grad_fn.apply(torch.ones(3))[0], 2 * x.detach())
    compiled(x).sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_second_derivative_is_refused_with_what_to_do(dynamic):
    """Also where torch's wrappers stay, as around a graph that saves a symbolic size."""
    compiled = dcompile.compile(lambda x: x.sin() * (x.shape[0] / 3), dynamic=dynamic)
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        assert torch.allclose(gradient, x.cos())
        with pytest.raises(DcompileError, match=r"does not .*double backward.*set_stance\('force_eager'\)"):
            gradient.sum().backward()
        assert is_lean(compiled(x)) is not dynamic
    with torch.compiler.set_stance("force_eager"):
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    assert torch.allclose(torch.autograd.grad(gradient.sum(), x)[0], -x.sin())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_forward_mode_derivative_is_refused_with_what_to_do(dynamic):
    """Kernels would drop it, and the result would count as constant. Where no input has one, nothing is refused."""
    compiled = dcompile.compile(lambda x: x.sin(), dynamic=dynamic)
    x, along = torch.randn(3), torch.ones(3)
    for _ in range(3):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, along)
            with pytest.raises(DcompileError, match=r"forward-mode derivative.*set_stance\('force_eager'\)"):
                compiled(dual)
            with torch.compiler.set_stance("force_eager"):
                torch.testing.assert_close(forward_ad.unpack_dual(compiled(dual)).tangent, x.cos())
            torch.testing.assert_close(compiled(x), x.sin())
        torch.testing.assert_close(compiled(x), x.sin())
    torch.testing.assert_close(torch.func.jvp(compiled, (x,), (along,)), (x.sin(), x.cos()))


def test_a_changed_input_is_noticed_in_the_backward():
    compiled = dcompile.compile(lambda x: x * x)
    for _ in range(3):
        x = torch.randn(3, requires_grad=True) * 1
        y = compiled(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_changed_input_has_a_new_version():
    def count(x):
        x.add_(1)

    compiled = dcompile.compile(count)
    x, taken = torch.zeros(3), []
    for _ in range(3):
        before = x._version
        compiled(x)
        taken.append(x._version - before)
    assert torch.equal(x, torch.full((3,), 3.0)) and taken[0] > 0 and len(set(taken)) == 1


def test_without_gradients_inside_and_outside():
    compiled = dcompile.compile(torch.sin)
    x = torch.randn(3, requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            assert not compiled(x).requires_grad and not torch.is_grad_enabled()
        assert compiled(x.detach()).requires_grad is False and torch.is_grad_enabled()
        assert compiled(x).requires_grad


def test_a_backward_inside_a_frame_that_dynamo_goes_on_with():
    @torch.compile(backend="eager")
    def step(x):
        y = inner(x)
        torch._dynamo.graph_break()
        y.sum().backward()
        return x.grad * 1

    inner = torch._dynamo.disable(dcompile.compile(torch.sin))
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        assert torch.allclose(step(x), x.detach().cos())


def test_hooks_on_saved_tensors_see_them():
    compiled = dcompile.compile(lambda x: x.sin())
    seen = []
    for _ in range(3):
        seen.clear()
        x = torch.randn(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            y = compiled(x)
        y.sum().backward()
        assert seen and torch.allclose(x.grad, x.detach().cos())


def test_nothing_is_kept_after_the_backward():
    compiled = dcompile.compile(lambda x: (x.exp() + 1).log())
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        y = compiled(x)
        node = weakref.ref(y.grad_fn)
        y.sum().backward()
        kept = weakref.ref(x)
        del x, y
        gc.collect()
        assert kept() is None and node() is None


def test_deterministic_algorithms_asked_for_after_the_forward():
    compiled = dcompile.compile(torch.sin)
    x = torch.randn(3, requires_grad=True)
    for _ in range(2):
        y = compiled(x).sum()
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
                y.backward()
        finally:
            torch.use_deterministic_algorithms(False)
