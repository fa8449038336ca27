"""Decompositions of embedding bags, sums and means, into gathered rows that are added to their bags.

Bags in max mode, sparse gradients and gradients scaled by frequency are left to the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dcompile import compat
from dcompile.codegen.lower.decompositions.aten import compute_dtype
from dcompile.device_traits import traits_of

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2
"""torch's numbers of the modes."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return op to decomposition, for AOTAutograd."""
    return {
        aten._embedding_bag.default: embedding_bag,
        aten._embedding_bag_forward_only.default: embedding_bag,
        aten._embedding_bag_backward.default: embedding_bag_backward,
        aten._embedding_bag_per_sample_weights_backward.default: sample_weights_backward,
    }


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale: bool = False, mode: int = SUM, sparse: bool = False,
    sample_weights: Tensor | None = None, include_last: bool = False, padding: int = -1,
) -> Any:  # fmt: skip
    """Return (bags, the bag of each row, the number of rows of each bag, a copy of that).

    On CPUs, ATen counts the rows for means only, and returns no bags of rows where it sums without them.
    """
    if mode == MAX or sparse or not weight.is_floating_point():
        return NotImplemented
    bags = offsets.shape[0] - int(include_last)  # torch 2.11 has no truth value of a symbolic size
    place = _bag_of_row(indices.shape[0], offsets[1 : max(bags, 1)])
    rows = _kept(_weighted(aten.embedding(weight, indices), sample_weights), indices, padding)
    ones = _kept(torch.ones_like(indices, dtype=torch.int64), indices, padding)
    sizes = ones.new_zeros(bags)
    if mode == MEAN or traits_of(weight.device.type).aten.counts_summed_rows:
        sizes = sizes.index_add(0, place, ones)
    result = _added((bags, weight.shape[1]), place, rows)
    if mode == MEAN:
        result = result / sizes.clamp_min(1).unsqueeze(1).to(result.dtype)
    elif padding < 0 and _sums_without_places(weight, sample_weights):
        place = place[:0]
    dtype = torch.promote_types(indices.dtype, offsets.dtype)
    return result, place.to(dtype), sizes.to(dtype), sizes.to(dtype, copy=True)


def _sums_without_places(weight: Tensor, sample_weights: Tensor | None) -> bool:
    in_order = weight.stride(1) == 1 and (sample_weights is None or sample_weights.stride(0) == 1)
    counts = traits_of(weight.device.type).aten.counts_summed_rows
    return bool(in_order and weight.dtype != torch.float64 and not counts)


def _places(place: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    """Return the bag of each row, which a forward need not have returned."""
    return _bag_of_row(indices.shape[0], offsets[1:]) if compat.sizes.is_known_empty(place) else place


def _bag_of_row(rows: int, starts: Tensor) -> Tensor:
    """Return the bag of each row; `starts` are those of all bags but the first, with repetitions for empty bags."""
    marks = torch.zeros(rows + 1, dtype=torch.int64, device=starts.device)
    marks = marks.index_add(0, starts.long(), torch.ones_like(starts, dtype=torch.int64))
    return marks.cumsum(0)[:rows]


def _weighted(rows: Tensor, sample_weights: Tensor | None) -> Tensor:
    return rows if sample_weights is None else rows * sample_weights.unsqueeze(1)


def _added(shape: tuple[int, int], place: Tensor, rows: Tensor) -> Tensor:
    """Add rows to their bags and round once, as eager does: index_add rounds each sum."""
    wide = compute_dtype(rows)
    return rows.new_zeros(shape, dtype=wide).index_add(0, place, rows.to(wide)).to(rows.dtype)


def _kept(rows: Tensor, indices: Tensor, padding: int) -> Tensor:
    """Set rows to zero where the index equals the padding's."""
    if padding < 0:
        return rows
    kept = indices != padding
    return torch.where(kept.unsqueeze(1) if rows.dim() == 2 else kept, rows, 0)


def embedding_bag_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, place: Tensor, sizes: Tensor, largest: Tensor, count: int,
    scale: bool, mode: int, sparse: bool, sample_weights: Tensor | None, padding: int = -1,
) -> Any:  # fmt: skip
    """Return the gradient of the weight."""
    if mode == MAX or sparse or scale or not grad.is_floating_point():
        return NotImplemented
    if mode == MEAN:
        grad = grad / sizes.clamp_min(1).unsqueeze(1).to(grad.dtype)
    rows = grad.index_select(0, _places(place, indices, offsets))
    rows = _kept(_weighted(rows, sample_weights), indices, padding)
    return _added((count, grad.shape[1]), indices.long(), rows)


def sample_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, place: Tensor, mode: int, padding: int = -1
) -> Tensor:
    """Return the gradient of the weights of single rows."""
    products = grad.index_select(0, _places(place, indices, offsets)) * aten.embedding(weight, indices)
    return _kept(products.sum(1), indices, padding)
