"""Compute the cross-entropy of a linear layer's result in chunks: the logits are never stored as a whole.

Steps between the layer and its loss, such as temperatures and soft caps, come first, with their derivatives.

Chunks of rows compute gradients in the forward, so that nothing is computed twice. Each chunk's logits are complete
rows, so their gradient follows at once, up to the factor by which the backward scales the loss. So there are three
GEMMs, as without chunks: logits, the input's gradient, the weight's. The weight's gradient is accumulated in float32
over the chunks. The backward multiplies float32 gradients by the factor and rounds once. These chunks need a loss that
is one sum, and a number of rows that is known.

Chunks of classes are recomputed in the backward, for any loss. Each gives a part of the weight's gradient in one step,
so only the gradient of the layer's input is accumulated. A row's maximum and sum of exponentials are combined from
those of the chunks. Only these are saved for the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dcompile import compat
from dcompile.ir.nodes import PART
from dcompile.operators.matmul_ops import wide_addmm, wide_linear, wide_mm
from dcompile.passes import PassReport

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
    backward = compat.aot_metadata.backward_nodes(joint)
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
