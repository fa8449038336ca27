"""Jobs to precompile: tiny models, wrapped in each way; and what ranks that are there make of what was precompiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcompile


class Block(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Net(torch.nn.Module):
    def __init__(self, width: int = 8, inner: int = 32, breaks: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(width, inner) for _ in range(2))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x.square().mean()


def batch(width: int = 8, seed: int = 0) -> tuple[torch.Tensor]:
    """Another one for each seed; of tensors without memory all are the same."""
    torch.manual_seed(seed)
    return (torch.randn(4, width),)


def sharded(model: Any, **how: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def ddp(**how: Any) -> Any:
    return DistributedDataParallel(Net(), **how), batch()


def fsdp2(**how: Any) -> Any:
    return sharded(Net(), **how), batch()


def on_meta() -> Any:
    with torch.device("meta"):
        model = Net()
    model = sharded(model)
    model.to_empty(device="cpu")
    return model, batch()


def tensor_parallel(mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Net()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh=mesh["dp"]), batch()


def blocks_alone() -> Any:
    model, inputs = Net(), batch()
    for layer in model.layers:
        dcompile.compile(layer)
    return DistributedDataParallel(model), inputs


def replicated() -> Any:
    from torch.distributed._composable.replicate import replicate

    model = Net()
    replicate(model)
    return model, batch()


MIXED = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
JOBS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (lambda: (Net(), batch()), {}),
    "ddp": (ddp, {}),
    "ddp-unused": (lambda: ddp(find_unused_parameters=True), {}),
    "ddp-static": (lambda: ddp(static_graph=True), {}),
    "ddp-breaks": (lambda: (DistributedDataParallel(Net(breaks=True)), batch()), {}),
    "ddp-stock": (ddp, {"options": {"distributed": "stock"}}),
    "ddp-dynamic": (ddp, {"dynamic": True}),
    "fsdp2": (fsdp2, {}),
    "fsdp2-uneven": (lambda: (sharded(Net(7, 13)), batch(7)), {}),
    "fsdp2-mixed": (lambda: fsdp2(**MIXED), {}),
    "fsdp2-breaks": (lambda: (sharded(Net(breaks=True)), batch()), {}),
    "fsdp2-stock": (fsdp2, {"options": {"distributed": "stock"}}),
    "fsdp2-meta": (on_meta, {}),
    "hsdp": (lambda mesh: fsdp2(mesh=mesh), {"mesh": {"replicas": 2, "shards": -1}}),
    "fsdp1": (
        lambda: (FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu")), batch()), {},
    ),
    "tp": (tensor_parallel, {"mesh": {"dp": -1, "tp": 2}}),
    "blocks": (blocks_alone, {}),
    "replicate": (replicated, {}),
    "torch.compile": (lambda: (torch.compile(DistributedDataParallel(Net()), backend="dcompile"), batch()), {}),
}  # fmt: skip
"""Name -> build, and arguments of `precompile`."""


def step(model: Any, x: torch.Tensor) -> None:
    """Two steps with an optimizer, whose count of steps is a tensor."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- on ranks that are there ------------------------------------------------------------------------------------------


def trained(name: str, folder: str, cache: str) -> dict[str, Any]:
    """Two steps of a job under stock PyTorch and from a precompiled folder: differences, and what was built."""
    build, _ = JOBS[name]
    how = {"precompiled": folder, "cache_dir": f"{cache}/{dist.get_rank()}", "verify": False}
    found: dict[bool, list[torch.Tensor]] = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model, _ = build()
        if compiled:
            dcompile.compile(model, options=how)
        found[compiled] = list(_steps(model))
    pairs = zip(found[False], found[True], strict=True)
    return {
        "worst": max((stock - ours).abs().max().item() for stock, ours in pairs),
        "largest": max(value.abs().max().item() for value in found[False]),
        "receipt": dcompile.receipt(model),
        "seen": len(found[True]),
    }


def _steps(model: Any) -> Any:
    """The loss and this rank's gradients of each step."""
    for seed in range(2):
        (x,) = batch(seed=10 * seed + dist.get_rank())
        loss = model(x)
        loss.backward()
        yield loss.detach()
        for parameter in model.parameters():
            gradient: Any = parameter.grad
            yield (gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone()
            parameter.grad = None
