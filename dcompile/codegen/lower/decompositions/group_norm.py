"""Decompose group norms on GPUs whose groups exceed one program, reading the input once for its statistics.

Parts of a few elements of each channel have their own mean and variance. Their kernel reads adjacent memory, whether
channels or pixels. The groups' statistics follow from them (Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances", 1979). torch's decomposition reads a group as a row, once for each statistic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dcompile import compat
from dcompile.codegen.lower.decompositions.aten import compute_dtype
from dcompile.device_traits import traits_of

Tensor = torch.Tensor
MAX_PART, MIN_PART = 32, 8
"""Elements of a channel in a part: with these, 128 threads hold a tile of 64 channels."""
MAX_PERSISTENT_ELEMENTS = 16384
"""Elements of a group that one program holds, so that it reads each once."""


def by_parts(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `rule`, torch's decomposition of `native_group_norm`; on GPUs large groups are computed from parts."""

    def native_group_norm(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, inner: int, groups: int, eps: float
    ) -> Any:
        part = part_of(x, inner, c // groups if groups else 0)
        if not part:
            return rule(x, weight, bias, n, c, inner, groups, eps)
        wide = x.to(compute_dtype(x))
        mean, rstd = _statistics(wide.reshape(n, c, inner // part, part), groups, eps)
        parted = (wide.reshape(n, groups, c // groups, inner) - mean.view(n, groups, 1, 1)) * rstd.view(n, groups, 1, 1)
        found, along = parted.reshape(x.shape), [c, *[1] * (x.dim() - 2)]
        found = found if weight is None else found * weight.view(along)
        found = found if bias is None else found + bias.view(along)
        return found.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)

    return native_group_norm


def part_of(x: Tensor, inner: int, channels: int) -> int:
    """Return the number of elements of a channel in a part; 0 where groups are better read as rows."""
    if (
        not traits_of(x.device.type).many_threads
        or not compat.sizes.is_fixed(x)
        or inner * channels <= MAX_PERSISTENT_ELEMENTS
    ):
        return 0
    return next((size for size in range(MAX_PART, MIN_PART - 1, -1) if inner % size == 0), 0)


def _statistics(parts: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return (means, reciprocal standard deviations), both (n, groups), of parts (n, channels, parts, elements)."""
    n, c, count, _ = parts.shape
    variances, means = torch.var_mean(parts.permute(0, 2, 1, 3), dim=3, correction=0)
    means, variances = (value.view(n, count, groups, c // groups) for value in (means, variances))
    mean = means.mean((1, 3))
    variance = (variances + (means - mean.view(n, 1, groups, 1)).square()).mean((1, 3))
    return mean, torch.rsqrt(variance + eps)
