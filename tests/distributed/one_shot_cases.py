"""What the tests of one-shot all-reduces run on each rank."""

from __future__ import annotations

import time
import unittest.mock
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

import dcompile
from dcompile.runtime.communication.peer_memory import one_shot
from dcompile.runtime.coordination.heartbeat import peers_of
from tests.distributed.cases import device
from tests.distributed.fsdp_cases import ProcessReach, Unreachable

SIZES = (2, 130, 4096, 65536)
"""Elements of operands: one word; not a whole block; a token of a Llama; the largest of 16 bits."""


def inboxes(kind: str) -> dict[str, Any]:
    """How two ranks meet over inboxes in memory of processes."""
    reach = {"reached": ProcessReach, "unreachable": Unreachable, "none": lambda: None}[kind]()
    group = dist.new_group()
    found = one_shot.InboxGroup(group, torch.device("cpu"), reach, 128)
    addresses = [] if found.reason else found.addresses.tolist()
    own = bool(addresses) and addresses[found.rank] == found.inbox.data_ptr()
    return {"reason": found.reason, "own": own, "addresses": len({*addresses})}


def summed(dtype: str, **options: Any) -> dict[str, Any]:
    """Sums of several sizes, call after call, by a compiled function and by the group's own collective."""
    group = dist.group.WORLD

    def both(*operands: torch.Tensor) -> list[torch.Tensor]:
        return [collectives.all_reduce(x * 2, "sum", group) + 1 for x in operands]

    step = torch.compile(both, backend="dcompile", fullgraph=True, options={"receipt": False, **options})
    starts, worst = 0, 0.0
    launch = one_shot.OneShotLaunch.start

    def counted(self: Any, *given: Any) -> Any:
        nonlocal starts
        starts += 1
        return launch(self, *given)

    with torch.no_grad(), unittest.mock.patch.object(one_shot.OneShotLaunch, "start", counted):
        for call in range(6):
            generator = torch.Generator(device()).manual_seed(10 * call + dist.get_rank())
            operands = [
                torch.randn(size, generator=generator, device=device()).to(getattr(torch, dtype)) for size in SIZES
            ]
            for got, want in zip(step(*operands), both(*operands), strict=True):
                worst = max(worst, float((got.float() - want.float()).abs().max()))
    receipt = dcompile.receipt(step)
    return {"worst": worst, "starts": starts, "notes": receipt.notes, "replays": receipt.replays}


class Layer(torch.nn.Module):
    """Half of a token's products: a norm, a row of weights, the sum over ranks and a residual."""

    def __init__(self, group: Any, norm: str) -> None:
        super().__init__()
        self.group = group
        self.norm, self.up = getattr(torch.nn, norm)(1024), torch.nn.Linear(1024, 2048, bias=False)
        self.down = torch.nn.Linear(2048, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.down(torch.nn.functional.silu(self.up(self.norm(x))))
        return x + collectives.all_reduce(partial, "sum", self.group)


def decoded(reached: bool = True, norm: str = "RMSNorm", rows: int = 1, **options: Any) -> dict[str, Any]:
    """Tokens of some sequences through eight layers, call after call, with weights that change before each.

    Kernels read weights before the ones in front of them have ended, but not before the change. `epilogues`: starts of
    all-reduces whose kernel went on with the residual and the norm.
    """
    torch.manual_seed(dist.get_rank())
    group = dist.new_group()
    layers = torch.nn.Sequential(*(Layer(group, norm) for _ in range(8))).to(device(), torch.bfloat16)
    for layer in layers:
        torch.nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    step = torch.compile(layers, backend="dcompile", fullgraph=True, options={"receipt": False, **options})
    reach = one_shot.reach_of if reached else (lambda _: None)
    worst, epilogues, launch = 0.0, 0, one_shot.OneShotLaunch.start

    def counted(self: Any, *given: Any) -> Any:
        nonlocal epilogues
        epilogues += self.has_epilogue
        return launch(self, *given)

    counting = unittest.mock.patch.object(one_shot.OneShotLaunch, "start", counted)
    with torch.no_grad(), unittest.mock.patch.object(one_shot, "reach_of", reach), counting:
        for call in range(12):
            generator = torch.Generator(device()).manual_seed(call)
            x = torch.randn(rows, 1024, generator=generator, device=device()).bfloat16()
            for parameter in layers.parameters():
                parameter.mul_(1.0 + 0.125 * (-1) ** call)
            got = step(x.clone()).clone()
            want = layers(x)
            worst = max(worst, float((got.float() - want.float()).norm() / want.float().norm()))
    receipt = dcompile.receipt(step)
    return {"worst": worst, "notes": receipt.notes, "replays": receipt.replays, "kernels": receipt.kernels,
            "epilogues": epilogues, "same": _same_on_all_ranks(got)}  # fmt: skip


def _same_on_all_ranks(result: torch.Tensor) -> bool:
    """Whether every rank has the same bits."""
    results = [torch.empty_like(result) for _ in range(dist.get_world_size())]
    dist.all_gather(results, result.contiguous())
    return all(torch.equal(result, other) for other in results)


def called_off(**options: Any) -> Any:
    """Rank 1 calls the job off while rank 0's kernel waits for it."""
    group = dist.new_group(timeout=timedelta(seconds=60))

    def double(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(x * 2, "sum", group)

    step = torch.compile(double, backend="dcompile", fullgraph=True, options={"receipt": False, **options})
    x = torch.ones(4096, device=device(), dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(4):
            step(x)
        torch.cuda.synchronize()
        peers = peers_of(group)
        assert peers is not None and [inboxes.reason for inboxes in peers.inboxes.values()] == [""]
        began = time.monotonic()
        try:
            if dist.get_rank():
                time.sleep(0.5)
                peers.call_off("dcompile: rank 1 has had enough")
            else:
                step(x)
                torch.cuda.synchronize()
                step(x)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began
