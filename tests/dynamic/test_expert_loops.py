"""Loops over experts, each on the rows that a router sends it: one graph, right where an expert gets none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcompile

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    # Dynamo looks at what code behind a graph break is given
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
EXPERTS, CHOSEN, WIDTH, INNER, ROWS = 3, 2, 16, 24, 10


class Mixture(nn.Module):
    """Routed experts, stacked; `_loop` is how they take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.2)

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.up[number]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[number])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(F.softmax(self.router(x), -1), CHOSEN)
        return self._loop(x, weights / weights.sum(-1, keepdim=True), chosen, torch.zeros_like(x))


class Adding(Mixture):
    def _loop(self, x, weights, chosen, result):
        for number in range(EXPERTS):
            rows, places = torch.where(chosen == number)
            result.index_add_(0, rows, self.expert(number, x[rows]) * weights[rows, places, None])
        return result


class Putting(Mixture):
    """Rows of an expert that nobody chose are put nowhere: there is no first one that could be read."""

    def _loop(self, x, weights, chosen, result):
        for number in range(EXPERTS):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            result[rows] += weights[rows, places, None] * self.expert(number, x[rows])
        return result


class Masking(Mixture):
    def _loop(self, x, weights, chosen, result):
        for number in range(EXPERTS):
            mine = (chosen == number).any(-1)
            weight = (weights * (chosen == number)).sum(-1)[mine]
            result[mine] = result[mine] + self.expert(number, x[mine]) * weight[:, None]
        return result


class Skipping(Mixture):
    """A branch on a size that depends on values: TorchDynamo breaks the graph there."""

    def _loop(self, x, weights, chosen, result):
        for number in range(EXPERTS):
            rows, places = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            result.index_add_(0, rows, self.expert(number, x[rows]) * weights[rows, places, None])
        return result


class Hitting(Mixture):
    """As many turns as experts are hit."""

    def _loop(self, x, weights, chosen, result):
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for (number,) in mask.sum((-1, -2)).greater(0).nonzero():
            places, rows = torch.where(mask[number])
            result.index_add_(0, rows, self.expert(number, x[rows]) * weights[rows, places, None])
        return result


def batches() -> list[torch.Tensor]:
    """The last sends all rows to the same experts, and one gets none."""
    same = torch.randn(1, WIDTH).expand(ROWS, WIDTH)  # of three experts, each row has two
    return [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), same + 0.01 * torch.randn(ROWS, WIDTH)]


def step(model: nn.Module, call: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    result = call(x)
    result.square().sum().backward()
    return [result.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def held_to_eager(kind: type[Mixture], **options: bool) -> Any:
    torch.manual_seed(0)
    theirs = kind()
    model = copy.deepcopy(theirs)
    call = dcompile.compile(model, options={"receipt": False, **options})
    for x in batches():
        torch.testing.assert_close(step(model, call, x), step(theirs, theirs, x), rtol=1e-4, atol=1e-5)
    return dcompile.receipt(call)


@pytest.mark.parametrize("kind", [Adding, Putting, Masking])
def test_a_loop_over_all_experts_is_one_graph(kind):
    receipt = held_to_eager(kind)
    assert receipt.graphs == 1 and receipt.graph_breaks == 0, str(receipt)


@pytest.mark.parametrize("kind", [Skipping, Hitting])
def test_a_loop_that_asks_who_is_hit_is_right(kind):
    assert held_to_eager(kind).kernels


def test_with_the_setting_off_graphs_break_as_in_torch_compile():
    assert held_to_eager(Adding, late_sizes=False).graphs > 1
