"""Ranks whose batches have other lengths at each step."""

from __future__ import annotations

import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from dcompile import compat
from tests.distributed import cases
from tests.distributed.models import loss_of

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


def other_classes() -> None:
    """Ranks that were given other classes."""
    bounds = [8, 16] if dist.get_rank() else [8, 32]
    _, call, _ = cases.pair(options={**cases.ATEN, "size_classes": bounds})
    cases.backward(call)
