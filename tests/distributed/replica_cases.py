"""What each rank does in tests of replicas that drift apart."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile.runtime.coordination import replicas

WAIT_S = 20
"""For the coordinators' threads, which look around once a second."""


def trained(how: str, steps: int, between: Any) -> nn.Module:
    """Train a model of two replicas; `between(step, module)` is called before each step."""
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    if how == "ddp":
        module = DistributedDataParallel(module)
    else:
        fully_shard(module, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    dcompile.compile(module, options={"receipt": False})
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for number in range(steps):
        between(number, module)
        module(torch.randn(4, 6) + dist.get_rank()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def drifts(how: str) -> str:
    """Change one element on rank 1; return what the receipt says of it, as soon as it does."""

    def between(number: int, module: nn.Module) -> None:
        if number == 2 and dist.get_rank() == 1:
            weight = next(p for name, p in module.named_parameters() if name.endswith("2.weight"))
            with torch.no_grad():
                (weight.to_local() if isinstance(weight, DTensor) else weight)[0, 0] += 1e-3

    module, until = trained(how, 4, between), time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if found := [note for note in dcompile.receipt(module).notes if "drifted apart" in note]:
            return found[0]
        time.sleep(0.1)
    return ""


def saves_on_one_rank(how: str) -> tuple[str, int, int]:
    """Save on rank 0 alone between steps; return what was found, digests that were taken, and the state's size."""
    taken, saved = [], []
    right = replicas.take_digest

    def take(*args: Any) -> Any:
        taken.append(args[0])
        return right(*args)

    def between(number: int, module: nn.Module) -> None:
        if dist.get_rank() == 0:
            saved.append(len(module.state_dict()))

    with patch.object(replicas, "take_digest", take):
        module = trained(how, 5, between)
        time.sleep(2.5)
    notes = [note for note in dcompile.receipt(module).notes if "drifted apart" in note]
    return "".join(notes), len(taken), sum(saved)
