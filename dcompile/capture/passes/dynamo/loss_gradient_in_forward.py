"""Cross-entropy on CPUs makes its gradient together with the loss, while a row's exponentials lie in the caches.

By itself the backward reads all logits again, and takes their exponentials again: forward and backward of 128 rows of
32000 float32 logits took 1.6 times as long (Zen 3). The gradient is kept in place of the logits, as large as they, and
the backward multiplies it, in place, by what the loss's own gradient turns out to be. Mostly that is 1, and then the
kernel returns at once (`codegen/emit/cpp/identity_scale.py`). GPU kernels wait for memory and not for exponentials.

Bodies of higher-order operators are left as they are: a checkpoint asks for its loss to be computed again in the
backward, so that nothing as large as the logits is kept, and other bodies have a forward and a backward of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.causal_mask import argument, changes, shape_of
from dcompile.capture.passes.dynamo.chunked_cross_entropy.match import LOSS, between, given_to, is_call
from dcompile.device_traits import traits_of
from dcompile.passes import PassReport

_CONVERSIONS = ("float", "to", "type", "contiguous")
_RESHAPES = ("view", "reshape", "flatten")
"""On the way from logits to their loss, where rows stay what they are and elements grow wider, if anything."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""That a gradient may be kept in. In float16 it needs GradScaler's factor from the beginning."""

AHEAD = "dcompile_ahead"
"""The mark (`compat.aot.annotate_nodes`) of what a forward makes for its backward alone."""


def compute_loss_gradient_in_forward(gm: GraphModule) -> PassReport:
    """Have cross-entropies of a Dynamo graph whose classes are a matrix's columns compute their gradient, too."""
    found = [loss for loss in gm.graph.find_nodes(op="call_function", target=LOSS) if _is_worth(loss)]
    if not found or any(map(_differentiates, gm.graph.nodes)):
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
        for node in _way_of(given["input"]):  # whatever else nobody reads may change something in place
            if not node.users and is_call(node, *_CONVERSIONS, *_RESHAPES):
                gm.graph.erase_node(node)
    gm.recompile()
    return PassReport(len(found))


def _differentiates(node: Node) -> bool:
    """Do transforms run, which want rules of functions, or are derivatives taken, perhaps to be derived again?"""
    return node.target is torch.autograd.grad or "functorch" in str(getattr(node.target, "__module__", ""))


def _is_worth(loss: Node) -> bool:
    """Is it trained, by one number for all rows, and is its gradient as exact if it is multiplied once more?

    In bfloat16 the product is rounded another time. What a mean is multiplied by is mostly a power of two (1, a part of
    a step), a sum of rows by one over their number. Where anything else with a gradient reads the logits, the backward
    needs them as well.
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
    """The loss's logits, and what they were before they were reshaped and converted, the last first."""
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
    """The logits before they were converted for the loss, unless they have changed since: their gradient is smaller."""
    source = min(_way_of(logits), key=lambda node: node.meta["example_value"].element_size())
    return logits if any(map(changes, between(source, loss))) else source


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
    """`cross_entropy(logits.to(dtype), target)`, classes in the last dimension of `logits`, targets (rows,)."""
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
        # as log_softmax is taken apart, so that these are what the loss is made from
        powers = (wide - wide.amax(1, keepdim=True)).exp()
        each = counts.to(wide.dtype)
        if reduction == "mean":
            each = torch.where(counts, each.sum().reciprocal(), 0.0)
        is_target = torch.arange(rows.shape[1], device=rows.device) == target.unsqueeze(1)
        # not each / sum by itself: that would wait for both, and stand between what is to be one loop
        shares = powers * powers.sum(1, keepdim=True).reciprocal()
        with compat.aot.annotate_nodes({AHEAD: True}):
            gradient = (shares * each - torch.where(is_target, each, 0.0)).to(logits.dtype)
        ctx.save_for_backward(gradient.reshape(logits.shape))
        return loss

    @staticmethod
    def backward(ctx: Any, by: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * by, None, None, None, None
