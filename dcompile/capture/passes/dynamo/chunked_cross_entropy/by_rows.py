"""Compute the cross-entropy of a linear layer's result in chunks of rows, with its gradients in the forward.

Each chunk's logits are complete rows, so their gradient follows at once, up to the factor by which the backward scales
the loss. So there are three GEMMs, as without chunks: logits, the input's gradient, the weight's. The weight's gradient
is accumulated in float32 over the chunks. The backward multiplies float32 gradients by the factor and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.passes.dynamo.chunked_cross_entropy.logit_steps import (
    COMPUTED_IN_FORWARD,
    LogitStep,
    apply_steps,
    is_target_of,
)
from dcompile.ir.nodes import PART
from dcompile.matmul_ops import wide_addmm, wide_linear, wide_mm

FLOAT16_SCALE = 1024.0
"""Factor of gradients in float16, as GradScaler's: probabilities below 6e-8 would vanish."""
ROW_ALIGNMENT = 128
"""Number of rows in a chunk is a multiple of this: GEMMs have whole tiles."""


@dataclass(frozen=True)
class RowLossSettings:
    """Constants of a loss in chunks of rows."""

    dtype: torch.dtype
    """Dtype of the logits, unless these are wide, and of their gradient."""
    wide: bool
    """Whether the logits are in float32 at least."""
    chunks: int
    smoothing: float
    steps: tuple[LogitStep, ...]
    begun: int
    """Number of the first chunk, counted over all losses of the graph."""
    wants_top: bool
    """Whether each row's largest class is a result."""
    keeps_powers: bool
    """Whether the gradient reuses the exponentials of the sum, as is faster on CPUs. Otherwise it recomputes them, and
    the maximum and the sum take one pass over the logits (`use_online_softmax`).
    """


