"""Compute the cross-entropy of a linear layer's result in chunks: the logits are never stored as a whole.

Chunks of rows (`by_rows.py`) compute gradients in the forward, so that nothing is computed twice. They need a loss that
is one sum, and a number of rows that is known. Chunks of classes are recomputed in the backward, for any loss. Each
gives a part of the weight's gradient in one step, so only the gradient of the layer's input is accumulated. A row's
maximum and sum of exponentials are combined from those of the chunks. Only these are saved for the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.passes.dynamo.chunked_cross_entropy.by_rows import LossAndGradients, RowLossSettings
from dcompile.capture.passes.dynamo.chunked_cross_entropy.logit_steps import (
    AGAIN,
    CHUNK_MARK,
    KEPT,
    LogitStep,
    apply_steps,
    is_target_of,
)
from dcompile.ir.nodes import PART
from dcompile.matmul_ops import wide_addmm, wide_linear, wide_mm
from dcompile.passes import PassReport

CHUNK_ALIGNMENT = 8
"""Number of classes in a chunk is a multiple of this: 16-bit rows are then aligned to 16 bytes."""


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    *,
    chunks: int,
    by_rows: bool,
    begun: int,
    dtype: torch.dtype,
    result: torch.dtype,
    grad: bool,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    steps: tuple[LogitStep, ...] = (),
    keeps_powers: bool = False,
    wants_rows: bool = False,
    wide: bool = False,
) -> Any:
    """Compute `cross_entropy(steps(linear(hidden, weight, bias)), target, class_weight, ...)` in `chunks` chunks.

    Returns the loss; with `wants_rows` also, for each row, the logarithm of the sum of exponentials and the largest
    class. The logarithms have a gradient in chunks of classes alone. `target` has a class per row. `begun` is the
    number of the first chunk, counted over all losses of the graph. `dtype` is the linear layer's, also under autocast,
    and `result` that of the loss. Sums are taken in float32 at least; with `wide`, logits are, too. `grad` says whether
    the layer's result required a gradient: under `no_grad` it does not, wherever the loss is computed. `keeps_powers`
    is for chunks of rows.
    """
    with torch.autocast(hidden.device.type, enabled=False), torch.set_grad_enabled(grad and torch.is_grad_enabled()):
        rows, summed = target.reshape(-1), torch.promote_types(dtype, torch.float32)
        counts = rows != ignore_index
        rows, hidden = torch.where(counts, rows, 0), hidden.reshape(-1, weight.shape[1])
        class_weight = None if class_weight is None else class_weight.detach().to(summed)
        each = counts.to(summed) if class_weight is None else torch.where(counts, class_weight[rows], 0.0)
        if by_rows:
            check = functools.partial(_of_targets, target=rows, parts=((0, weight.shape[0]),))
            how = RowLossSettings(dtype, wide, chunks, label_smoothing, steps, begun, wants_rows, keeps_powers)
            total, powers, top = LossAndGradients.apply(  # type: ignore[no-untyped-call, unused-ignore]
                hidden, weight, bias, class_weight, rows, counts, each, lambda picked: check(picked.unsqueeze(0)), how
            )
            loss = _reduced(total, each, reduction).to(result)
            return (loss, powers, top) if wants_rows else loss
        parts = tuple(spans(weight.shape[0], chunks))
        settings = ClassLossSettings(parts, wide, label_smoothing, steps, begun, wants_rows)
        losses, powers, top = _Losses.apply(  # type: ignore[no-untyped-call, unused-ignore]
            hidden.to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            class_weight,
            rows,
            each,
            settings,
        )
        losses = torch.where(counts, losses, 0.0)
        whole = reduction == "none"
        loss = (losses.reshape(target.shape) if whole else _reduced(losses.sum(), each, reduction)).to(result)
        return (loss, powers, top) if wants_rows else loss


def _reduced(total: torch.Tensor, each: torch.Tensor, reduction: str) -> torch.Tensor:
    """Divide a sum of losses by the sum of weights for a mean; without weights it is NaN, and gradients are 0."""
    if reduction == "sum":
        return total
    weights = each.sum()
    some = weights != 0
    return torch.where(some, total / torch.where(some, weights, 1.0), torch.nan)


def spans(classes: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield the first class of each chunk and the end: about `chunks` of them, none empty."""
    width = -(-classes // chunks)
    width = width if width < 8 * CHUNK_ALIGNMENT else -(-width // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    for first in range(0, classes, width):
        yield first, min(first + width, classes)


@dataclass(frozen=True)
class ClassLossSettings:
    """Constants of a loss in chunks of classes."""

    parts: tuple[tuple[int, int], ...]
    """First class and end of each chunk."""
    wide: bool
    """Whether the logits are in float32 at least."""
    smoothing: float
    steps: tuple[LogitStep, ...]
    begun: int
    wants_top: bool


class _Losses(torch.autograd.Function):
    """Compute each row's loss; the backward stores one chunk's logits and their gradient at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        target: torch.Tensor,
        each: torch.Tensor,
        settings: ClassLossSettings,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        logits, sums, picked, total = [], [], [], None
        most, places = [], []
        linear = wide_linear if settings.wide else torch.nn.functional.linear
        for number, (first, last) in enumerate(settings.parts, settings.begun):
            with compat.aot.annotate_nodes({CHUNK_MARK: AGAIN, PART: number}):
                part = linear(hidden, weight[first:last], None if bias is None else bias[first:last])
            with compat.aot.annotate_nodes({CHUNK_MARK: AGAIN}):
                values, _ = apply_steps(part, settings.steps)
                most.append(values.amax(1))
                # chunks of classes without probability have a sum of 0
                shift = torch.where(most[-1] == -torch.inf, 0.0, most[-1]).unsqueeze(1)
                sums.append((values - shift).exp().sum(1))
                is_target = is_target_of(target.unsqueeze(1), first, last, settings.begun)
                picked.append(torch.where(is_target, values, 0.0).sum(1))
                if settings.smoothing:
                    of_part = (values if class_weight is None else values * class_weight[first:last]).sum(1)
                    total = of_part if total is None else total + of_part
                if settings.wants_top:
                    places.append(values.argmax(1) + first)
                logits.append(part)
        with compat.aot.annotate_nodes({CHUNK_MARK: KEPT}):
            maxima = torch.stack(most)
            top = maxima.amax(0)
            rest = (torch.stack(sums) * (maxima - top).exp()).sum(0).log()
            whole = top + rest
            losses = each * (whole - _of_targets(torch.stack(picked), target, settings.parts))
            if total is not None:
                share, of_all = _share(settings, weight, class_weight)
                losses = losses * (1 - settings.smoothing) + (whole * of_all - total) * share
            largest = _largest(maxima, torch.stack(places)) if places else None
        ctx.save_for_backward(hidden, weight, class_weight, target, each, top, rest)
        ctx.logits, ctx.settings = logits, settings
        ctx.set_materialize_grads(False)
        if largest is not None:
            ctx.mark_non_differentiable(largest)
        return losses, whole, largest

    @staticmethod
    def backward(ctx: Any, losses: torch.Tensor | None, powers: torch.Tensor | None, _: Any) -> Any:
        hidden, weight, class_weight, target, each, top, rest = ctx.saved_tensors
        settings, by_hidden, by_weight, by_bias = ctx.settings, None, [], []
        of_powers, of_target, of_others = _factors(settings, weight, class_weight, each, losses, powers)
        target, top, rest = (row.unsqueeze(1) for row in (target, top, rest))
        for (first, last), part in zip(settings.parts, ctx.logits, strict=True):
            values, slope = apply_steps(part, settings.steps)
            by_logits = (values - top - rest).exp() * of_powers  # not less their sum, which is rounded
            if of_target is not None:
                is_target = is_target_of(target, first, last, settings.begun)
                by_logits = by_logits - torch.where(is_target, of_target, 0.0)
            if of_others is not None:
                by_logits = by_logits - (of_others if class_weight is None else of_others * class_weight[first:last])
            by_logits = (by_logits if slope is None else by_logits * slope).to(weight.dtype)
            if ctx.needs_input_grad[0]:
                factors = by_logits, weight[first:last]
                by_hidden = wide_mm(*factors) if by_hidden is None else wide_addmm(by_hidden, *factors)
            if ctx.needs_input_grad[1]:
                by_weight.append(by_logits.t() @ hidden)
            if ctx.needs_input_grad[2]:
                by_bias.append(by_logits.sum(0))
        whole = (torch.cat(found) if found else None for found in (by_weight, by_bias))
        by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
        return by_hidden, *whole, None, None, None, None


def _share(
    settings: ClassLossSettings, weight: torch.Tensor, class_weight: torch.Tensor | None
) -> tuple[float, torch.Tensor | float]:
    """Return the label smoothing of one class, and the sum of the class weights."""
    return settings.smoothing / weight.shape[0], weight.shape[0] if class_weight is None else class_weight.sum()


def _factors(
    settings: ClassLossSettings,
    weight: torch.Tensor,
    class_weight: torch.Tensor | None,
    each: torch.Tensor,
    losses: torch.Tensor | None,
    powers: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the factors, for each row, of its probabilities, of its target, and of all its classes."""
    of_target = of_others = None
    of_powers = torch.zeros_like(each) if powers is None else powers
    if losses is not None:
        of_target = losses * each * (1 - settings.smoothing)
        of_powers = of_target if powers is None else of_powers + of_target
        if settings.smoothing:
            share, of_all = _share(settings, weight, class_weight)
            of_others = losses * share
            of_powers = of_powers + of_others * of_all
            of_others = of_others.unsqueeze(1)
        of_target = of_target.unsqueeze(1)
    return of_powers.unsqueeze(1), of_target, of_others


def _largest(most: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return each row's largest class, the first one of several, from those of the chunks."""
    return places.gather(0, most.argmax(0, keepdim=True)).squeeze(0)


def _of_targets(picked: torch.Tensor, target: torch.Tensor, parts: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Return each row's logit of its target, from those of each chunk; raises if a target is no class."""
    (_, width), (_, classes) = parts[0], parts[-1]
    place = torch.where(target < classes, target.div(width, rounding_mode="floor"), len(parts))
    return picked.gather(0, place.unsqueeze(0)).squeeze(0)


def recompute_loss_chunks(joint: Any) -> PassReport:
    """Recompute the logits of chunks in the backward: the forward saves only one number for each row.

    Tracing copies annotations from a forward operation to its operations in the backward.
    """
    count = 0
    backward = compat.aot_descriptors.backward_nodes(joint)
    for node in joint.graph.nodes:
        if node in backward:
            continue
        mark = (node.meta.get("custom") or {}).get(CHUNK_MARK)
        if mark == AGAIN or (mark and node.meta.get("partitioner_tag") == "is_backward"):
            compat.aot.always_recompute(node)
        elif mark == KEPT:
            compat.aot.never_recompute(node)
        count += mark is not None
    return PassReport(count)
