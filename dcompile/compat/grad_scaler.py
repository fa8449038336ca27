"""Which method of torch.amp.GradScaler asks about gradients, and whether it is torch's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.amp import GradScaler

_METHODS = ("unscale_", "step", "update", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step")
_DEPTH = 8
"""Frames between a method and the question: those of torch's and dcompile's dispatch."""


def _locals_of(name: str) -> Any:
    """Local variables of the method of a GradScaler in which the question is asked; None if it is asked elsewhere."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame.f_code.co_name == name and isinstance(frame.f_locals.get("self"), GradScaler):
            return frame.f_locals
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def unscaling() -> Any:
    """Return the GradScaler that unscales gradients by the question; None if something else is done to them."""
    found = _locals_of("_unscale_grads_")
    return None if found is None else found["self"]


def why_not_deferred(scaler: Any) -> str:
    """Return why gradients must be unscaled at once; empty if the methods of a GradScaler are torch's."""
    own = all(getattr(type(scaler), name) is getattr(GradScaler, name) for name in _METHODS)
    return "" if own else f"{type(scaler).__name__} has its own way to unscale, check or step"


def forget(scaler: Any, optimizer: int) -> None:
    """Let a GradScaler forget that it has unscaled the gradients of an optimizer, which is given by its identity."""
    scaler._per_optimizer_states.pop(optimizer, None)


def step_arguments() -> Sequence[Any] | None:
    """Return what GradScaler would give the optimizer's step, as it asks whether to make it; None elsewhere."""
    found = _locals_of("_maybe_opt_step")
    return None if found is None else (*found["args"], *found["kwargs"].values())


def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiply gradients of one dtype by `inverse` in place; set `found` to 1 where one is infinite or no number."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
