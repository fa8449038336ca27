"""What the tests of tensor parallelism without data parallelism run on each rank, and of a model's own collectives."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import dcompile
from tests.distributed import models, tp_cases
from tests.distributed.cases import device
from tests.distributed.fsdp_cases import full
from tests.distributed.models import batch, loss_of
from tests.distributed.training import largest_difference

EXACT = {"kernels": "aten"}


@functools.cache
def mesh() -> Any:
    """All ranks, side by side."""
    return init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))


def parallel(name: str) -> Any:
    """A model of `tp_cases`, spread over all ranks and nothing else."""
    model, plan = tp_cases.PLANS[name]
    torch.manual_seed(7)
    return parallelize_module(model().to(device()), mesh(), plan)


def inputs(module: Any, step: int, rows: int = 2) -> dict[str, Any]:
    """The same on every rank."""
    if hasattr(module, "embed"):
        tokens = torch.randint(0, 32, (rows, 8), generator=torch.Generator().manual_seed(step))
        return {"tokens": tokens.to(device())}
    plain = models.llama() if hasattr(module, "model") else models.Mlp()
    return {name: value[:rows].to(device()) for name, value in batch(plain, 0, step).items()}


def gradients(module: Any) -> dict[str, Any]:
    return {name: full(parameter.grad) for name, parameter in module.named_parameters()}


def placements(module: Any) -> list[Any]:
    """How the gradients of a module are spread."""
    return [(type(p.grad).__name__, getattr(p.grad, "placements", None)) for p in module.parameters()]


def compared(
    stock: Any, module: Any, loss: Callable[[Any, Any, int], torch.Tensor], options: dict[str, Any] | None, **how: Any
) -> dict[str, Any]:
    """Three steps both ways, the last one's gradients kept: largest differences, and the receipt.

    Differences are relative to values above 1: rounding grows with what is summed.
    """
    call = dcompile.compile(module, options=options or {}, fullgraph=True, **how)
    losses: list[dict[str, Any]] = [{}, {}]
    for step in range(3):
        for found, run, each in zip(losses, (stock, call), (stock, module), strict=True):
            each.zero_grad()
            value = loss(run, each, step)
            value.backward()
            found[str(step)] = full(value.detach())
    return {
        "loss": largest_difference(*losses),
        "grad": largest_difference(gradients(stock), gradients(module)),
        "placements": placements(stock) == placements(module),
        "receipt": dcompile.receipt(module),
    }


def _loss(run: Any, module: Any, step: int, rows: int = 2) -> torch.Tensor:
    result = run(**inputs(module, step, rows))
    return loss_of(result[0] if isinstance(result, tuple) else result)


def trained(name: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A model that `parallelize_module` has spread, against eager."""
    return compared(parallel(name), parallel(name), _loss, options)


def trained_with_sizes(name: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Batches of other sizes, one program."""
    return compared(parallel(name), parallel(name), lambda *how: _loss(*how, rows=2 + how[-1]), options, dynamic=True)


def loss_in_parallel(options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The model returns a DTensor: autograd hands the backward one, too."""

    def loss(run: Any, module: Any, step: int) -> torch.Tensor:
        tokens = inputs(module, step)["tokens"]
        return nn.functional.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten())

    with loss_parallel():
        return compared(parallel("loss"), parallel("loss"), loss, options)


