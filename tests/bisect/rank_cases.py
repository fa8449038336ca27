"""What each rank does in tests of bisect under a data-parallel wrapper."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile.runtime.communication import ddp_buckets, fsdp_shards
from tests.faults.fault_models import make
from tests.faults.planted import FAULTS


def _divides_by_one_more() -> Any:
    """The average over ranks has another divisor."""
    right = ddp_buckets.BucketSet.__init__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self._scale, self._exact = 1 / 3, False

    return patch.object(ddp_buckets.BucketSet, "__init__", wrong)


def _scatters_halves() -> Any:
    """A reduce-scatter sends half of the first gradient."""
    right = fsdp_shards.ShardCommunication.start_scatter

    def wrong(self: Any, bucket: str, full: list[torch.Tensor]) -> None:
        full[0].mul_(0.5)
        right(self, bucket, full)

    return patch.object(fsdp_shards.ShardCommunication, "start_scatter", wrong)


def _adds_on_rank_1() -> Any:
    """Rank 1 changes what it has received by a rounding, which is no error by itself."""
    right = ddp_buckets.BucketSet.wait

    def wrong(self: Any, bucket: str, memory: Any) -> None:
        right(self, bucket, memory)
        if torch.distributed.get_rank() == 1:
            memory.flat.mul_(1 + 2**-23)

    return patch.object(ddp_buckets.BucketSet, "wait", wrong)


def planted(wrapper: str, fault: str) -> tuple[str, str, list[str]]:
    """Kind and name of the place that this rank names, and its report."""
    module, x = make("gated")
    x = x.detach() + torch.distributed.get_rank()
    if wrapper == "ddp":
        module = DistributedDataParallel(module)
    else:
        torch.distributed.fsdp.fully_shard(module)
    faults = {fault.name: fault.plant for fault in FAULTS} | {
        "": contextlib.nullcontext,
        "divisor": _divides_by_one_more,
        "scatter": _scatters_halves,
        "one rank": _adds_on_rank_1,
    }
    with faults[fault]():
        found = dcompile.bisect(module, x)
    place = None if found.finding is None else found.finding.place
    return ("", "", str(found)) if place is None else (place.kind, place.name, str(found))


def _memory_used_twice() -> Any:
    return next(fault for fault in FAULTS if fault.name == "memory is used twice").plant()


def watched(
    fault: str, steps: int, wrapper: str = "ddp", accumulate: bool = False
) -> tuple[list[float], list[float], list[str], str]:
    """Losses with a sentinel of every second call, stock's, notes about it, and the error that ended it."""
    faults = {fault.name: fault.plant for fault in FAULTS} | {
        "": contextlib.nullcontext,
        "divisor": _divides_by_one_more,
        "scatter": _scatters_halves,
        "one rank": lambda: _memory_used_twice() if torch.distributed.get_rank() else contextlib.nullcontext(),
    }
    stock, compiled, error = trained(steps, None, None, wrapper, accumulate), list[float](), ""
    found: list[str] = []
    with faults[fault](), tempfile.TemporaryDirectory() as folder:
        options = {
            "sentinel": 2,
            "cache_dir": folder,
            "dump": folder,
            "share_artifacts": False,
            "receipt": False,
            "verify": False,
        }
        try:
            compiled = trained(steps, options, found, wrapper, accumulate)
        except dcompile.WrongResultError as reason:
            error = str(reason)
    return compiled, stock, found, error


def trained(
    steps: int, options: dict[str, Any] | None, found: list[str] | None, wrapper: str, accumulate: bool
) -> list[float]:
    """Losses of a data-parallel model; `found` gets what its receipt says of the sentinel.

    `accumulate`: each second step reduces the gradients of two.
    """
    module, x = make("perceptron")
    x = x.detach() + torch.distributed.get_rank()
    if wrapper == "fsdp2":
        torch.distributed.fsdp.fully_shard(module)
    wrapped = DistributedDataParallel(module) if wrapper == "ddp" else module
    if options is not None:
        dcompile.compile(wrapped, options=options)
    optimizer, losses = torch.optim.SGD(wrapped.parameters(), lr=0.01), []
    for step in range(steps):
        reduces = not accumulate or step % 2 == 1
        if accumulate and wrapper == "fsdp2":
            wrapped.set_requires_gradient_sync(reduces)
        loss = wrapped(x).square().mean()
        loss.backward()
        if reduces:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if found is not None:
        receipt = dcompile.receipt(wrapped)
        found += [note for note in receipt.notes if note.startswith("sentinel")] + [*receipt.fallbacks]
    return losses
