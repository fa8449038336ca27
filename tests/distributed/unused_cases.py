"""What the two-rank tests of frozen parameters, and of results that no loss uses, run on each rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from dcompile.runtime import buckets
from tests.distributed.cases import gradients, inputs, wrap
from tests.distributed.models import Lora, loss_of
from tests.distributed.training import across_ranks, largest_difference


class Counted(Lora):
    """Frozen layers, of which one is a table of integers; one can be run eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.tensor([2, 3, 4, 5]), requires_grad=False)

    def forward(self, x: torch.Tensor, apart: bool = False) -> torch.Tensor:
        out = super().forward(x)
        return self.scaled(out) if apart else out * self.steps

    @torch._dynamo.disable
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.up[2](self.down[2](torch.relu(self.base[0](x.repeat(1, 3)))))


def counted() -> nn.Module:
    torch.manual_seed(7)
    return Counted()


def frozen(apart: bool = False, **ddp: Any) -> dict[str, Any]:
    """Most parameters are frozen; behind two steps, one of them is not any more.

    `apart`: one rank calls layers eagerly in the second step. Stock DDP leaves parameters alone that were frozen when
    it was made, so the expected value of the last step is put together by hand.
    """
    stock, (call, wrapped) = DDP(counted(), **ddp), wrap(counted(), "compile(ddp)", None, **ddp)
    exchanged: list[int] = []
    worst = []

    def noted(group: Any, tensor: torch.Tensor, label: str) -> Any:
        exchanged.append(tensor.numel())
        return start_sum(group, tensor, label)

    start_sum = buckets.start_sum
    with mock.patch.object(buckets, "start_sum", noted):
        for step in range(2):
            exchanged.clear()
            for each, module in ((stock, stock), (call, wrapped)):
                module.zero_grad()
                beside = apart and step == 1 and torch.distributed.get_rank() == 1
                loss_of(each(inputs(step), apart=beside)).backward()
            worst += [largest_difference(gradients(stock), gradients(wrapped)), across_ranks(gradients(wrapped))]
    elements = sum(exchanged)
    for module in (stock.module, wrapped.module):
        module.base[1].weight.requires_grad_(True)
        module.zero_grad()
    loss_of(stock(inputs(3))).backward()
    loss_of(call(inputs(3))).backward()
    late = stock.module.base[1].weight.grad
    torch.distributed.all_reduce(late.div_(2))
    worst += [largest_difference(gradients(stock), gradients(wrapped)), across_ranks(gradients(wrapped))]
    trained = sum(p.numel() for n, p in wrapped.module.named_parameters() if n.startswith(("up", "down")))
    return {"grad": max(worst), "elements": elements, "trained": trained, "receipt": dcompile.receipt(call)}