class Spread(nn.Module):
    """Takes and returns DTensors, one of them without a gradient, and counts in a buffer that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.register_buffer("sums", torch.zeros(12))

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        with torch.no_grad():
            self.sums.add_(y.detach().sum(0))
        return self.sums * 2, torch.relu(y), y.to_local().sin()


def spread_all_the_way(options: dict[str, Any] | None = None, rows: int = 0) -> dict[str, Any]:
    """DTensors come in, go out, and are changed in place. `rows`: how many more each batch has, by one program."""

    def make() -> Any:
        torch.manual_seed(7)
        module = parallelize_module(Spread(), mesh(), {"a": ColwiseParallel(use_local_output=False)})
        module.sums = distribute_tensor(module.sums, mesh(), [Shard(0)])
        return module

    def loss(run: Any, module: Any, step: int) -> torch.Tensor:
        x = torch.randn(4 + rows * step, 12, generator=torch.Generator().manual_seed(step))
        sums, y, local = run(distribute_tensor(x, mesh(), [Shard(0)]))
        assert isinstance(y, DTensor) and isinstance(sums, DTensor)
        assert (sums.requires_grad, y.requires_grad, local.requires_grad) == (False, True, True)
        return (y.sum() + sums.sum()).full_tensor() + local.sum()

    stock, module = make(), make()
    found = compared(stock, module, loss, options, **({"dynamic": True} if rows else {}))
    return found | {"sums": largest_difference({"sums": full(stock.sums)}, {"sums": full(module.sums)})}


class Blocks(nn.Module):
    """Blocks that are computed again in the backward, with the collectives inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def checkpointed_blocks(options: dict[str, Any] | None = None) -> dict[str, Any]:
    def make() -> Any:
        torch.manual_seed(7)
        module = Blocks()
        for block in module.blocks:
            parallelize_module(block, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return module

    return compared(make(), make(), _loss, options)


def started_twice(name: str, folder: str) -> dict[str, Any]:
    """The same model compiled twice, as by two jobs one after the other."""
    options = {"verify": False, "cache_dir": f"{folder}/rank{dist.get_rank()}"}
    receipts = []
    for _ in range(2):
        torch._dynamo.reset()
        module = parallel(name)
        _loss(dcompile.compile(module, options=options), module, 0).backward()
        receipts.append(dcompile.receipt(module))
    return {"built": [r.built for r in receipts], "cached": [r.graphs_cached for r in receipts], "receipt": receipts[1]}


def over_ddp() -> dict[str, Any]:
    """DDP over DTensors makes parameters anew in each forward: losses, and what the receipt says."""
    both = init_device_mesh(device().type, (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))

    def make() -> Any:
        torch.manual_seed(7)
        module = parallelize_module(models.Two(), both["tp"], tp_cases.TWO)
        return nn.parallel.DistributedDataParallel(module, device_mesh=both["dp"])

    stock, wrapped = make(), make()
    call = dcompile.compile(wrapped)
    x = inputs(models.Two(), 0)["x"]
    losses = []
    for run in (stock, call):
        for _ in range(2):
            loss = run(x).square().mean()
            loss.backward()
        losses.append(loss.item())
    return {"losses": losses, "receipt": dcompile.receipt(wrapped)}


# --- collectives that a model's own code calls


def _every_kind(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One of each kind, over the default group."""
    group = dist.group.WORLD
    y = x @ weight
    in_place = y.clone()
    dist.all_reduce(in_place)
    gathered, other = collectives.all_gather_into_tensor_coalesced([y, x + 1], group)
    summed, most = collectives.all_reduce_coalesced([y, x * 2], "max", group)
    rows = [1, 1] if dist.get_rank() == 0 else [3, 3]
    results = (
        collectives.all_reduce(y, "sum", group) * 2,
        collectives.all_reduce((x > 0).to(torch.int64), "sum", group),
        collectives.all_gather_tensor(y, 1, group).relu(),
        collectives.reduce_scatter_tensor(y, "avg", 0, group) * 3,
        *collectives.reduce_scatter_tensor_coalesced([y, x], "sum", [0, 0], group),
        collectives.all_to_all_single(y, None, None, group) * 3,
        collectives.all_to_all_single(y, rows, [1, 3], group) * 3,
        collectives.broadcast(y, 1, group) * 3,
        in_place, gathered, other, summed, most,
    )  # fmt: skip
    return tuple(map(collectives.wait_tensor, results))


def every_kind(matmul: str) -> dict[str, Any]:
    """Results with dcompile, twice, against eager's on the same ranks; what is said of them."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 has other names, too
    torch.manual_seed(dist.get_rank())
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    if matmul == "own":  # it sums in another order than eager's: sums of few digits are exact in any order
        x, weight = x.mul(16).round() / 16, weight.mul(16).round() / 16
    with torch.no_grad():
        expected = _every_kind(x, weight)
        call = dcompile.compile(_every_kind, fullgraph=True, options={"matmul": matmul})
        found = [call(x, weight) for _ in range(2)][1]
    same = [torch.equal(one, two) for one, two in zip(expected, found, strict=True)]
    report = dcompile.explain(call, x, weight)
    shown = [(e.kind, e.group) for graph in report.graphs for e in graph.exchanges]
    return {"same": same, "shown": shown, "receipt": dcompile.receipt(call)}


def differentiated() -> dict[str, Any]:
    """Forms of the functional collectives that autograd sees through, forward and backward."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    group = dist.group.WORLD
    linear = nn.Linear(8, 8)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        parts = (
            collectives.all_reduce(y, "sum", group),
            collectives.all_gather_tensor_autograd(y, 0, group)[:4],
            collectives.reduce_scatter_tensor_autograd(torch.cat((y, y)), "sum", 0, group),
            collectives.all_to_all_single_autograd(y, None, None, group),
        )
        return sum(part.sin().sum() for part in map(collectives.wait_tensor, parts))

    grads = []
    call = dcompile.compile(model, fullgraph=True)
    for run in (model, call):
        for _ in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
            linear.zero_grad()
            run(x).backward()
        grads.append({"x": x.grad, "weight": linear.weight.grad.clone()})
    return {"grad": largest_difference(*grads), "receipt": dcompile.receipt(call)}


def disagreeing() -> None:
    """Each rank's model reduces with another operation."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x, "sum" if dist.get_rank() == 0 else "max", dist.group.WORLD) + 1

    with torch.no_grad():
        dcompile.compile(model)(torch.ones(3))
