"""Elements of logits: steps such as temperatures and soft caps, their derivative, and whether one is the target's.

Annotations of traced operations say what the forward of a loss saves.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

CHUNK_MARK = "dcompile_chunk"
"""Key of the annotation on each operation of a loss in chunks of classes: AGAIN (recompute) or KEPT (save)."""
AGAIN, KEPT = "again", "kept"
COMPUTED_IN_FORWARD = "dcompile_ahead"
"""Annotation (`compat.aot.annotate_nodes`) of values that a forward computes only for its backward."""


LogitStep: TypeAlias = "tuple[str, float]"
"""("scale", factor), ("shift", addend), ("tanh", 0.0) or ("sigmoid", 0.0). A soft cap is scale, tanh and scale."""


def apply_steps(logits: torch.Tensor, steps: tuple[LogitStep, ...]) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Return the logits after the steps, in float32 at least, and their derivative; None if that is 1 everywhere."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope: torch.Tensor | float | None = None
    for kind, number in steps:
        by: torch.Tensor | float = number
        match kind:
            case "scale":
                values = values * number
            case "shift":
                values = values + number
                continue
            case "tanh":
                values = values.tanh()
                by = 1 - values * values
            case _:
                values = values.sigmoid()
                by = values * (1 - values)
        slope = by if slope is None else by * slope
    return values, slope


def is_target_of(target: torch.Tensor, first: int, last: int, begun: int) -> torch.Tensor:
    """Return where the classes from `first` to `last` are their rows' targets; `target` is (rows, 1).

    Positions are offset by `begun`, which differs for each loss of a graph. Otherwise CSE would share the results of
    two losses with equal targets, and keep all chunks of the first for the second.
    """
    places = torch.arange(first + begun, last + begun, dtype=torch.int32, device=target.device)
    return places == (target + begun).to(torch.int32)  # 64-bit comparisons take twice as many instructions
