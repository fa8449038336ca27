"""Ranks whose batches have other lengths at each step."""

from __future__ import annotations

import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

import dcompile
from dcompile import compat
from tests.distributed import cases
from tests.distributed.fsdp_cases import gradients
from tests.distributed.models import loss_of
from tests.distributed.training import largest_difference

LENGTHS = ((5, 9), (12, 7), (31, 5), (2, 30))
"""Rows of a batch at each step, on either rank."""
OTHERS = ((14, 6), (3, 27))
"""The same in a later start."""


def classes(options: dict[str, Any], lengths: Sequence[tuple[int, int]] = LENGTHS) -> dict[str, Any]:
    """How many graphs this rank had compiled after each step, and how far gradients are from stock's."""
    graphs = list[int]()
    torch._dynamo.reset()
    counters.clear()

    def steps(call: Any, ddp: Any) -> None:
        for step, rows in enumerate(lengths):
            torch.manual_seed(step)
            loss_of(call(torch.randn(rows[dist.get_rank()], 12))).backward()
            graphs.append(counters["stats"]["unique_graphs"])

    found = cases.same_as_stock(steps, options={**cases.ATEN, **options})
    return {**found, "graphs": graphs[-len(lengths) :]}  # stock ran first


def two_starts(options: dict[str, Any], cache: str) -> list[dict[str, Any]]:
    """A start with an empty cache, and one with other lengths and other values, in which nothing may be traced."""
    kept = {**options, "cache_dir": cache, "verify": False}
    first = classes(kept)
    dist.barrier()
    with unittest.mock.patch.object(compat.aot, "min_cut_partition", None):
        return [first, classes(kept, OTHERS)]


class Branches(nn.Module):
    """Parts side by side, each with a group of its own; a loop behind the last part reads what the first one does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.left, self.right = nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(self.norm(x)).tanh(), self.right(x).relu() + x


def branches(cache: str, sizes: Sequence[tuple[int, int]] = ((2, 3), (4, 3), (3, 4))) -> list[float]:
    """How far gradients are from stock's: on one rank the first size is a number, when it is a symbol on the other."""
    torch._dynamo.reset()
    stock, ours = (spread() for spread in [_sharded_branches] * 2)
    call = dcompile.compile(ours, options={"cache_dir": cache, "receipt": False})
    worst = list[float]()
    for step, rows in enumerate(sizes):
        for module, run in ((stock, stock), (ours, call)):
            torch.manual_seed(step)
            first, second = run(torch.randn(rows[dist.get_rank()], 5, 8))
            module.zero_grad()
            (first.square().sum() + second.sum()).backward()
        worst.append(largest_difference(gradients(stock), gradients(ours)))
    return worst


def _sharded_branches() -> Any:
    made = Branches()
    for part in made.children():
        fully_shard(part)
    return fully_shard(made)


def other_classes() -> None:
    """Ranks that were given other classes."""
    bounds = [8, 16] if dist.get_rank() else [8, 32]
    _, call, _ = cases.pair(options={**cases.ATEN, "size_classes": bounds})
    cases.backward(call)
