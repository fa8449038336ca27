"""A gradient after its reduction over the ranks, as a torch operator.

`torch.ops.dcompile_step.reduced(gradient, number, like)` marks, in the graph of a backward with an update, where the
update of parameter `number` reads the reduced gradient. The result has the shape, dtype and device of `like`, row-major.
Programs replace the mark by the memory that the reduction fills (`dcompile/collectives/updates.py`), so it never runs.
"""

from __future__ import annotations

import torch

from dcompile.operators.own_operators import define_operators

NAMESPACE = "dcompile_step"


def reduced(gradient: torch.Tensor, number: int, like: torch.Tensor) -> torch.Tensor:
    """Mark a gradient; see above."""
    return torch.ops.dcompile_step.reduced(gradient, number, like)  # type: ignore[no-any-return]


def _never(gradient: torch.Tensor, number: int, like: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"the reduction of gradient {number} is a step of the program")


def _result(gradient: torch.Tensor, number: int, like: torch.Tensor) -> torch.Tensor:
    del gradient, number
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


_LIBRARY = define_operators(
    NAMESPACE, ("reduced(Tensor gradient, int number, Tensor like) -> Tensor",), {"reduced": (_never, _result)}
)
"""Library of the operators, which exist as long as this object."""
