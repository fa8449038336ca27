"""What the two-rank tests of option `kernels` run on each rank: training with another compiler, beside stock's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from dcompile.capture.entry import find_model

STEPS = 2


class Layer(nn.Module):
    """A residual block with a norm: pointwise work, reductions and products."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def make(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(call: Callable[..., Any], model: nn.Module) -> list[torch.Tensor]:
    """SGD steps: losses, then gradients and parameters as they are afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = call(batch(step)).square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
    left = [t for p in model.parameters() for t in (p.grad, p.detach())]
    return [*losses, *(getattr(t, "_local_tensor", t).clone() for t in left)]


def same_bits(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def found_of(call: Any, same: bool, measure: Callable[[], Any]) -> dict[str, Any]:
    """What a case came to: whether values are stock's, the receipt, and when collectives ran beside regions."""
    with dcompile.profile(call) as measured:
        for _ in range(2):
            measure()
    sources = {e.report.regions: e.source for g in find_model(call).graphs for e in g.executables.values()}
    return {
        "same": same,
        "receipt": dcompile.receipt(call),
        "overlaps": overlapped(measured.timeline),
        "kinds": [(c.kind, c.program) for c in measured.timeline.collectives],
        "sources": list(sources.values()),
    }


def overlapped(timeline: Any) -> list[tuple[str, str]]:
    """(collective, region) of regions that ran while a collective was on its way."""
    step = timeline.typical
    regions = [span for span in step.spans if "region" in span.name]
    return [
        (e.bucket, span.name)
        for e in step.exchanges
        for span in regions
        if e.arrived <= span.begin and span.end <= e.wait_end
    ]


def ddp(kernels: Any = "inductor", door: str = "dcompile", stock: str = "inductor") -> dict[str, Any]:
    """DDP with small buckets, beside stock DDP over torch.compile of the whole model."""
    settings = {"bucket_cap_mb": 0.01}
    model = make()
    expected = None
    if stock:
        twin = DDP(copy.deepcopy(model), **settings)
        with torch._dynamo.config.patch(optimize_ddp=False):
            expected = train(torch.compile(twin, backend=stock), twin)
        torch._dynamo.reset()
    ours = DDP(model, **settings)
    options = {"kernels": kernels}
    if door == "dcompile":
        call = dcompile.compile(ours, options=options)
    else:
        call = torch.compile(ours, backend="dcompile", options=options)
    got = train(call, ours)
    return found_of(
        call, expected is None or same_bits(got, expected), lambda: call(batch(0)).square().mean().backward()
    )


def fsdp2(kernels: Any = "inductor", stock: str = "inductor") -> dict[str, Any]:
    """FSDP2 layer by layer, beside stock FSDP2 with each layer compiled by itself."""
    model = make()
    twin = copy.deepcopy(model)
    if stock:
        for place, layer in enumerate(twin):
            twin[place] = torch.compile(layer, backend=stock)
    for each in (twin, model):
        for layer in each:
            fully_shard(layer)
        fully_shard(each)
    expected = train(twin, twin)
    torch._dynamo.reset()
    call = dcompile.compile(model, options={"kernels": kernels})
    got = train(call, model)
    return found_of(call, same_bits(got, expected), lambda: call(batch(0)).square().mean().backward())
