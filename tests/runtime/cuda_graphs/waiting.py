"""Models with operators that wait for the device, which no CUDA graph can record."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CAPTURING: list[None] = []
"""Not empty while a recorder for the CPU records, as a stream that captures."""
CALLS: list[str] = []
"""Names of the operators that ran."""


def _wait(name: str, x: torch.Tensor) -> torch.Tensor:
    if CAPTURING:
        raise RuntimeError("operation not permitted when stream is capturing")
    CALLS.append(name)
    return x * (1.0 + float(x.abs().sum().item() > 0))  # .item() waits for the device


@torch.library.custom_op("dcompile_tests::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    """Double x."""
    return _wait("wait", x)


@torch.library.custom_op("dcompile_tests::wait_again", mutates_args=())
def wait_again(x: torch.Tensor) -> torch.Tensor:
    """Double x, as another operator."""
    return _wait("wait_again", x)


@torch.library.custom_op("dcompile_tests::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    """Double x, or raise an error of the user's where it is negative."""
    if not CAPTURING and bool((x < 0).all()):
        raise RuntimeError("all is negative")
    return _wait("refuse", x)


@torch.library.custom_op("dcompile_tests::tagged", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def tagged(x: torch.Tensor) -> torch.Tensor:
    """Double x, by an operator that says what it is."""
    CALLS.append("tagged")
    return x * 2


for _op in (wait, wait_again, refuse, tagged):
    _op.register_fake(torch.empty_like)
    _op.register_autograd(lambda ctx, gradient, op=_op: op(gradient))


class Block(nn.Module):
    """Enough launches for a CUDA graph."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Waiting(nn.Module):
    """Blocks, with an operator after each but the last. It counts its calls in a buffer."""

    def __init__(self, *operators: Any, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.operators = operators
        pairs = (nn.Sequential(Block(dropout=dropout), Block(dropout=dropout)) for _ in range(len(operators) + 1))
        self.blocks = nn.ModuleList(pairs)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        for block, operator in zip(self.blocks, (*self.operators, None), strict=True):
            x = block(x)
            x = x if operator is None else operator(x)
        return x


def batch(step: int, device: str = "cpu", rows: int = 16) -> torch.Tensor:
    """Return another batch for each step."""
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(step)).to(device)


def train(eager: nn.Module, ours: nn.Module, compiled: Any, steps: int, device: str = "cpu") -> None:
    """Train both, and compare losses, gradients of inputs, parameters and buffers after each step."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (eager, ours)]
    for step in range(steps):
        found = []
        for call, optimizer in zip((eager, compiled), optimizers, strict=True):
            x = batch(step, device).requires_grad_()
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.detach(), x.grad))
        for theirs, own in zip(*found, strict=True):
            torch.testing.assert_close(own, theirs)
        for theirs, own in zip(
            (*eager.parameters(), *eager.buffers()), (*ours.parameters(), *ours.buffers()), strict=True
        ):
            torch.testing.assert_close(own, theirs)
