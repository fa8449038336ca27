"""Backward decompositions for tensors without elements.

A rank whose batch is empty must exchange what other ranks do. So its results depend on the same arguments as theirs:
zeros out of nothing would have neither a gradient behind them nor need of a sharded weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcompile import compat


def instead_of(rule: Callable[..., Any], without_elements: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's `rule` of a backward to call `without_elements` where the forward's input is known to be empty."""

    def chosen(grad: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen_rule = without_elements if compat.sizes.is_known_empty(x) else rule
        return chosen_rule(grad, x, *args, **kwargs)

    return chosen


def loss_backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *how: Any, **named: Any) -> torch.Tensor:
    """Return the empty gradient of a loss. Torch's decompositions divide by the number of elements."""
    return ((x - target) * grad).to(x.dtype)


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return an empty gradient, and sums over no rows."""
    rows = list(range(x.dim() - len(normalized_shape)))
    normal = (x - mean) * rstd

    def summed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return (value.sum(rows) if rows else value).to(like.dtype)

    return (
        (normal * (grad if weight is None else grad * weight)).to(x.dtype) if mask[0] else None,
        summed(grad * normal, weight) if mask[1] and weight is not None else None,
        summed(grad, bias) if mask[2] and bias is not None else None,
    )
