"""Decompositions of our own: where torch has none, or one that gives other strides or shapes than eager does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dcompile import compat

aten = torch.ops.aten


def table() -> dict[Any, Callable[..., Any]]:
    """Op to decomposition, for AOTAutograd."""
    return {
        aten.channel_shuffle.default: channel_shuffle,
        aten.native_channel_shuffle.default: channel_shuffle,
        aten.pixel_unshuffle.default: pixel_unshuffle,
        aten.put.default: put,
        aten.take.default: take,
        aten.replication_pad1d_backward.default: replication_pad_backward,
        aten.replication_pad2d_backward.default: replication_pad_backward,
        aten.replication_pad3d_backward.default: replication_pad_backward,
    }


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Channels of `groups` groups, dealt out in turn; laid out as `x` is."""
    if compat.sizes.is_known_empty(x):
        return x.clone()
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return split.transpose(1, 2).reshape(x.shape).clone(memory_format=compat.aot.suggest_memory_format(x))


def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    """Every `factor` x `factor` square becomes channels; without elements the shape stays, as it does in eager."""
    if compat.sizes.is_known_empty(x):
        return x.clone()
    *lead, channels, height, width = x.shape
    n = len(lead)
    split = x.reshape(*lead, channels, height // factor, factor, width // factor, factor)
    moved = split.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    shape = (*lead, channels * factor**2, height // factor, width // factor)
    return moved.reshape(shape).clone(memory_format=compat.aot.suggest_memory_format(x))


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Writes at positions of the flattened tensor."""
    flat = aten.index_put(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    result: Tensor = aten.copy(torch.empty_like(x), flat.reshape(x.shape))
    return result


def take(x: Tensor, index: Tensor) -> Tensor:
    """Reads at positions of the flattened tensor."""
    found: Tensor = aten.index(x.reshape(-1), [index.reshape(-1)])
    return found.reshape(index.shape)


def fitting_slices(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's decomposition of index_add, which would broadcast slices where eager refuses."""

    def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, **more: Any) -> Tensor:
        if x.dim() and source.dim():
            shapes = [(*t.shape[: dim % t.dim()], *t.shape[dim % t.dim() + 1 :]) for t in (x, source)]
            if shapes[0] != shapes[1]:
                raise RuntimeError(f"index_add: source {tuple(source.shape)} does not fit {tuple(x.shape)} along {dim}")
        return rule(x, dim, index, source, **more)

    return index_add


def laid_out_as_input(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's decomposition, and its result channels-last if the input is, as eager has it."""

    def laid_out(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return rule(x, *args, **kwargs).contiguous(memory_format=compat.aot.suggest_memory_format(x))

    return laid_out


def replication_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """What was repeated beyond an edge is added to the edge, one dimension after the other."""
    for n in range(len(padding) // 2):
        dim, before = x.dim() - 1 - n, padding[2 * n]
        places = (torch.arange(grad.shape[dim], device=grad.device) - before).clamp(0, x.shape[dim] - 1)
        total = grad.new_zeros((*grad.shape[:dim], x.shape[dim], *grad.shape[dim + 1 :]))
        grad = total.index_add(dim, places, grad)
    return grad
