"""Cross-entropy of a linear layer's result, a part of the classes at a time: the logits are never there as a whole.

Parts are taken of the classes and not of the rows: each part of the weight's gradient is then whole at once, where
parts of the rows would have it added up and rounded again for each, and the number of rows need not be known. A row's
sum of exponentials is put together from those of the parts, as a logarithm, which alone is kept for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dcompile import compat
from dcompile.ir.nodes import PART
from dcompile.passes import PassReport

CHUNK_MARK = "dcompile_chunk"
"""Name of what is noted with each operation in here, and follows it through tracing: AGAIN or KEPT."""
AGAIN, KEPT = "again", "kept"
CHUNK_ALIGNMENT = 8
"""Classes that a part is a multiple of: rows of 16 bits then begin where 16 bytes do."""


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    chunks: int,
    begun: int,
    dtype: torch.dtype,
    result: torch.dtype,
    grad: bool,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target, ...)` with a class per row, in `chunks` parts.

    `begun` is the number of the first part among those of the whole graph, which other losses have, too.
    `dtype` is what the linear layer computes in, under autocast too; `result` the loss's. Sums are taken in float32
    at least. `grad` is whether the layer had a gradient, as it has none under `no_grad`, wherever the loss is taken.
    """
    with torch.autocast(hidden.device.type, enabled=False), torch.set_grad_enabled(grad and torch.is_grad_enabled()):
        rows, classes = target.reshape(-1), weight.shape[0]
        counts = rows != ignore_index
        losses = _Losses.apply(  # type: ignore[no-untyped-call, unused-ignore]
            hidden.reshape(-1, weight.shape[1]).to(dtype),
            weight.to(dtype),
            None if bias is None else bias.to(dtype),
            torch.where(counts, rows, 0),
            tuple(spans(classes, chunks)),
            label_smoothing,
            begun,
        )
        losses = torch.where(counts, losses, 0.0)
        if reduction == "none":
            return losses.reshape(target.shape).to(result)
        total = losses.sum()
        return (total / counts.sum() if reduction == "mean" else total).to(result)


def spans(classes: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Where each part begins and ends: about as many as asked for, none of them empty."""
    width = -(-classes // chunks)
    width = width if width < 8 * CHUNK_ALIGNMENT else -(-width // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    for first in range(0, classes, width):
        yield first, min(first + width, classes)


class _Losses(torch.autograd.Function):
    """Each row's loss, by a backward that has no more than one part's logits and their gradient at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        parts: tuple[tuple[int, int], ...],
        smoothing: float,
        begun: int,
    ) -> torch.Tensor:
        logits, sums, picked, total = [], [], [], None
        for number, (first, last) in enumerate(parts, begun):
            with compat.aot.annotate_nodes({CHUNK_MARK: AGAIN, PART: number}):
                part = torch.nn.functional.linear(
                    hidden, weight[first:last], None if bias is None else bias[first:last]
                )
            with compat.aot.annotate_nodes({CHUNK_MARK: AGAIN}):
                wide = part.to(_wide(part.dtype))
                sums.append(wide.logsumexp(1))
                picked.append(torch.where(_is_target(target.unsqueeze(1), first, last, begun), wide, 0.0).sum(1))
                if smoothing:
                    total = wide.sum(1) if total is None else total + wide.sum(1)
                logits.append(part)
        with compat.aot.annotate_nodes({CHUNK_MARK: KEPT}):
            whole = torch.logsumexp(torch.stack(sums), 0)
            losses = whole - _of_targets(torch.stack(picked), target, parts)
            if total is not None:
                losses = losses * (1 - smoothing) + (whole - total / weight.shape[0]) * smoothing
        ctx.save_for_backward(hidden, weight, target, whole)
        ctx.logits, ctx.parts, ctx.smoothing, ctx.begun = logits, parts, smoothing, begun
        return losses

    @staticmethod
    def backward(ctx: Any, losses: torch.Tensor) -> Any:
        hidden, weight, target, sums = ctx.saved_tensors
        by_hidden, by_weight, by_bias = None, [], []
        each, target, sums = losses.unsqueeze(1), target.unsqueeze(1), sums.unsqueeze(1)
        for (first, last), part in zip(ctx.parts, ctx.logits, strict=True):
            is_target = _is_target(target, first, last, ctx.begun)
            by_logits = (part.to(sums.dtype) - sums).exp() * each
            by_logits = by_logits - torch.where(is_target, each * (1 - ctx.smoothing), 0.0)
            if ctx.smoothing:
                by_logits = by_logits - each * (ctx.smoothing / weight.shape[0])
            by_logits = by_logits.to(part.dtype)
            if ctx.needs_input_grad[0]:
                by_hidden = _add_product(by_hidden, by_logits, weight[first:last])
            if ctx.needs_input_grad[1]:
                by_weight.append(by_logits.t() @ hidden)
            if ctx.needs_input_grad[2]:
                by_bias.append(by_logits.sum(0))
        whole = (torch.cat(found) if found else None for found in (by_weight, by_bias))
        by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
        return by_hidden, *whole, None, None, None, None


def _add_product(sums: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sums with a product more, in float32 at least: eight parts rounded to bfloat16 one after another were off by 2.5
    times what one product is (2048 rows, 32000 classes; H200)."""
    if sums is None:
        return (x @ y).to(_wide(x.dtype))
    return torch.addmm(sums, x, y) if sums.dtype == x.dtype else sums + x @ y


def _of_targets(picked: torch.Tensor, target: torch.Tensor, parts: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Each row's logit of its target, from what each part has found; raises where a target is no class."""
    (_, width), (_, classes) = parts[0], parts[-1]
    place = torch.where(target < classes, target.div(width, rounding_mode="floor"), len(parts))
    return picked.gather(0, place.unsqueeze(0)).squeeze(0)


def _is_target(target: torch.Tensor, first: int, last: int, begun: int) -> torch.Tensor:
    """Where a part's classes are their rows' targets.

    Counted from another number for each loss of a graph: of two with the same targets, the second would else find what
    the first has computed, and all parts of that would be kept for it.
    """
    return torch.arange(first + begun, last + begun, device=target.device) == target + begun


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def recompute_loss_chunks(joint: Any) -> PassReport:
    """Have the backward compute logits of parts again: the forward saves what it came to in each row, and no more.

    Tracing notes with operations of the backward what is noted with those that they belong to.
    """
    count = 0
    backward = set(filter(compat.aot.is_tangent, joint.graph.find_nodes(op="placeholder")))
    for node in joint.graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
            continue
        mark = (node.meta.get("custom") or {}).get(CHUNK_MARK)
        if mark == AGAIN or (mark and node.meta.get("partitioner_tag") == "is_backward"):
            compat.aot.always_recompute(node)
        elif mark == KEPT:
            compat.aot.never_recompute(node)
        count += mark is not None
    return PassReport(count)
