"""Tensors that are made with another's sizes and strides keep them where both are symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dcompile


def made(x: torch.Tensor) -> Any:
    out = torch.empty_strided(x.shape, x.stride())
    out.copy_(x * 2)
    return (out,)


def read_too(x: torch.Tensor) -> Any:
    """By kernels and a library call, whose arguments lie as in eager mode."""
    out = torch.empty_strided(x.shape, x.stride())
    out.copy_(x + 3)
    return out, out * 2, out.amax(0), out.t() if out.dim() == 2 else out[0]


BASE = torch.arange(240.0)
VIEWS: dict[str, Callable[[int], torch.Tensor]] = {
    "rows with gaps": lambda n: BASE[: 8 * n].view(n, 8)[:, :3],
    "every other column": lambda n: BASE[: 8 * n].view(n, 8)[:, ::2],
    "turned": lambda n: BASE[: 8 * n].view(n, 8).t()[:3],
    "dense": lambda n: BASE[: 8 * n].view(n, 8),
    "planes with gaps": lambda n: BASE[: 24 * n].view(n, 4, 6)[:, 1:3, 2:5],
    "permuted with gaps": lambda n: BASE[: 24 * n].view(n, 4, 6).permute(2, 0, 1)[1:5],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("function", [made, read_too])
def test_what_is_made_has_the_strides_of_its_pattern(function: Callable[..., Any], view: str) -> None:
    torch._dynamo.reset()
    compiled = dcompile.compile(function, dynamic=True)
    for rows in (5, 7):
        x = VIEWS[view](rows)
        for got, want in zip(compiled(x), function(x), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
    if "gaps" in view and function is made:
        assert dcompile.receipt(compiled).fallbacks["dcompile.lay_out"] == 1
