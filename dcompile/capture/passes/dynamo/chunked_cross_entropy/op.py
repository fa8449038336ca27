"""Compute the cross-entropy of a linear layer's result in chunks of classes: the logits are never stored as a whole.

Chunks split the classes, not the rows. So each chunk gives a part of the weight's gradient in one step. With chunks of
rows, it would be accumulated and rounded for each chunk. Also, the number of rows may be symbolic. A row's logarithm of
the sum of exponentials is combined from those of the chunks. Only it is saved for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dcompile import compat
from dcompile.ir.nodes import PART
from dcompile.passes import PassReport

CHUNK_MARK = "dcompile_chunk"
"""Key of the annotation on each operation of this module, which tracing preserves: AGAIN (recompute) or KEPT (save)."""
AGAIN, KEPT = "again", "kept"
CHUNK_ALIGNMENT = 8
"""Number of classes in a chunk is a multiple of this: 16-bit rows are then aligned to 16 bytes."""


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
    """Compute `cross_entropy(linear(hidden, weight, bias), target, ...)` with a class per row, in `chunks` chunks.

    `begun` is the number of the first chunk, counted over all losses of the graph. `dtype` is the linear layer's,
    also under autocast, and `result` that of the loss. Sums are taken in float32 at least. `grad` says whether the
    layer's result required a gradient: under `no_grad` it does not, wherever the loss is computed.
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
    """Yield the first class of each chunk and the end: about `chunks` of them, none empty."""
    width = -(-classes // chunks)
    width = width if width < 8 * CHUNK_ALIGNMENT else -(-width // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    for first in range(0, classes, width):
        yield first, min(first + width, classes)


class _Losses(torch.autograd.Function):
    """Compute each row's loss; the backward stores one chunk's logits and their gradient at a time."""

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
    """Accumulate a matmul in float32 at least.

    Eight chunks accumulated in bfloat16 had 2.5 times the error of one matmul (docs/lab/constants.md, K15).
    """
    if sums is None:
        return (x @ y).to(_wide(x.dtype))
    return torch.addmm(sums, x, y) if sums.dtype == x.dtype else sums + x @ y


def _of_targets(picked: torch.Tensor, target: torch.Tensor, parts: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Return each row's logit of its target, from those of each chunk; raises if a target is no class."""
    (_, width), (_, classes) = parts[0], parts[-1]
    place = torch.where(target < classes, target.div(width, rounding_mode="floor"), len(parts))
    return picked.gather(0, place.unsqueeze(0)).squeeze(0)


def _is_target(target: torch.Tensor, first: int, last: int, begun: int) -> torch.Tensor:
    """Return where a chunk's classes are their rows' targets.

    Positions are offset by `begun`, which differs for each loss of a graph. Otherwise CSE would share the results of
    two losses with equal targets, and keep all chunks of the first for the second.
    """
    return torch.arange(first + begun, last + begun, device=target.device) == target + begun


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def recompute_loss_chunks(joint: Any) -> PassReport:
    """Recompute the logits of chunks in the backward: the forward saves only one number for each row.

    Tracing copies annotations from a forward operation to its operations in the backward.
    """
    count = 0
    backward = set(filter(compat.aot_descriptors.is_tangent, joint.graph.find_nodes(op="placeholder")))
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
