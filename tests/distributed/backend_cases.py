"""What the two-rank tests of option `kernels` run on each rank: training with another compiler, beside stock's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from dcompile.capture.entry import find_model
from dcompile.compiler import compute_regions
from dcompile.errors import PlanMismatchError
from tests.distributed.harness import Ranks
from tests.kernel_backends.fakes import eager, installed
from tests.kernel_backends.matrix import CALLABLE, outcome

CASES = "tests.distributed.backend_cases:"
STEPS = 2


class Layer(nn.Module):
    """A residual block with a norm: pointwise work, reductions and products."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


class Products(nn.Module):
    """As little as has a kernel of its own, between products that a library computes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def make(layer: str = "products") -> nn.Sequential:
    torch.manual_seed(3)
    kind = {"products": Products, "block": Layer}[layer]
    return nn.Sequential(*(kind() for _ in range(2))).to(device())


def device() -> torch.device:
    """Where this pair of ranks computes."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device())


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


def found_of(
    call: Any, got: list[torch.Tensor], expected: list[torch.Tensor], measure: Callable[[], Any]
) -> dict[str, Any]:
    """What a case came to: whether values are stock's, the receipt, and when collectives ran beside regions."""
    with dcompile.profile(call) as measured:
        for _ in range(2):
            measure()
    programs = [e for g in find_model(call).graphs for e in g.executables.values()]
    sources = {e.report.regions: e.source for e in programs}
    return {
        "same": same_bits(got, expected),
        "near": all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(got, expected, strict=True)),
        "receipt": dcompile.receipt(call),
        "overlaps": overlapped(measured.timeline),
        "kinds": [(c.kind, c.program) for c in measured.timeline.collectives],
        "sources": list(sources.values()),
        "predicted": [(e.name, e.report.schedule) for e in programs],
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


def compiler_of(name: str) -> Any:
    """What option `kernels` is given: a name, or the callable above."""
    return eager if name in ("callable", CALLABLE) else name


def ddp(
    kernels: str = "inductor", stock: str = "inductor", layer: str = "products", door: str = "dcompile"
) -> dict[str, Any]:
    """DDP with small buckets, beside stock DDP over torch.compile of the whole model.

    Each rank measures another time for the regions, so that both have to agree on one.
    """
    settings = {"bucket_cap_mb": 0.004}
    model = make(layer)
    twin = DDP(copy.deepcopy(model), **settings)
    with torch._dynamo.config.patch(optimize_ddp=False):
        expected = train(torch.compile(twin, backend=stock), twin)
    torch._dynamo.reset()
    ours = DDP(model, **settings)
    options = {"kernels": compiler_of(kernels)}
    if door == "dcompile":
        call = dcompile.compile(ours, options=options)
    else:
        call = torch.compile(ours, backend="dcompile", options=options)
    with mock.patch.object(compute_regions, "measure_us", lambda *_: 1e3 + dist.get_rank()):
        got = train(call, ours)
    return found_of(call, got, expected, lambda: call(batch(0)).square().mean().backward())


def fsdp2(kernels: str = "inductor", stock: str = "inductor", layer: str = "products") -> dict[str, Any]:
    """FSDP2 layer by layer, beside stock FSDP2 with each layer compiled by itself."""
    model = make(layer)
    twin = copy.deepcopy(model)
    for place, part in enumerate(twin):
        twin[place] = torch.compile(part, backend=stock)
    for each in (twin, model):
        for part in each:
            fully_shard(part)
        fully_shard(each)
    expected = train(twin, twin)
    torch._dynamo.reset()
    call = dcompile.compile(model, options={"kernels": compiler_of(kernels)})
    got = train(call, model)
    return found_of(call, got, expected, lambda: call(batch(0)).square().mean().backward())


def cell(name: str, case: str) -> str:
    """A cell of the table: what became of the regions. Values are compared with eager's, for kernels may differ."""
    with installed(name):
        found = {"ddp": ddp, "fsdp2": fsdp2}[case](name, stock="aot_eager")
    receipt = found["receipt"]
    assert receipt.eligible and receipt.graphs == 1 and found["near"]
    return outcome(name, receipt)


def other(gm: Any, example_inputs: Any) -> Any:
    """Another compiler that runs what it is handed."""
    return eager(gm, example_inputs)


def disagreeing() -> str:
    """Each rank has a compiler of its own: what both are told."""
    model = DDP(make())
    call = dcompile.compile(model, options={"kernels": (eager, other)[dist.get_rank()]})
    try:
        call(batch(0)).sum().backward()
    except PlanMismatchError as error:
        return str(error)
    return "no error"


def shared(folder: str) -> dict[str, Any]:
    """One rank plans a graph, the other one receives it, and makes its own regions."""
    model = DDP(make(), bucket_cap_mb=0.004)
    twin = copy.deepcopy(model.module)
    own = f"{folder}/{dist.get_rank()}"
    settings = {"kernels": eager, "verify": False, "cache_dir": own}
    got = train(dcompile.compile(model, options=settings), model)
    stock = DDP(twin, bucket_cap_mb=0.004)
    receipt = dcompile.receipt(model)
    return {
        "same": same_bits(got, train(stock, stock)),
        "received": receipt.graphs_received,
        "regions": receipt.regions,
    }


def as_stock(ranks: Ranks, case: str, **keywords: Any) -> dict[str, Any]:
    """Run a case, from the test's process: one graph, as stock's bit for bit, nothing left to other kernels."""
    found = ranks.run(CASES + case, 280, **keywords)
    assert found[0]["predicted"] == found[1]["predicted"], "ranks measured regions, each for itself"
    for each in found:
        receipt = each["receipt"]
        assert each["same"] and receipt.eligible and not receipt.fallbacks
        assert (receipt.graphs, receipt.graph_breaks, receipt.kernel_calls) == (1, 0, 0)
    return found[0]
