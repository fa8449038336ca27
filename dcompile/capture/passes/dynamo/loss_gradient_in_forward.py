"""Compute the gradient of cross-entropy in the forward on CPUs, while a row's exponentials are in the caches.

The usual backward reads all logits and computes their exponentials again. Forward and backward of 128 rows of 32000
float32 logits took 1.6 times as long (Zen 3). The gradient is saved in place of the logits and is as large. The
backward multiplies it, in place, by the gradient of the loss. That is mostly 1, and then the kernel returns at once
(`codegen/emit/cpp/loop_conditions.py`). GPU kernels are limited by memory, not by exponentials.

Bodies of higher-order operators do not change. A checkpoint recomputes its loss in the backward, so that nothing as
large as the logits is saved. Other bodies have their own forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import argument, changes, is_call, shape_of
from dcompile.capture.passes.dynamo.chunked_cross_entropy.head import LOSS, given_to, nodes_between
from dcompile.capture.passes.dynamo.chunked_cross_entropy.match import differentiates
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import COMPUTED_IN_FORWARD
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

_CONVERSIONS = ("float", "to", "type", "contiguous")
_RESHAPES = ("view", "reshape", "flatten")
"""Operations between logits and their loss that keep rows, and at most widen elements."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""dtypes in which a gradient may be saved. In float16 it would need GradScaler's factor from the start."""


def compute_loss_gradient_in_forward(gm: GraphModule) -> PassReport:
    """Compute gradients in the forward for cross-entropies of matrices [rows, classes] in a Dynamo graph, in place."""
    found = [loss for loss in gm.graph.find_nodes(op="call_function", target=LOSS) if _is_worth(loss)]
    if not found or any(map(differentiates, gm.graph.nodes)):
        return PassReport()
    for loss in found:
        given = given_to(loss)
        with gm.graph.inserting_before(loss):
            settings = {name: given[name] for name in ("ignore_index", "reduction")}
            settings["dtype"] = loss.meta["example_value"].dtype
            arguments = (_source(given["input"], loss), given["target"])
            new = gm.graph.call_function(cross_entropy_ahead, arguments, settings)
        new.meta = dict(loss.meta)
        loss.replace_all_uses_with(new)
        gm.graph.erase_node(loss)
        for node in _way_of(given["input"]):  # other unused nodes may change a tensor in place
            if not node.users and is_call(node, *_CONVERSIONS, *_RESHAPES):
                gm.graph.erase_node(node)
    gm.recompile()
    return PassReport(len(found))


def _is_worth(loss: Node) -> bool:
    """Is a loss one number with a gradient, and is that gradient as exact after another multiplication?

    In bfloat16 the multiplication rounds again. For a mean, the factor is mostly a power of two (1, or a part of a
    step). For a sum, it is the inverse of the number of rows. If another reader of the logits has a gradient, the
    backward needs the logits, too, so nothing is gained.
    """
    given, value = given_to(loss), loss.meta["example_value"]
    plain = all(given[name] is None for name in ("weight", "size_average", "reduce")) and not given["label_smoothing"]
    if not plain or given["reduction"] not in ("mean", "sum") or not value.requires_grad:
        return False
    logits, target = (given[name].meta["example_value"] for name in ("input", "target"))
    if not _is_early(value) or logits.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return False
    if any(map(compat.tensors.is_wrapper, (value, logits, target))):
        return False
    source = _source(given["input"], loss)
    dtype = source.meta["example_value"].dtype
    others = _other_readers({source, *_way_of(given["input"])}, loss)
    exact = given["reduction"] == "mean" or dtype != torch.bfloat16
    return dtype in _DTYPES and exact and not any(map(_has_gradient, others))


def _is_early(value: Any) -> bool:
    return traits_of(value.device.type).computes_loss_gradient_early


def _way_of(logits: Node) -> list[Node]:
    """Return the loss's logits and the values before their reshapes and conversions, the last one first."""
    way = [logits]
    while is_call(way[-1], *_CONVERSIONS, *_RESHAPES):
        above = argument(way[-1], 0, "input")
        value = above.meta.get("example_value") if isinstance(above, Node) else None
        rows = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == shape_of(logits)[-1]
        if not rows or not _is_early(value) or not value.is_floating_point():  # type: ignore[union-attr]
            break
        way.append(above)
    return way


def _source(logits: Node, loss: Node) -> Node:
    """Return the logits before conversions, since their gradient is smaller, unless something changes in between."""
    source = min(_way_of(logits), key=lambda node: node.meta["example_value"].element_size())
    return logits if any(map(changes, nodes_between(source, loss))) else source


def _other_readers(nodes: set[Node], loss: Node) -> Iterator[Node]:
    readers = (user for node in nodes for user in node.users)
    return (user for user in readers if user is not loss and user not in nodes and user.op != "output")


def _has_gradient(node: Node) -> bool:
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in values)


def cross_entropy_ahead(
    logits: torch.Tensor, target: torch.Tensor, *, dtype: torch.dtype, ignore_index: int, reduction: str
) -> torch.Tensor:
    """Compute `cross_entropy(logits.to(dtype), target)` for `logits` (..., classes) and `target` (rows,)."""
    with torch.autocast(logits.device.type, enabled=False):
        return _Loss.apply(logits, target, dtype, ignore_index, reduction)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, ignore_index: int, reduction: str
    ) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1]).to(dtype)
        loss = LOSS(rows, target, ignore_index=ignore_index, reduction=reduction)
        counts = (target != ignore_index).unsqueeze(1)
        wide = rows.to(torch.promote_types(dtype, torch.float32))
        # as the decomposition of log_softmax, so that CSE shares these values with the loss
        powers = (wide - wide.amax(1, keepdim=True)).exp()
        each = counts.to(wide.dtype)
        if reduction == "mean":
            each = torch.where(counts, each.sum().reciprocal(), 0.0)
        is_target = torch.arange(rows.shape[1], device=rows.device) == target.unsqueeze(1)
        # not `each / sum`: that scalar would depend on both reductions, and prevent fusion into one loop
        shares = powers * powers.sum(1, keepdim=True).reciprocal()
        with compat.aot.annotate_nodes({COMPUTED_IN_FORWARD: True}):
            gradient = (shares * each - torch.where(is_target, each, 0.0)).to(logits.dtype)
        ctx.save_for_backward(gradient.reshape(logits.shape))
        return loss

    @staticmethod
    def backward(ctx: Any, by: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * by, None, None, None, None
