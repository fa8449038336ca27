"""SyncBatchNorm as plain operations, which Dynamo traces in place of torch's own function.

torch's function drops ranks with empty batches by a boolean index. Its result has a data-dependent size, which breaks
the graph in every layer. Its kernels exist only for GPUs. Here such ranks have weight zero. The collectives are the
same: one all-gather of statistics in the forward, one all-reduce of two sums for each channel in the backward.
"""

from __future__ import annotations

from typing import Any

import torch

from dcompile import compat


def sync_batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    eps: float,
    momentum: float,
    group: Any,
    world: int,
) -> Any:
    """Normalize each channel of `x` (N, C, ...) over all ranks of `group`, times `weight`, plus `bias` (C, or None).

    Updates `running_mean` and `running_var` (C) as BatchNorm does. Statistics are float32 (float64 for float64).
    """
    size = x.numel() // x.shape[1]
    if size == 1 and world < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
    y, mean, var, count = _SyncBatchNorm.apply(x, weight, bias, eps, group, world)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = var * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return y


class _SyncBatchNorm(torch.autograd.Function):
    """Return (result, mean, biased variance, elements of a channel over all ranks); only the result has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, group: Any, world: int) -> Any:
        channels, dims = x.shape[1], _all_but_channels(x)
        wide = _wide(x)
        own = x.numel() // channels
        if own:
            var, mean = torch.var_mean(wide, dims, correction=0)
        else:
            var = mean = wide.new_zeros(channels)
        count = wide.new_full((1,), float(own))
        gathered = compat.groups.traced_all_gather(torch.cat([mean, var, count]), group).view(world, 2 * channels + 1)
        means, variances, counts = gathered.split([channels, channels, 1], 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        var = ((variances + (means - mean).square()) * counts).sum(0) / total
        invstd = torch.rsqrt(var + eps)
        y = (wide - _along(mean, x)) * _along(invstd, x)
        if weight is not None:
            y = y * _along(_as(weight, y.dtype), x)
        if bias is not None:
            y = y + _along(_as(bias, y.dtype), x)
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, invstd, total)
        ctx.mark_non_differentiable(mean, var, total)
        return _as(y, x.dtype), mean, var, total

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        x, weight, mean, invstd, total = ctx.saved_tensors
        dims = _all_but_channels(x)
        wide = _wide(grad)
        centred = _wide(x) - _along(mean, x)
        sums = torch.cat([wide.sum(dims), (wide * centred).sum(dims)])
        own_sum, own_product = sums.chunk(2)
        every_sum, every_product = compat.groups.traced_all_reduce(sums, ctx.group).chunk(2)
        slope = every_product / total * invstd.square()
        grad_x = (wide - _along(every_sum / total, x) - centred * _along(slope, x)) * _along(invstd, x)
        grad_weight = grad_bias = None
        if weight is not None:
            grad_x = grad_x * _along(_as(weight, grad_x.dtype), x)
            grad_weight = _as(own_product * invstd, weight.dtype)
            grad_bias = _as(own_sum, weight.dtype)
        return _as(grad_x, x.dtype), grad_weight, grad_bias, None, None, None


def _wide(x: Any) -> Any:
    """Convert to the dtype of statistics."""
    return x if x.dtype == torch.float64 else _as(x, torch.float32)


def _as(x: Any, dtype: Any) -> Any:
    """Convert if dtypes differ: where `to` returns its argument itself, torch 2.11 traces the gradient as zeros."""
    return x if x.dtype == dtype else x.to(dtype)


def _all_but_channels(x: Any) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(values: Any, x: Any) -> Any:
    """View one value for each channel so that it broadcasts against `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
