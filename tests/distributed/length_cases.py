"""Ranks whose batches have other lengths at each step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.distributed import cases

LENGTHS = ((5, 9), (12, 7), (31, 5), (2, 30))
"""Rows of a batch at each step, on either rank."""


def classes(options: dict[str, Any]) -> dict[str, Any]:
    """How many graphs this rank had compiled after each step, and how far gradients are from stock's."""
    graphs = list[int]()
    torch._dynamo.reset()
    counters.clear()

    def steps(call: Any, ddp: Any) -> None:
        for step, lengths in enumerate(LENGTHS):
            torch.manual_seed(step)
            rows = torch.randn(lengths[dist.get_rank()], 12)
            cases.loss_of(call(rows)).backward()
            graphs.append(counters["stats"]["unique_graphs"])

    found = cases.same_as_stock(steps, options={**cases.ATEN, **options})
    return {**found, "graphs": graphs[-len(LENGTHS) :]}  # stock ran first


def other_classes() -> None:
    """Ranks that were given other classes."""
    bounds = [8, 16] if dist.get_rank() else [8, 32]
    _, call, _ = cases.pair(options={**cases.ATEN, "size_classes": bounds})
    cases.backward(call)
