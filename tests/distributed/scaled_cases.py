"""What the tests of 8-bit all-gathers run on each rank; see `scaled.py`."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dcompile
from dcompile.runtime.communication import scaled_casts
from tests.distributed import scaled
from tests.distributed.cases import ATEN
from tests.distributed.fsdp_cases import copying


def made(weight: Any, mixed: bool = False, reshard: bool = True, **how: Any) -> nn.Module:
    """A sharded model, the same on every rank and in each call."""
    torch.manual_seed(7)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    dtype = torch.float32 if mixed else torch.bfloat16
    module = scaled.Layers(weight, dtype=dtype, **how)
    for block in (*module.blocks, module):
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    return module


@contextlib.contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Count all-reduces that find scales."""
    begin = scaled_casts.PendingCollective

    def counted(group: Any, device: Any, label: str, start: Any) -> Any:
        counts[label.partition(" of model")[0]] += 1
        return begin(group, device, label, start)

    with unittest.mock.patch.object(scaled_casts, "PendingCollective", counted):
        yield


def steps(module: nn.Module, call: Any, precompute: bool, accumulate: bool, looks: bool) -> list[float]:
    """Losses of some steps. `looks`: with an evaluation between them, and a checkpoint that is loaded again."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-2), list[float]()
    torch.manual_seed(dist.get_rank())
    for step in range(3):
        for last in (False, True) if accumulate else (True,):
            module.set_requires_gradient_sync(last)
            loss = call(torch.randn(8, 12, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            scaled.precompute_scales(module)
        if looks and step == 1:
            kept = {name: value.full_tensor().clone() for name, value in module.state_dict().items()}
            with torch.no_grad():
                losses.append(call(torch.ones(8, 12, dtype=torch.bfloat16)).float().mean().item())
                for name, value in module.state_dict().items():
                    rows = kept[name].chunk(dist.get_world_size())[dist.get_rank()]
                    value.to_local().copy_(rows / 2)
    return losses


def against_stock(
    precompute: bool = False,
    accumulate: bool = False,
    looks: bool = False,
    options: dict[str, Any] | None = None,
    weight: str = "Scaled",
    copies: bool = False,
    **how: Any,
) -> dict[str, Any]:
    """Losses of stock and of dcompile, their receipts with 8-bit and plain weights, and all-reduces of scales.

    `copies`: ranks copy shards from each other's memory.
    """
    found: dict[str, Any] = {"losses": []}
    counts = Counter[str]()
    for compiles in (False, True):
        module = made(getattr(scaled, weight), **how)
        call = dcompile.compile(module, options=dict(ATEN if options is None else options)) if compiles else module
        with counting(counts), copying() if copies else contextlib.nullcontext() as reach:
            found["losses"].append(steps(module, call, precompute, accumulate, looks))
    found |= {"receipt": dcompile.receipt(module), "counts": dict(counts), "copied": copies and reach.copied}
    plain = made(None, **how)
    dcompile.compile(plain, options=dict(ATEN))(torch.ones(8, 12, dtype=torch.bfloat16)).sum().backward()
    return found | {"plain": dcompile.receipt(plain)}
