"""Ranks whose batches have other lengths at each step."""

from __future__ import annotations

import random
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
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


class RandomModel(nn.Module):
    """Three to six parts, each of which reads the input or an earlier part's result; all results are returned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw, width = random.Random(seed), 8
        self.parts, self.ways = nn.ModuleList(), list[tuple[int, bool, bool]]()
        for number in range(draw.randint(3, 6)):
            kind, bias = draw.choice(["linear", "linear", "norm", "gated", "scale"]), draw.random() < 0.7
            made: dict[str, Callable[[], nn.Module]] = {
                "linear": lambda bias=bias: nn.Sequential(
                    nn.Linear(width, width, bias=bias), draw.choice(ACTIVATIONS)()
                ),
                "norm": lambda: draw.choice([nn.LayerNorm, nn.RMSNorm])(width),
                "gated": lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.GLU()),
                "scale": lambda: nn.Linear(width, width),
            }
            self.parts.append(made[kind]())
            self.ways.append((draw.randint(0, number), kind == "scale", draw.random() < 0.4))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        values = [x]
        for part, (source, scales, adds) in zip(self.parts, self.ways, strict=True):
            found = part(values[source])
            found = found.sigmoid() * values[-1] if scales else found
            values.append(found + values[source] if adds else found)
        return values[1:]


ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh)


def random_models(seeds: Sequence[int], cache: str) -> dict[int, float]:
    """How far gradients of each model are from stock's, where batches differ on the ranks from the first step on."""
    return {seed: max(_of_random_model(seed, f"{cache}/{seed}")) for seed in seeds}


def _of_random_model(seed: int, cache: str) -> Iterator[float]:
    torch._dynamo.reset()
    draw, pair = random.Random(seed), list[Any]()
    for _ in range(2):
        torch.manual_seed(seed)
        pair.append(RandomModel(seed))
        for part in pair[-1].parts:
            fully_shard(part)
        fully_shard(pair[-1])
    call = dcompile.compile(pair[1], options={"cache_dir": cache, "receipt": False})
    for step in range(3):
        rows, used = draw.choices([2, 3, 4, 6], k=2), draw.sample(range(len(pair[0].parts)), 2)
        for module, run in zip(pair, (pair[0], call), strict=True):
            torch.manual_seed(step)
            module.zero_grad()
            results = run(torch.randn(rows[dist.get_rank()], 5, 8))
            torch.stack([results[at].square().mean() for at in used]).sum().backward()
        yield largest_difference(*map(gradients, pair))


def other_classes() -> None:
    """Ranks that were given other classes."""
    bounds = [8, 16] if dist.get_rank() else [8, 32]
    _, call, _ = cases.pair(options={**cases.ATEN, "size_classes": bounds})
    cases.backward(call)
