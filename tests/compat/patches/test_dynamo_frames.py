"""Calls that Dynamo traces otherwise, results of autograd Functions, certain branches, and its flag of compiling."""

from __future__ import annotations

import operator
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import Unsupported

import dcompile
from dcompile.compat.patches.dynamo_frames import certain_branches_taken

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Asking(torch.autograd.Function):
    """The gradient counts results without one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x.view(2, 2), x.view(4, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        return torch.full((4,), float(sum(gradient is None for gradient in gradients)))


class AskingBehind(Asking):
    """The same, asked in `setup_context`, and with one result that has no gradient ever."""

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return x.view(2, 2), x.view(4, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])


class Single(Asking):
    """One result, which always has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x.view(2, 2)


@pytest.mark.parametrize("function", [Asking, AskingBehind])
def test_of_several_results_the_unused_ones_have_none(function: type[Asking]) -> None:
    def first(x: torch.Tensor) -> torch.Tensor:
        return function.apply(x)[0]

    x = torch.ones(4, requires_grad=True)
    (gradient,) = torch.autograd.grad(dcompile.compile(first, options={"receipt": False})(x).sum(), x)
    assert gradient.eq(1).all()
    with pytest.raises(Unsupported, match=f"{function.__name__} calls set_materialize_grads"):
        dcompile.compile(first, fullgraph=True)(x)


def test_a_function_of_one_result_stays_in_the_graph() -> None:
    x = torch.ones(4, requires_grad=True)
    run = dcompile.compile(lambda x: Single.apply(x), fullgraph=True, options={"receipt": False})
    assert torch.autograd.grad(run(x).sum(), x)[0].eq(0).all()


class TiledScores(torch.autograd.Function):
    """Sums of exponentials of a product, tile by tile in one buffer, and a result that was not asked for."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        buffer, total = hidden.new_empty(hidden.shape[0], 4), hidden.new_zeros(hidden.shape[0])
        for start in range(0, weight.shape[0], 3):
            tile = buffer[:, :3]
            torch.mm(hidden, weight[start : start + 3].t(), out=tile)
            total += tile.exp().sum(1)
        ctx.save_for_backward(hidden, weight)
        return total, None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, absent: None) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        scores = hidden.new_empty(weight.shape[0], hidden.shape[0]).t()
        torch.mm(hidden, weight.t(), out=scores)
        scores = scores.exp() * gradient[:, None]
        return scores @ weight, scores.t() @ hidden


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo itself
def test_a_loss_over_tiles_is_one_graph_with_eager_values() -> None:
    torch.manual_seed(0)
    found = []
    for compiled in (False, True):
        hidden, weight = torch.ones(4, 5, requires_grad=True), torch.linspace(-1, 1, 30).view(6, 5).requires_grad_()

        def loss(hidden: Tensor, weight: Tensor) -> Tensor:
            return TiledScores.apply(hidden * 0.5, weight)[0].log().sum()

        call = torch.compile(loss, backend="dcompile", fullgraph=True) if compiled else loss
        value = call(hidden, weight)
        value.backward()
        found.append((value, hidden.grad, weight.grad))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("rows", [2, 3])
def test_the_buffer_holds_what_was_written(rows: int) -> None:
    def write(x: Tensor, buffer: Tensor) -> Tensor:
        return torch.add(x, 1, out=buffer[:rows, ::2]) * 2

    buffer, expected = torch.zeros(3, 4), torch.zeros(3, 4)
    x = torch.arange(2.0 * rows).view(rows, 2)
    compiled = torch.compile(write, backend="dcompile", fullgraph=True)
    torch.testing.assert_close(compiled(x, buffer), write(x, expected))
    torch.testing.assert_close(buffer, expected)


class Stack(torch.nn.Module):
    """Layers with LayerDrop, as in transformers' encoders up to version 5.17."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers, self.probability = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)), probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            skipped = self.training and torch.rand([]) < self.probability
            if not skipped:
                x = x + layer(x).tanh()
        return x


def graphs_of(function, *args):
    """Return the number of graphs of a call, and its result."""
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    with certain_branches_taken():
        result = torch.compile(function, backend=backend)(*args)
    return len(graphs), result


@pytest.mark.parametrize("probability", [0.0, pytest.param(1.0, marks=pytest.mark.full), 0.5])
def test_layers_are_one_graph_where_the_outcome_is_certain(probability):
    model, x = Stack(probability), torch.randn(2, 4)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    count, result = graphs_of(model, x)
    assert count == (0 if probability == 0.5 else 1), "Dynamo leaves a loop with a break to eager"
    torch.testing.assert_close(result, expected)


@pytest.mark.full
@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge], ids=lambda one: one.__name__)
@pytest.mark.parametrize("bound", [-1.0, 0.0, 0.5, 1, 2.0])
@pytest.mark.parametrize("mirrored", [False, True])
def test_outcomes_are_eagers(compare, bound, mirrored):
    def branch(x):
        number = torch.rand(())
        return x + 1 if (compare(bound, number) if mirrored else compare(number, bound)) else x - 1

    torch.manual_seed(0)
    expected = branch(torch.zeros(2))
    torch.manual_seed(0)
    count, result = graphs_of(branch, torch.zeros(2))
    assert torch.equal(result, expected)
    greater = (compare in (operator.gt, operator.ge)) != mirrored
    strict = compare in (operator.lt, operator.gt)
    certain = bound != 0.5 and not (bound == 0 and greater == strict)
    assert (count == 1) == certain, "otherwise a graph before the branch, and one behind it"


def test_comparisons_stay_tensors():
    def scaled(x):
        return x * (torch.rand(()) < 0.0).to(x.dtype)

    assert graphs_of(scaled, torch.ones(2))[0] == 1


@pytest.mark.full
def test_eagers_random_numbers_are_drawn_where_they_are_asked_for():
    model, x = Stack(0.0), torch.randn(2, 4)
    for options, graphs in (({}, 1), ({"fallback_random": True}, 0)):
        torch._dynamo.reset()
        call = dcompile.compile(model, options={**options, "receipt": False, "kernels": "aten"})
        torch.manual_seed(0)
        call(x).sum().backward()
        found = torch.rand(())
        torch.manual_seed(0)
        model(x)
        assert dcompile.receipt(call).graphs == graphs
        assert not options or torch.equal(found, torch.rand(()))


def test_an_optimizer_steps_while_another_thread_compiles():
    """With one flag for all threads, Adam stacked its step sizes as for a graph, and failed."""
    parameter, seen = torch.nn.Parameter(torch.ones(2)), []

    def elsewhere():
        parameter.grad = torch.ones(2)
        torch.optim.Adam([parameter], lr=0.5, foreach=True).step()
        seen.append(torch.compiler.is_compiling() == True)  # noqa: E712

    def compiling(_arguments):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        seen.append(bool(torch.compiler.is_compiling()))

    callback_handler.register_start_callback(compiling)
    try:
        assert torch.equal(dcompile.compile(lambda x: x + 1)(torch.ones(3)), torch.full((3,), 2.0))
    finally:
        callback_handler.remove_start_callback(compiling)
    assert torch.allclose(parameter, torch.full((2,), 0.5))
    assert seen == [False, hasattr(torch.compiler, "_compile_session_context")]
    assert torch.compiler.is_compiling() is False
