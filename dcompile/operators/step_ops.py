"""What updates are made of, as torch operators.

`torch.ops.dcompile_step.reduced(gradient, number, size, dtype)` marks, in the graph of a backward with an update, where
the update of parameter `number` reads the reduced gradient, or this rank's shard of it: row-major, of a size, in the
dtype of the reduction. Programs replace the mark by the memory that the reduction fills
(`dcompile/collectives/updates.py`), so it never runs.

`torch.ops.dcompile_step.fma(a, b, x)` is `a * b + x`, rounded once, as in ATen's sums with a factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcompile.operators.own_operators import define_operators

NAMESPACE = "dcompile_step"


def reduced(gradient: torch.Tensor, number: int, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Mark a gradient; see above."""
    return torch.ops.dcompile_step.reduced(gradient, number, size, dtype)  # type: ignore[no-any-return]


def _never(_gradient: torch.Tensor, number: int, _size: Sequence[int], _dtype: torch.dtype) -> torch.Tensor:
    raise AssertionError(f"the reduction of gradient {number} is a step of the program")


def _result(gradient: torch.Tensor, number: int, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=gradient.device)


def _fma(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + x.double()).to(_fma_result(a, b, x).dtype)


def _fma_result(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return a * b + x


_LIBRARY = define_operators(
    NAMESPACE,
    (
        "reduced(Tensor gradient, int number, int[] size, ScalarType dtype) -> Tensor",
        "fma(Tensor a, Tensor b, Tensor x) -> Tensor",
    ),
    {"reduced": (_never, _result), "fma": (_fma, _fma_result)},
)
"""Library of the operators, which exist as long as this object."""
