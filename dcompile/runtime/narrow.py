"""Products of 16-bit matrices on processors that have no instructions for them: in float32, block by block.

ATen multiplies such matrices by plain loops there: 512 x 1024 by 1024 x 2048 in bfloat16 took 6.7 s where float32 takes
43 ms (Zen 3, AVX2, torch 2.13), and 0.19 s where the second is transposed. Blocks are converted as they are needed, so
that no matrix is there in float32 as a whole. Sums are taken in float32 and rounded once, as ATen's are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dcompile import compat

SIDE, DEPTH = 512, 1024
"""Rows and columns of a block of the result, and how much of a sum is added at a time: 5 MB in float32 for all."""
TOGETHER = 1 << 20
"""Elements of small matrices that are converted together."""


def product(op: str, entry: Callable[..., Any]) -> Callable[..., Any]:
    """What to call for an out= overload of a product: `entry`, or ours where the result's dtype is slow."""
    own, slow = _OWN[op], compat.tensors.slow_products()
    if not slow:
        return entry

    def call(*args: Any, out: torch.Tensor, **how: Any) -> torch.Tensor:
        found: torch.Tensor = (own if out.dtype in slow else entry)(*args, out=out, **how)
        return found

    return call


def mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """As `torch.mm`: (m, k) by (k, n)."""
    return addmm(out, a, b, beta=0, out=out)


def addmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor
) -> torch.Tensor:
    """As `torch.addmm`; `added` may lie where the result goes."""
    added = added.expand(out.shape)
    for top in range(0, out.shape[0], SIDE):
        for left in range(0, out.shape[1], SIDE):
            rows, columns = slice(top, top + SIDE), slice(left, left + SIDE)
            sums = _block(a[rows], b[:, columns])
            _store(out[rows, columns], sums, added[rows, columns], beta, alpha)
    return out


def bmm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """As `torch.bmm`: (count, m, k) by (count, k, n)."""
    return baddbmm(out, a, b, beta=0, out=out)


def baddbmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor
) -> torch.Tensor:
    """As `torch.baddbmm`; `added` may lie where the result goes."""
    added = added.expand(out.shape)
    count, m, k = a.shape
    size = max(m * k + k * b.shape[2] + m * b.shape[2], 1)
    if size > TOGETHER:
        for number in range(count):
            addmm(added[number], a[number], b[number], beta=beta, alpha=alpha, out=out[number])
        return out
    for first in range(0, count, TOGETHER // size):
        some = slice(first, first + TOGETHER // size)
        _store(out[some], torch.bmm(a[some].float(), b[some].float()), added[some], beta, alpha)
    return out


_OWN: dict[str, Callable[..., torch.Tensor]] = {
    "aten.mm.out": mm,
    "aten.addmm.out": addmm,
    "aten.bmm.out": bmm,
    "aten.baddbmm.out": baddbmm,
}


def _block(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of a few rows and columns, in float32."""
    sums = torch.mm(a[:, :DEPTH].float(), b[:DEPTH].float())
    for first in range(DEPTH, a.shape[1], DEPTH):
        sums.addmm_(a[:, first : first + DEPTH].float(), b[first : first + DEPTH].float())
    return sums


def _store(out: torch.Tensor, sums: torch.Tensor, added: torch.Tensor, beta: float, alpha: float) -> None:
    if alpha != 1:
        sums.mul_(alpha)
    if beta != 0:  # what is added may be NaN otherwise
        sums.add_(added.float(), alpha=beta)
    out.copy_(sums)
