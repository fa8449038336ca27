"""Cross-entropy on CPUs makes its gradient together with the loss, while a row's exponentials lie in the caches.

By itself the backward reads all logits again, and takes their exponentials again: forward and backward of 128 rows of
32000 float32 logits took 1.6 times as long (Zen 3). The gradient is kept in place of the logits, as large as they, and
the backward multiplies it, in place, by what the loss's own gradient turns out to be. Mostly that is 1, and then the
kernel returns at once (`codegen/emit/unscaled.py`). Kernels for GPUs wait for memory and not for exponentials.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.traceback import annotate

from dcompile import compat
from dcompile.capture.causal import changes, shape_of
from dcompile.capture.chunked import LOSS, between, given_to, is_call
from dcompile.capture.joint import AHEAD

_CONVERSIONS = ("float", "to", "type", "contiguous")
_RESHAPES = ("view", "reshape", "flatten")


def make_gradients_ahead(gm: GraphModule) -> None:
    """Have cross-entropies of a Dynamo graph whose classes are a matrix's columns compute their gradient, too."""
    found = [loss for loss in gm.graph.find_nodes(op="call_function", target=LOSS) if _is_worth(loss)]
    if not found or any("functorch" in str(getattr(node.target, "__module__", "")) for node in gm.graph.nodes):
        return  # transforms want functions with rules of their own
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
        _erase_unread(given["input"])
    gm.recompile()


def _erase_unread(node: Node) -> None:
    """Take away conversions that only the loss has read. Whatever else nobody reads may change something in place."""
    while not node.users and is_call(node, *_CONVERSIONS, *_RESHAPES):
        above = node.args[0]
        node.graph.erase_node(node)
        assert isinstance(above, Node), "a tensor is converted"
        node = above


def _is_worth(loss: Node) -> bool:
    """Is it trained, by one number for all rows, and is its gradient as exact if it is multiplied once more?

    In bfloat16 the product is rounded another time. What a mean is multiplied by is mostly a power of two (1, a part of
    a step), a sum of rows by one over their number. Gradients in float16 need GradScaler's factor from the beginning.
    """
    given, value = given_to(loss), loss.meta["example_value"]
    plain = all(given[name] is None for name in ("weight", "size_average", "reduce")) and not given["label_smoothing"]
    if not plain or given["reduction"] not in ("mean", "sum") or not value.requires_grad:
        return False
    logits, target = (given[name].meta["example_value"] for name in ("input", "target"))
    if value.device.type != "cpu" or logits.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return False
    if any(map(compat.tensors.is_wrapper, (value, logits, target))):
        return False
    dtype = _source(given["input"], loss).meta["example_value"].dtype
    return dtype != torch.float16 and bool(given["reduction"] == "mean" or dtype != torch.bfloat16)


def _source(logits: Node, loss: Node) -> Node:
    """The logits before they were converted for the loss: what has their gradient, in less memory."""
    node = best = logits
    while is_call(node, *_CONVERSIONS, *_RESHAPES) and isinstance(node.args[0], Node):
        node = node.args[0]
        value: Any = node.meta.get("example_value")
        rows = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == shape_of(logits)[-1]
        if not rows or not value.is_floating_point() or value.device.type != "cpu":
            break
        if value.element_size() < best.meta["example_value"].element_size():
            best = node
    return logits if any(map(changes, between(best, loss))) else best


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
        each = torch.where(counts, 1 / counts.sum() if reduction == "mean" else 1.0, 0.0)
        is_target = torch.arange(rows.shape[1], device=rows.device) == target.unsqueeze(1)
        # not each / sum by itself: that would wait for both, and stand between what is to be one loop
        shares = powers * powers.sum(1, keepdim=True).reciprocal()
        with annotate({AHEAD: True}):
            gradient = (shares * each - torch.where(is_target, each, 0.0)).to(logits.dtype)
        ctx.save_for_backward(gradient.reshape(logits.shape))
        return loss

    @staticmethod
    def backward(ctx: Any, by: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * by, None, None, None, None
