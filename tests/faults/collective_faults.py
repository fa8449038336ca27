"""Faults of collectives on two ranks: what each rank does, and what its sentinel and bisect find."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile.bisect.sentinel import REPLACED
from dcompile.errors import WrongResultError
from dcompile.runtime.communication.ddp_buckets import BucketSet
from dcompile.runtime.communication.fsdp_shards import ShardCommunication
from tests.faults.fault_models import make, make_input

PERIOD = 2
DIFFERENCE = 1e-3
"""Relative difference of a gradient from stock's that is no rounding."""


def _before(kind: type, name: str, change: Callable[..., None]) -> Any:
    """`change(self, *arguments)` runs before a method."""
    right = getattr(kind, name)

    def wrong(self: Any, *args: Any) -> Any:
        change(self, *args)
        return right(self, *args)

    return patch.object(kind, name, wrong)


def _after(kind: type, name: str, change: Callable[..., None]) -> Any:
    """`change(self, *arguments)` runs after a method."""
    right = getattr(kind, name)

    def wrong(self: Any, *args: Any) -> Any:
        result = right(self, *args)
        change(self, *args)
        return result

    return patch.object(kind, name, wrong)


def _is_second() -> bool:
    return dist.get_rank() == 1


def _exchange_halves(flat: torch.Tensor) -> None:
    half = flat.numel() // 2
    flat[: 2 * half] = flat[: 2 * half].roll(half)


def _lose(flat: torch.Tensor) -> None:
    flat[: -(-flat.numel() // 3)] = 0


def _wrong_divisor() -> Any:
    def change(self: Any, *_: Any) -> None:
        self._scale, self._exact = 1 / 3, False

    return _after(BucketSet, "__post_init__", change)


def _missing_wait() -> Any:
    """What a bucket has is what this rank has sent."""
    sent: dict[str, torch.Tensor] = {}
    stack = contextlib.ExitStack()
    stack.enter_context(
        _before(BucketSet, "start", lambda self, bucket, memory: sent.update({bucket: memory.flat.clone()}))
    )
    stack.enter_context(_after(BucketSet, "wait", lambda self, bucket, memory: memory.flat.copy_(sent[bucket])))
    return stack


def _missing_gather_wait() -> Any:
    """What another rank sends is not there yet."""
    full: dict[str, list[torch.Tensor]] = {}

    def clear(self: Any, bucket: str) -> None:
        for flat in full.pop(bucket, ()):
            half = flat.numel() // 2
            (flat[:half] if _is_second() else flat[half:]).zero_()

    return _around_gather(full, clear)


def _swapped_gather() -> Any:
    full: dict[str, list[torch.Tensor]] = {}

    def swap(self: Any, bucket: str) -> None:
        for flat in full.pop(bucket, ()):
            _exchange_halves(flat)

    return _around_gather(full, swap)


def _around_gather(full: dict[str, list[torch.Tensor]], change: Callable[..., None]) -> Any:
    stack = contextlib.ExitStack()
    stack.enter_context(
        _before(ShardCommunication, "start_gather", lambda self, bucket, memory: full.update({bucket: [*memory]}))
    )
    stack.enter_context(_after(ShardCommunication, "wait_gather", change))
    return stack


def _scatter(change: Callable[[torch.Tensor], None]) -> Any:
    def changed(self: Any, bucket: str, full: list[torch.Tensor]) -> None:
        change(full[0])

    return _before(ShardCommunication, "start_scatter", changed)


FAULTS: dict[str, dict[str, Callable[[], Any]]] = {
    "ddp": {
        "wrong divisor": _wrong_divisor,
        "missing wait": _missing_wait,
        "swapped shards": lambda: _after(BucketSet, "wait", lambda self, bucket, memory: _exchange_halves(memory.flat)),
        "lost gradient": lambda: _after(BucketSet, "wait", lambda self, bucket, memory: _lose(memory.flat)),
        "lost gradient of one rank": lambda: _before(
            BucketSet, "start", lambda self, bucket, memory: _lose(memory.flat) if _is_second() else None
        ),
        "one rank has another average": lambda: _after(
            BucketSet, "wait", lambda self, bucket, memory: memory.flat.mul_(1.01) if _is_second() else None
        ),
    },
    "fsdp2": {
        "wrong divisor": lambda: _scatter(lambda flat: flat.mul_(2 / 3)),
        "missing wait": _missing_gather_wait,
        "swapped shards": _swapped_gather,
        "swapped shards of gradients": lambda: _scatter(_exchange_halves),
        "lost gradient": lambda: _scatter(_lose),
        "lost gradient of one rank": lambda: _scatter(lambda flat: _lose(flat) if _is_second() else None),
    },
}
"""Wrapper -> kind of fault -> what plants it."""
MODELS = ("perceptron", "attention", "gated", "experts", "residual", "swiglu", "powers", "normalized")


def _wrapped(wrapper: str, model: str) -> torch.nn.Module:
    module, _ = make(model)
    if wrapper == "ddp":
        return DistributedDataParallel(module)
    fully_shard(module)
    return module


def _steps(module: torch.nn.Module, model: str) -> list[torch.Tensor]:
    """Gradients of four steps on other inputs."""
    found = []
    for number in range(2 * PERIOD):
        torch.manual_seed(10 * number + dist.get_rank())
        module.zero_grad()
        module(make_input(model).detach()).square().sum().backward()
        for parameter in module.parameters():
            gradient = parameter.grad
            found.append((gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone())
    return found


def _differs(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    largest = wanted.abs().max() if wanted.numel() else torch.zeros(())
    return bool(wanted.numel() and (got - wanted).abs().max() > DIFFERENCE * largest + 1e-6)


def run_fault(wrapper: str, model: str, fault: str) -> dict[str, Any]:
    """Plant one fault, or none ("") on this rank; all ranks call this."""
    found: dict[str, Any] = {"fault": f"{fault} under {wrapper} in {model}", "changes": False, "sentinel": False}
    stock = _steps(_wrapped(wrapper, model), model)
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder, FAULTS[wrapper].get(fault, contextlib.nullcontext)():
        module = _wrapped(wrapper, model)
        options = {"sentinel": PERIOD, "receipt": False, "cache_dir": folder, "dump": folder, "share_artifacts": False}
        dcompile.compile(module, options=options)
        try:
            ours = _steps(module, model)
            found["changes"] = any(map(_differs, ours, stock))
            receipt = dcompile.receipt(module)
            found["sentinel"] = REPLACED in receipt.fallbacks
            found["not checked"] = [note for note in receipt.notes if "is not checked" in note]
        except WrongResultError as error:
            found |= {"changes": True, "sentinel": True, "said": str(error)}
        torch._dynamo.reset()
        module = _wrapped(wrapper, model)
        torch.manual_seed(dist.get_rank())
        bisection = dcompile.bisect(module, make_input(model).detach())
    place = None if bisection.finding is None else bisection.finding.place
    found["named"] = place is not None and place.kind in ("collective", "ranks")
    found["bisect"] = str(bisection)[:600]
    return found
