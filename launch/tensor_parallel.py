"""Tensor parallelism by hand: each rank keeps its heads, its part of the MLP, and all-reduces the sums.

The projections into a block (q, k, v, gate, up) are split by output rows, so no rank needs what another computes until
the projection out of the block (o, down), split by input columns, which gives each rank a part of the sum. That makes
two all-reduces a layer. They are plain `dist.all_reduce` calls: torch.compile turns them into nodes of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from common import UserError
from torch import nn

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")


class SummedLinear(nn.Module):
    """The columns of a linear layer that one rank holds; the output is the sum over all ranks."""

    def __init__(self, linear: nn.Linear, rank: int, size: int) -> None:
        super().__init__()
        self.weight = _part(linear.weight, 1, rank, size)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.weight)
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


def split_dim(name: str) -> int | None:
    """The dimension along which ranks share the parameter of this name; None where each has all of it."""
    *_, module, kind = name.split(".")
    if module in ROWS:
        return 0
    return 1 if module in COLUMNS and kind == "weight" else None


def check_sizes(config: Any, size: int) -> None:
    """UserError where `size` ranks cannot share heads and MLP evenly."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise UserError(f"--tp {size}: does not divide {name} = {getattr(config, name)} of this model")


def shard(model: nn.Module, rank: int, size: int) -> None:
    """Cut a whole model of Llama's shape down to this rank's part, in place.

    Every rank must start from the same weights, or from a model on the meta device.
    """
    check_sizes(model.config, size)
    if size == 1:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ROWS:
                child.weight = _part(child.weight, 0, rank, size)
                child.bias = None if child.bias is None else _part(child.bias, 0, rank, size)
                child.out_features //= size
            elif name in COLUMNS:
                setattr(parent, name, SummedLinear(child, rank, size))


def _part(weight: nn.Parameter, dim: int, rank: int, size: int) -> nn.Parameter:
    """This rank's slice, copied so that the whole weight can be freed."""
    part = weight.detach().chunk(size, dim)[rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=weight.requires_grad)
