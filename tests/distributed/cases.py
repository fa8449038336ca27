"""What the two-rank tests run on each rank; every function here is one case and returns plain data."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from tests.distributed import models
from tests.distributed.models import batch, loss_of

ATEN = {"kernels": "aten"}
MAKE = {
    "mlp": models.Mlp,
    "shared": models.SharedOverBreak,
    "tied_break": models.TiedOverBreak,
    "norm": models.NormUnused,
    "outside": models.UsedOutside,
    "llama": models.llama,
    "llama_tied": lambda: models.llama(tied=True),
}


def make(name: str) -> Any:
    torch.manual_seed(7)
    return MAKE[name]()


def wrap(module: Any, order: str, options: dict[str, Any] | None, **ddp: Any) -> tuple[Any, Any]:
    """(what to call, its DDP module), compiled in one of the orders a user may choose."""
    options = options if options is not None else ATEN
    if order == "compile(ddp)":
        wrapped = DDP(module, **ddp)
        return dcompile.compile(wrapped, options=dict(options)), wrapped
    if order == "ddp(compile)":
        wrapped = DDP(dcompile.compile(module, options=dict(options)), **ddp)
        return wrapped, wrapped
    if order == "torch.compile(ddp)":
        wrapped = DDP(module, **ddp)
        return torch.compile(wrapped, backend="dcompile", options=dict(options)), wrapped
    if order == "ddp(torch.compile)":
        wrapped = DDP(torch.compile(module, backend="dcompile", options=dict(options)), **ddp)
        return wrapped, wrapped
    assert order == "ddp.compile", order
    wrapped = DDP(module, **ddp)
    wrapped.compile(backend="dcompile", options=dict(options))
    return wrapped, wrapped


def train(call: Any, ddp: Any, name: str, accumulate: bool, steps: int = 3) -> dict[str, Any]:
    """AdamW steps, then one more forward and backward whose gradients stay."""
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    inner = ddp.module
    inner = getattr(inner, "_orig_mod", inner)
    losses = []
    for step in range(steps + 1):
        if accumulate:
            with ddp.no_sync():
                loss_of(call(**batch(inner, rank, 100 + step))).backward()
        loss = loss_of(call(**batch(inner, rank, step)))
        loss.backward()
        losses.append(loss.item())
        if step < steps:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in inner.named_parameters()},
        "params": {n: p.detach().clone() for n, p in inner.named_parameters()},
        "buffers": {n: b.clone() for n, b in inner.named_buffers()},
    }


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    worst = 0.0
    for name, value in a.items():
        other = b[name]
        assert (value is None) == (other is None), f"{name}: only one of the two has a gradient"
        if value is not None and value.numel():
            worst = max(worst, (value.double() - other.double()).abs().max().item())
    return worst


def across_ranks(values: dict[str, Any]) -> float:
    """Largest difference between this rank's values and rank 0's."""
    worst = 0.0
    for value in values.values():
        if value is not None and value.is_floating_point():
            other = value.clone()
            dist.broadcast(other, 0)
            worst = max(worst, (other - value).abs().max().item())
    return worst


def against_stock(
    name: str,
    order: str = "compile(ddp)",
    accumulate: bool = False,
    options: dict[str, Any] | None = None,
    **ddp: Any,
) -> dict[str, Any]:
    """The same training with stock eager DDP and with dcompile: largest differences, and the receipt."""
    stock = DDP(make(name), **ddp)
    expected = train(stock, stock, name, accumulate)
    call, wrapped = wrap(make(name), order, options, **ddp)
    found = train(call, wrapped, name, accumulate)
    receipt = dcompile.receipt(call)
    return {
        "loss": max(abs(a - b) for a, b in zip(expected["losses"], found["losses"], strict=True)),
        "grad": largest_difference(expected["grads"], found["grads"]),
        "param": largest_difference(expected["params"], found["params"]),
        "buffer": largest_difference(expected["buffers"], found["buffers"]),
        "ranks": across_ranks(found["params"]),
        "receipt": receipt,
    }


def small_buckets() -> dict[str, Any]:
    return against_stock("mlp", bucket_cap_mb=0.002)


__all__ = ["copy"]
