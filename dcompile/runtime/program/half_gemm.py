"""GEMMs of 16-bit matrices on processors without instructions for them: in float32, block by block.

ATen multiplies such matrices by plain loops there: 6.7 s where float32 takes 43 ms (docs/lab/runtime.md, R1). Blocks
are converted one at a time, so that no whole matrix exists in float32. Sums are accumulated in float32 and rounded
once, like ATen's in bfloat16. `compat.tensors.slow_products` lists the affected dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dcompile import compat

MIN_BLOCK_SIDE, MAX_BLOCK_SIDE = 192, 512
"""Limits for the rows, columns and depth of a block. Its three matrices take at most 3 MB in float32."""
MAX_BLOCK_FRACTION = 16
"""Blocks take about one part in this many of the matrices' memory, so that they do not raise a step's peak."""


def product(op: str, entry: Callable[..., Any]) -> Callable[..., Any]:
    """Function for an out= overload of a product: `entry`, or the blocked one where the result's dtype is slow."""
    own, slow = _OWN[op], compat.tensors.slow_products()
    if not slow:
        return entry

    def call(*args: Any, out: torch.Tensor, **how: Any) -> torch.Tensor:
        found: torch.Tensor = (own if out.dtype in slow else entry)(*args, out=out, **how)
        return found

    return call


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """`torch.mm`: (m, k) by (k, n)."""
    return addmm(out, a, b, beta=0, out=out)


def addmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor
) -> torch.Tensor:
    """`torch.addmm`; `added` may be stored where the result goes."""
    added, side = added.expand(out.shape), _side(a.nbytes + b.nbytes + out.nbytes)
    for top in range(0, out.shape[0], side):
        for left in range(0, out.shape[1], side):
            rows, columns = slice(top, top + side), slice(left, left + side)
            # no name for the block: it would stay alive until the next one is made
            _store(out[rows, columns], _block(a[rows], b[:, columns], side), added[rows, columns], beta, alpha)
    return out


def bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """`torch.bmm`: (count, m, k) by (count, k, n)."""
    return baddbmm(out, a, b, beta=0, out=out)


def baddbmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor
) -> torch.Tensor:
    """`torch.baddbmm`; `added` may be stored where the result goes."""
    added = added.expand(out.shape)
    nbytes = a.nbytes + b.nbytes + out.nbytes
    together = 12 * _side(nbytes) ** 2 * len(a) // max(2 * nbytes, 1)
    if not together:
        for number in range(len(a)):
            addmm(added[number], a[number], b[number], beta=beta, alpha=alpha, out=out[number])
        return out
    for first in range(0, len(a), together):
        some = slice(first, first + together)
        _store(out[some], torch.bmm(a[some].float(), b[some].float()), added[some], beta, alpha)
    return out


_OWN: dict[str, Callable[..., torch.Tensor]] = {
    "aten.mm.out": mm,
    "aten.addmm.out": addmm,
    "aten.bmm.out": bmm,
    "aten.baddbmm.out": baddbmm,
}


def _side(nbytes: int) -> int:
    """Side of square blocks, three of which take their share of memory in float32."""
    return min(max(math.isqrt(nbytes // MAX_BLOCK_FRACTION // 12), MIN_BLOCK_SIDE), MAX_BLOCK_SIDE)


def _block(a: torch.Tensor, b: torch.Tensor, depth: int) -> torch.Tensor:
    """Product of a few rows and columns, in float32."""
    sums = torch.mm(a[:, :depth].float(), b[:depth].float())
    for first in range(depth, a.shape[1], depth):
        sums.addmm_(a[:, first : first + depth].float(), b[first : first + depth].float())
    return sums


def _store(out: torch.Tensor, sums: torch.Tensor, added: torch.Tensor, beta: float, alpha: float) -> None:
    if alpha != 1:
        sums.mul_(alpha)
    if beta != 0:  # with beta 0, `added` may be NaN
        sums.add_(added.float(), alpha=beta)
    out.copy_(sums)
