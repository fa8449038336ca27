"""Results that a script writes to tiles of a buffer are in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dcompile  # noqa: F401 (registers the backend)


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
