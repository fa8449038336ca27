"""What the two-rank tests of measuring run on each rank; every function is one case and returns plain data."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile.explain import profile
from tests.distributed import fsdp1_cases

PLAIN = {"receipt": False, "kernels": "aten"}
"""For what is about exchanges: kernels of our own take as long again to make."""


class SlowGradient(torch.autograd.Function):
    """Takes its time in the backward, between the compiled programs of two layers."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def late(seconds):
    """Rank 1 comes `seconds` later to the only bucket of the backward."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    dcompile.compile(model, options={"receipt": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 64)

    def step(wait):
        y = SlowGradient.apply(model(x), wait)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0.0)
    with dcompile.profile(model) as measured:
        for _ in range(3):
            dist.barrier()
            step(seconds * dist.get_rank())
    step(0.0)
    (found,) = measured.timeline.collectives
    report = dcompile.explain(model, x)
    return {
        "steps": len(measured.timeline.steps),
        "world": (measured.timeline.rank, measured.timeline.world),
        "exchange": (found.kind, found.bucket, found.group, found.nbytes),
        "producer": found.producer,
        "skew": found.skew,
        "exposed": found.exposed,
        "exposed_skew": found.exposed_skew,
        "seconds": found.seconds,
        "latest_rank": found.latest_rank,
        "advice": found.advice,
        "lanes": sorted({span.lane for span in measured.timeline.typical.spans}),
        "kept": report.timeline is measured.timeline and report.receipt.eligible,
        "text": str(report),
        "notes": measured.timeline.notes,
    }


def sharded():
    """A model in fully_shard: gathers in forward and backward, reductions in the backward."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(8, 64)
    before = [p.to_local().clone() for p in model.parameters()]
    report = dcompile.explain(model, x)
    assert all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
    dcompile.compile(model, options=PLAIN)

    def step():
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.to_local().clone() for p in model.parameters()]

    expected = step()
    with dcompile.profile(model) as measured:
        same = all(torch.equal(a, b) for _ in range(2) for a, b in zip(step(), expected, strict=True))
    return {
        "explained": [(e.kind, e.group, e.nbytes, e.parameters) for g in report.graphs for e in g.exchanges],
        "page": str(report),
        "again": len(dcompile.explain(model, x).graphs),
        "goes_on": all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True)),
        "same": same,
        "found": [(c.kind, c.program, c.nbytes, c.group) for c in measured.timeline.collectives],
        "skews": [c.skew for c in measured.timeline.collectives],
        "seconds": [c.seconds for c in measured.timeline.collectives],
        "notes": measured.timeline.notes,
    }


def parallel():
    """FSDP2 over tensor parallelism along the sequence, on a mesh of its own."""
    from tests.distributed import tp_cases

    model = tp_cases.make("sequence", (1, 2))
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    report = dcompile.explain(model, tokens)
    dcompile.compile(model, options=PLAIN)

    def step():
        model.zero_grad()
        model(tokens).square().mean().backward()
        return [p.grad.to_local().clone() for p in model.parameters()]

    expected = step()
    with dcompile.profile(model) as measured:
        same = all(torch.equal(a, b) for _ in range(3) for a, b in zip(step(), expected, strict=True))
    forward = next(graph for graph in report.graphs if graph.name == "forward0")
    own = [found for found in measured.timeline.collectives if found.own]
    return {
        "explained": [(e.kind, e.group, e.parameters, e.seconds) for e in forward.exchanges],
        "own": [(found.kind, found.program, found.nbytes) for found in own],
        "measured": [(found.exposed, found.skew, found.predicted, found.advice) for found in own],
        "same": same,
        "notes": measured.timeline.notes,
    }


def machines():
    """Ranks that take one another for other machines compare their clocks."""
    real, rank = profile.machine, dist.get_rank()
    profile.machine = lambda: f"machine {rank}"
    now = time.perf_counter()
    try:
        return now, profile.latest_arrivals(dist.group.WORLD, "machines", [("b", 4, now + 10 * rank)])
    finally:
        profile.machine = real


def alone():
    """Only rank 1 has measured, or ranks have measured different things."""
    missing = None
    if dist.get_rank():
        missing = profile.latest_arrivals(dist.group.WORLD, "alone", [("b", 4, 1.0)], timeout_s=0.2)
    different = profile.latest_arrivals(dist.group.WORLD, "different", [("b", dist.get_rank(), 1.0)])
    return missing, different


def explained_fsdp1() -> dict[str, Any]:
    """FullyShardedDataParallel, before it is compiled: what the report says, and that training goes on as ever."""
    module = fsdp1_cases.make("mlp")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    x = torch.randn(8, 12)
    report = dcompile.explain(module, x)
    untouched = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    call = dcompile.compile(module, options={"receipt": False})
    call(x).square().mean().backward()
    kinds = {graph.kind: [exchange.kind for exchange in graph.exchanges] for graph in report.graphs}
    return {
        "adapter": report.adapter,
        "kinds": kinds,
        "modules": {name for graph in report.graphs for kernel in graph.kernels for name in kernel.modules},
        "untouched": untouched,
        "eligible": dcompile.receipt(module).eligible,
        "collectives": dcompile.receipt(module).collectives,
    }


class Logs(nn.Module):
    """Exchanges by itself, in code that runs eagerly and in its graph."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(8, 8)

    def forward(self, x):
        mean = x.mean()
        torch._dynamo.graph_break()
        torch._dynamo.disable(dist.all_reduce)(mean)
        x = self.part(x)
        dist.all_reduce(x)
        return x + mean


def explained_alone():
    """Rank 0 explains models that exchange in every way, while rank 1 does something else."""
    from torch.distributed.fsdp import fully_shard

    from tests.distributed import tp_cases

    options, found, x = PLAIN, {}, torch.randn(4, 8)
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    others = {"fsdp1": (fsdp1_cases.make("mlp"), torch.randn(8, 12)),
              "parallel": (tp_cases.make("sequence", (1, 2)), tokens)}  # fmt: skip
    trained = {"fsdp2": sharded_layers(fully_shard), "stock": sharded_layers(fully_shard), "logs": Logs()}
    for name, model in trained.items():
        dcompile.compile(model, options=options | ({"distributed": "stock"} if name == "stock" else {}))
    explained = others | {name: (model, x) for name, model in trained.items()}
    for when in ("before", "after"):
        if dist.get_rank() == 0:
            for name, (model, given) in explained.items():
                report = dcompile.explain(model, given)
                found[name, when] = {exchange.kind for graph in report.graphs for exchange in graph.exchanges}
        met = torch.ones(1)
        dist.all_reduce(met)
        assert met.item() == 2
        for model in trained.values():
            model(x).square().mean().backward()
            if dist.get_rank() == 0:
                str(dcompile.receipt(model))
        explained = {name: entry for name, entry in explained.items() if name in trained}
    return found


def sharded_layers(fully_shard):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)
