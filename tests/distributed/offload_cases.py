"""What the tests of offloaded activations run on each rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcompile
from tests.distributed.cases import device
from tests.distributed.fsdp_cases import full
from tests.offloading import layers, marked


def wrapped(how: str) -> nn.Module:
    """The model of the tests, in DDP with several buckets, or sharded layer by layer."""
    model = layers(count=3, width=64).to(device())
    if how == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.05)
    for part in model:
        if isinstance(part, nn.Linear):
            fully_shard(part)
    return fully_shard(model)  # type: ignore[no-any-return]


def gradients(how: str, offloads: bool, micro_batches: int = 1) -> tuple[list[torch.Tensor], Any]:
    """Gradients of the second step, and the receipt."""
    torch._dynamo.reset()
    model = wrapped(how)
    run = dcompile.compile(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with marked() if offloads else marked(lambda node: False):
        for _ in range(2):
            model.zero_grad()
            losses = []
            for n in range(micro_batches):
                last = n == micro_batches - 1
                quiet = model.no_sync() if how == "ddp" and not last else contextlib.nullcontext()  # type: ignore[operator]
                with quiet:
                    losses.append(run(torch.randn(8, 64, generator=generator).to(device())).square().mean())
                    if how == "ddp":
                        losses.pop().backward()
            for loss in losses:
                loss.backward()
    return [full(p.grad).clone() for p in model.parameters()], dcompile.receipt(run)


def same_bits(how: str, micro_batches: int = 1) -> dict[str, Any]:
    """Gradients with and without offloaded activations."""
    plain, _ = gradients(how, False, micro_batches)
    offloaded, receipt = gradients(how, True, micro_batches)
    return {"same": all(map(torch.equal, plain, offloaded)), "receipt": receipt}
