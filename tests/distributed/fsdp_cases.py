"""What the FSDP2 tests run on each rank; every function here is one case and returns plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcompile
from tests.distributed import models
from tests.distributed.cases import ATEN, across_ranks, device, largest_difference
from tests.distributed.models import batch, loss_of


class Uneven(nn.Module):
    """Parameters that no number of ranks divides, and some with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 5), nn.Linear(5, 1), nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


MAKE: dict[str, Callable[[], nn.Module]] = {
    "mlp": models.Mlp,
    "uneven": Uneven,
    "llama": models.llama,
    "llama_tied": lambda: models.llama(tied=True),
}


def make(name: str, wrap: str = "blocks", **how: Any) -> Any:
    """A module, sharded as a whole ("root"), or each of its blocks and then the rest ("blocks")."""
    torch.manual_seed(7)
    module = MAKE[name]().to(device())
    if wrap == "blocks":
        for block in blocks(module):
            fully_shard(block, **how)
    fully_shard(module, **how)
    return module


def blocks(module: Any) -> list[nn.Module]:
    return list(module.model.layers) if hasattr(module, "model") else [module.a, module.b]


def compiled(module: Any, order: str = "compile", options: dict[str, Any] | None = None, **more: Any) -> Any:
    """What to call, compiled in one of the ways a user may choose."""
    options = dict(ATEN if options is None else options)
    if order == "compile":
        return dcompile.compile(module, options=options, **more)
    if order == "torch.compile":
        return torch.compile(module, backend="dcompile", options=options, **more)
    assert order == "module.compile", order
    module.compile(backend="dcompile", options=options, **more)
    return module


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.full_tensor().detach().clone()


def gradients(module: Any) -> dict[str, Any]:
    return {name: full(p.grad) for name, p in module.named_parameters()}


def parameters(module: Any) -> dict[str, Any]:
    return {name: full(p) for name, p in module.named_parameters()}


def inputs(module: Any, step: int) -> dict[str, Any]:
    plain: nn.Module = models.llama() if hasattr(module, "model") else models.Mlp()
    found = batch(plain, dist.get_rank(), step)
    return {name: value.to(device()) for name, value in found.items()}


def train(call: Any, module: Any, accumulate: bool = False, steps: int = 3, clip: bool = True) -> dict[str, Any]:
    """AdamW steps with clipped gradients, then one more forward and backward whose gradients stay."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(steps + 1):
        if accumulate:
            module.set_requires_gradient_sync(False)
            loss_of(call(**inputs(module, 100 + step))).backward()
            module.set_requires_gradient_sync(True)
        loss = loss_of(call(**inputs(module, step)))
        loss.backward()
        losses.append(loss.item())
        if step < steps:
            if clip:
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "grads": gradients(module), "params": parameters(module)}


def against_stock(
    name: str,
    wrap: str = "blocks",
    order: str = "compile",
    accumulate: bool = False,
    options: dict[str, Any] | None = None,
    fullgraph: bool = True,
    **how: Any,
) -> dict[str, Any]:
    """The same training with stock eager FSDP2 and with dcompile: largest differences, and the receipt."""
    stock = make(name, wrap, **how)
    expected = train(stock, stock, accumulate)
    module = make(name, wrap, **how)
    call = compiled(module, order, options, fullgraph=fullgraph)
    keys = list(module.state_dict())
    found = train(call, module, accumulate)
    assert list(module.state_dict()) == keys == list(stock.state_dict())
    return {
        "loss": max(abs(a - b) for a, b in zip(expected["losses"], found["losses"], strict=True)),
        "grad": largest_difference(expected["grads"], found["grads"]),
        "param": largest_difference(expected["params"], found["params"]),
        "ranks": across_ranks(found["params"]),
        "receipt": dcompile.receipt(module),
    }
