"""Keep rows contiguous between normalizations, where a permuted tensor would spread its layout.

Eager gives the sum of a permuted and a contiguous tensor the strides of the first. In Whisper, the first tensor is the
result of a convolution over time: with its strides, the features of one position are 1500 elements apart in all layers.
Norms along features, and products, then read columns. The permuted tensor is copied where it enters, which lowering
fuses with its reader, and everything behind has contiguous rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.layout_plan import LayoutPlan, Layouts, Wanted, change_layouts
from dcompile.passes import PassReport

aten = torch.ops.aten

ALONG = {
    aten.mean.dim: 1, aten.sum.dim_IntList: 1, aten.amax.default: 1, aten.var_mean.correction: 1,
    aten._softmax.default: 1,
}  # fmt: skip
"""Reduction -> position of its dimensions."""
MIN_ROW = 32
"""Elements of a row from which its layout matters: a cache line of 16-bit elements and more."""


def keep_rows_contiguous(gm: GraphModule) -> PassReport:
    """Copy permuted operands of elementwise operations whose result is normalized along its last dimension, in place.

    Guarantees: the same values, inputs and outputs, strides included. Values of symbolic sizes keep their layout.
    """
    permuted = [node for node in gm.graph.nodes if _is_permuted(node) and _is_elementwise(node)]
    normalized = set[Node]()
    for node in reversed(permuted):
        if any(_is_along_rows(user) or user in normalized for user in node.users):
            normalized.add(node)
    if not normalized:
        return PassReport()

    def wanted(node: Node, plan: LayoutPlan) -> Wanted:
        return _permuted_operands(node, plan) if node in normalized else {}

    return change_layouts(gm, Layouts(wanted))


def _is_permuted(node: Node) -> bool:
    """Is a node's value a tensor whose memory is an order of dimensions that has another one last?"""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.is_floating_point():
        return False
    return compat.sizes.is_fixed(value) and value.shape[-1] >= MIN_ROW and value.stride(-1) != 1


def _is_elementwise(node: Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not hasattr(target, "tags"):
        return False
    return torch.Tag.pointwise in target.tags or target is aten._to_copy.default


def _is_along_rows(reader: Node) -> bool:
    """Does a node reduce rows along the last dimension alone?"""
    if reader.target is aten.native_layer_norm.default:
        return len(reader.args[1]) == 1  # type: ignore[arg-type]
    if reader.target not in ALONG or len(reader.args) <= ALONG[reader.target]:
        return False
    source, along = reader.args[0], reader.args[ALONG[reader.target]]
    rank = source.meta["val"].dim() if isinstance(source, Node) else 0
    dims = list(along) if isinstance(along, (list, tuple)) else [along]
    return len(dims) == 1 and dims[0] in (-1, rank - 1)


def _permuted_operands(node: Node, plan: LayoutPlan) -> Mapping[Node, torch.memory_format]:
    shape = node.meta["val"].shape
    values = {source: plan.value(source) for source in node.all_input_nodes}
    spread = [
        source
        for source, value in values.items()
        if isinstance(value, torch.Tensor) and value.shape == shape and not value.is_contiguous()
    ]
    return dict.fromkeys(spread, torch.contiguous_format)
