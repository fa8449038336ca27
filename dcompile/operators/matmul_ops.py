"""Matmuls of 16-bit matrices with float32 results, as torch operators.

`torch.ops.dcompile_matmul.mm_float32(x, y)` and `addmm_float32(sums, x, y)` round nothing to 16 bits. So a sum of
several matmuls is as exact as one matmul over all of them. On GPUs each is one GEMM, which may write its sums in place.
PyTorch has none on CPUs. There, factors are converted to float32 in blocks.
"""

from __future__ import annotations

import torch

from dcompile.operators.own_operators import define_operators

NAMESPACE = "dcompile_matmul"
BLOCK_DEPTH = 1024
"""Depth of the blocks that are converted to float32 on a CPU: 8 MB of a matrix with 2048 columns."""

_SCHEMAS = (
    "mm_float32(Tensor x, Tensor y) -> Tensor",
    "mm_float32.out(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)",
    "addmm_float32(Tensor sums, Tensor x, Tensor y) -> Tensor",
    "addmm_float32.out(Tensor sums, Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)",
)


def wide_mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x @ y` in float32, or in the factors' dtype if that is wider; (m, k) by (k, n)."""
    return x @ y if _is_wide(x) else torch.ops.dcompile_matmul.mm_float32(x, y)


def wide_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Result of a linear layer, with the dtype of `wide_mm`."""
    found = wide_mm(rows, weight.t())
    return found if bias is None else found + bias


def wide_addmm(sums: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`sums + x @ y` for `sums` (m, n) in float32, or in the factors' dtype if that is wider."""
    if _is_wide(x):
        return torch.addmm(sums, x, y)
    return torch.ops.dcompile_matmul.addmm_float32(sums, x, y)  # type: ignore[no-any-return]


def _is_wide(x: torch.Tensor) -> bool:
    return torch.promote_types(x.dtype, torch.float32) == x.dtype


# --- what the operators do --------------------------------------------------------------------------------------------


def _mm_out(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    if out.is_cuda:
        return torch.mm(x, y, out_dtype=torch.float32, out=out)
    return _add_blocks(out.zero_(), x, y)


def _addmm_out(sums: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    in_place = sums.data_ptr() == out.data_ptr() and sums.stride() == out.stride()
    if out.is_cuda:  # the same object for both, so that nothing is copied
        return torch.addmm(out if in_place else sums, x, y, out_dtype=torch.float32, out=out)
    return _add_blocks(out if in_place else out.copy_(sums), x, y)


def _add_blocks(sums: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for first in range(0, x.shape[1], BLOCK_DEPTH):
        sums.addmm_(x[:, first : first + BLOCK_DEPTH].float(), y[first : first + BLOCK_DEPTH].float())
    return sums


def _mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _mm_out(x, y, out=_empty_mm(x, y))


def _addmm(sums: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _addmm_out(sums, x, y, out=torch.empty_like(sums, memory_format=torch.contiguous_format))


# --- what tracing knows of them ---------------------------------------------------------------------------------------


def _empty_mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], y.shape[1], dtype=torch.float32)


def _empty_addmm(sums: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _empty_mm(x, y)


def _given_out(*_: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out


_LIBRARY = define_operators(
    NAMESPACE,
    _SCHEMAS,
    {
        "mm_float32": (_mm, _empty_mm), "mm_float32.out": (_mm_out, _given_out),
        "addmm_float32": (_addmm, _empty_addmm), "addmm_float32.out": (_addmm_out, _given_out),
    },
)  # fmt: skip
"""Library of the operators, which exist as long as this object."""
