"""An autograd Function that asks which of its results have no gradient is told the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

import dcompile

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