def row_spans(rows: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each chunk and the end: at most `chunks` of them, none empty."""
    height = -(-rows // chunks)
    height = height if height < ROW_ALIGNMENT else -(-height // ROW_ALIGNMENT) * ROW_ALIGNMENT
    for first in range(0, rows, height):
        yield first, min(first + height, rows)


class LossAndGradients(torch.autograd.Function):
    """Compute the sum of the rows' losses, and its gradients in the same pass.

    apply(hidden, weight, bias, class_weight, target, counts, each, check, settings) gives the sum, and each row's
    logarithm of the sum of exponentials and largest class, which have no gradient. `counts` says which rows have a
    loss. `each` is the class weight of their target, 0 elsewhere. `check` raises if a target is no class.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        target: torch.Tensor,
        counts: torch.Tensor,
        each: torch.Tensor,
        check: Callable[[torch.Tensor], torch.Tensor],
        settings: RowLossSettings,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        rows, matrix, added = (None if part is None else part.to(settings.dtype) for part in (hidden, weight, bias))
        assert rows is not None and matrix is not None
        loss = _ChunkLoss(matrix, added, class_weight, settings)
        found, by_hidden = list[tuple[torch.Tensor, ...]](), list[torch.Tensor]()
        by_weight: torch.Tensor | None = None
        by_bias: torch.Tensor | None = None
        for number, (first, last) in enumerate(row_spans(len(hidden), settings.chunks), settings.begun):
            at = slice(first, last)
            # parts keep fusion from joining the loops of two chunks
            with compat.aot.annotate_nodes({PART: number}):
                results, gradient = loss(rows[at], target[at], counts[at], each[at])
            found.append(results)
            with compat.aot.annotate_nodes({COMPUTED_IN_FORWARD: True}):
                if ctx.needs_input_grad[0]:
                    by_hidden.append(wide_mm(gradient, matrix))
                if ctx.needs_input_grad[1]:
                    factors = gradient.t(), rows[at]
                    by_weight = wide_mm(*factors) if by_weight is None else wide_addmm(by_weight, *factors)
                if ctx.needs_input_grad[2]:
                    sums = gradient.sum(0, dtype=each.dtype)
                    by_bias = sums if by_bias is None else by_bias + sums
        losses, picked, powers, *top = (torch.cat(parts) for parts in zip(*found, strict=True))
        losses = losses - each * (1 - settings.smoothing) * check(picked)
        ctx.dtypes = [None if part is None else part.dtype for part in (hidden, weight, bias)]
        ctx.count, ctx.scale = len(by_hidden), loss.scale
        ctx.save_for_backward(*by_hidden, by_weight, by_bias)
        ctx.mark_non_differentiable(powers, *top)
        return torch.where(counts, losses, 0.0).sum(), powers, (top[0] if top else None)

    @staticmethod
    def backward(ctx: Any, by_total: torch.Tensor, *_: Any) -> Any:
        *pieces, by_weight, by_bias = ctx.saved_tensors
        found = (torch.cat(pieces) if pieces else None, by_weight, by_bias)
        factor = by_total / ctx.scale
        scaled = (
            None if whole is None else (whole * factor).to(dtype)
            for whole, dtype in zip(found, ctx.dtypes, strict=True)
        )  # fmt: skip
        return *scaled, None, None, None, None, None, None


class _ChunkLoss:
    """Losses of a chunk of rows, and the gradient of its logits.

    The loss of a row with logits y and target t is `(1 - s) w[t] (lse(y) - y[t]) + s / C sum_c w[c] (lse(y) - y[c])`:
    C classes, the label smoothing s, the class weights w.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, of_class: torch.Tensor | None, settings: RowLossSettings
    ) -> None:
        self.weight, self.bias, self.settings = weight, bias, settings
        self.scale = FLOAT16_SCALE if settings.dtype == torch.float16 else 1.0
        self.share = settings.smoothing / len(weight)
        self.of_class: torch.Tensor | float = 1.0 if of_class is None else of_class
        self.of_all: torch.Tensor | float = float(len(weight)) if of_class is None else of_class.sum()

    def __call__(
        self, rows: torch.Tensor, target: torch.Tensor, counts: torch.Tensor, each: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return row values, and the gradient of the losses' sum by the linear layer's result, times `scale`.

        Row values are losses without the target's logit, that logit, the logarithm of the sum of exponentials, and the
        largest class if it is wanted.
        """
        linear = wide_linear if self.settings.wide else torch.nn.functional.linear
        logits = linear(rows, self.weight, self.bias)
        values, slope = apply_steps(logits, self.settings.steps)
        most = values.amax(1, keepdim=True)
        powers = (values - most).exp()
        sums = powers.sum(1, keepdim=True)
        rest = sums.log()
        whole = (most + rest).squeeze(1)
        is_target = is_target_of(target.unsqueeze(1), 0, len(self.weight), self.settings.begun)
        picked = torch.where(is_target, values, 0.0).sum(1)
        of_target = each * (1 - self.settings.smoothing)
        of_powers, losses, others = of_target, of_target * whole, None
        if self.settings.smoothing:
            others = counts.to(each.dtype) * self.share
            of_powers = of_target + others * self.of_all
            losses = of_powers * whole - others * (values * self.of_class).sum(1)
        if self.settings.keeps_powers:
            # not `of_powers / sums`: that scalar would depend on both reductions, and prevent fusion into one loop
            gradient = powers * sums.reciprocal() * (of_powers * self.scale).unsqueeze(1)
        else:
            # not less `whole`, which is rounded where it is large
            gradient = (values - most - rest).exp() * (of_powers * self.scale).unsqueeze(1)
        gradient = gradient - torch.where(is_target, (of_target * self.scale).unsqueeze(1), 0.0)
        if others is not None:
            gradient = gradient - (others * self.scale).unsqueeze(1) * self.of_class
        gradient = gradient if slope is None else gradient * slope
        top = [values.argmax(1)] if self.settings.wants_top else []
        return (losses, picked, whole, *top), gradient.to(self.settings.dtype)
