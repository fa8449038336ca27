"""What ranks run of `test_inside.py`: modules under DDP and FSDP that are called by something compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dcompile
from dcompile import api
from dcompile.explain.receipt import make_receipt


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Wrapper(nn.Module):
    """A module around the one that is kept in step, as Lightning and Fabric have it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.module(x).square().mean()}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(8, 4))


def replicated() -> Any:
    return DistributedDataParallel(small())


def sharded() -> Any:
    module = small()
    fully_shard(module[0])  # type: ignore[index]
    return fully_shard(module)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def trained(module: Any, loss_of: Callable[[torch.Tensor], torch.Tensor], steps: int = 2) -> list[torch.Tensor]:
    """Losses of some steps, and the gradients of the last."""
    found = []
    for step in range(steps):
        module.zero_grad()
        loss = loss_of(batch(step))
        loss.backward()
        found.append(loss.detach())
    grads = [parameter.grad for parameter in module.parameters()]
    return found + [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]


def compared(
    make: Callable[[], Any], how: Callable[[Any], tuple[Any, Callable[[torch.Tensor], Any]]]
) -> dict[str, Any]:
    """Training of a module that something compiled calls, against stock: equal or not, receipt, what was printed."""
    stock = make()
    expected = trained(stock, lambda x: stock(x).square().mean())
    module = make()
    with reported() as lines:
        compiled, loss_of = how(module)
        got = trained(module, loss_of)
    equal = all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(got, expected, strict=True))
    return {"equal": equal, "receipt": dcompile.receipt(compiled), "printed": lines}


@contextlib.contextmanager
def reported() -> Iterator[list[str]]:
    """Receipts that are printed meanwhile."""
    lines: list[str] = []
    with mock.patch.object(api, "print_receipt", lambda model: lines.append(str(make_receipt(model)))):
        yield lines


def in_function(module: Any) -> tuple[Any, Callable[..., Any]]:
    @dcompile.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return module(x).square().mean()

    return step, step


def as_argument(module: Any) -> tuple[Any, Callable[..., Any]]:
    step = torch.compile(lambda model, x: model(x).square().mean(), backend="dcompile")
    return step, lambda x: step(module, x)


def in_module(module: Any) -> tuple[Any, Callable[..., Any]]:
    wrapper = dcompile.compile(Wrapper(module))
    return wrapper, lambda x: wrapper(x)["loss"]


def left_stock(module: Any) -> tuple[Any, Callable[..., Any]]:
    wrapper = dcompile.compile(Wrapper(module), options={"distributed": "stock"})
    return wrapper, lambda x: wrapper(x)["loss"]


def of_another_backend(module: Any) -> tuple[Any, Callable[..., Any]]:
    module.module.compile(backend="eager")
    return in_module(module)


def parts(module: Any) -> tuple[Any, Callable[..., Any]]:
    dcompile.compile(module.module[0])
    return module.module[0], lambda x: module(x).square().mean()


def all_ways() -> dict[str, dict[str, Any]]:
    """Each way to call such a module, compared with stock."""
    ways = {
        "ddp": (in_function, as_argument, in_module, left_stock, of_another_backend, parts),
        "fsdp2": (in_function, in_module),
    }
    makers = {"ddp": replicated, "fsdp2": sharded}
    return {f"{kind} {way.__name__}": compared(makers[kind], way) for kind in ways for way in ways[kind]}


def profiled() -> list[str]:
    """Collectives that are measured where the module is inside a compiled function."""
    module = replicated()
    step, _ = in_function(module)
    trained(module, step)
    with dcompile.profile(step) as measured:
        trained(module, step)
    return [row.kind for row in measured.timeline.collectives]
