"""Tensor parallelism by hand: each rank has its heads and its part of the MLP, and all-reduces partial sums.

The projections into a block (q, k, v, gate, up) are split by output rows, so ranks compute independently. The
projection out of the block (o, down) is split by input columns, so each rank computes a partial sum. That makes two
all-reduces a layer. They are plain `dist.all_reduce` calls, which torch.compile captures in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from errors import UserError
from torch import nn

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")


class SummedLinear(nn.Module):
    """One rank's columns of a linear layer; the output is the sum over all ranks."""

    def __init__(self, linear: nn.Linear, rank: int, size: int) -> None:
        super().__init__()
        self.weight = _part(linear.weight, 1, rank, size)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.weight)
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


def split_dim(name: str) -> int | None:
    """Return the dimension in which ranks split the parameter of this name; None if each has all of it."""
    *_, module, kind = name.split(".")
    if module in ROWS:
        return 0
    return 1 if module in COLUMNS and kind == "weight" else None


def check_sizes(config: Any, size: int) -> None:
    """Raise UserError if `size` ranks cannot split heads and MLP evenly."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise UserError(f"--tp {size}: does not divide {name} = {getattr(config, name)} of this model")


def shard(model: nn.Module, rank: int, size: int) -> None:
    """Replace a whole model of Llama's architecture by this rank's part, in place.

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
    """Return this rank's slice, copied so that the whole weight can be freed."""
    part = weight.detach().chunk(size, dim)[rank].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=weight.requires_grad)
