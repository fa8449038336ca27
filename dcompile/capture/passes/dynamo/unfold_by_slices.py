"""Replace `unfold` views that a graph changes in place by slices, so that elements between windows keep their values.

Functionalization writes a change through `unfold` back with its gradient, `unfold_backward`. That puts zeros into the
gaps between windows and after the last one (torch 2.11 to 2.15, under every compiler). Inverses of slices are correct.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule

from dcompile import compat
from dcompile.passes import PassReport

ASSIGNMENTS = frozenset(
    (
        operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
        operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
    )
)  # fmt: skip
UNFOLDS = (torch.Tensor.unfold, torch.ops.aten.unfold.default)


def view_unfold_by_slices(gm: GraphModule) -> PassReport:
    """Replace `unfold` by `windows` where a captured graph, or a subgraph, changes the memory in place.

    Guarantees: the same views of the same memory. Windows that nothing changes stay `unfold`, which adds no guard.
    """
    count = 0
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        unfolds = [node for node in module.graph.nodes if _is_unfold(node)]
        changed = {memory for node in module.graph.nodes for memory in _changed_memory(node)} if unfolds else set()
        for node in unfolds:
            memory = _memory_of(node)
            if changed and (memory is None or memory in changed or None in changed):
                node.op, node.target = "call_function", windows
                count += 1
        if unfolds:
            module.recompile()
    return PassReport(count)


def _is_unfold(node: Any) -> bool:
    is_method = node.op == "call_method" and node.target == "unfold"
    return is_method or (node.op == "call_function" and node.target in UNFOLDS)


def _changed_memory(node: Any) -> list[int | None]:
    """Return the memory that a node may change: that of its arguments, None where it is unknown."""
    is_change = node.target in ASSIGNMENTS or compat.partitioner.changes(node)
    return [_memory_of(given) for given in node.all_input_nodes] if is_change else []


def _memory_of(node: Any) -> int | None:
    value = node.meta.get("example_value", node.meta.get("val"))
    return compat.tensors.storage_key(value) if isinstance(value, torch.Tensor) else None


def windows(x: torch.Tensor, dimension: Any, size: Any, step: Any) -> torch.Tensor:
    """Return `x.unfold(dimension, size, step)`, by slices if windows do not overlap.

    Shape, strides and memory are the same. Eager mode does not allow changes through overlapping windows, so these stay
    `unfold`. Raises what `unfold` raises for invalid arguments.
    """
    seen = x.unfold(dimension, size, step)
    if not x.dim() or size == 0 or step < size:
        return seen
    at = dimension % x.dim()
    count = seen.shape[at]
    if x.shape[at] >= count * step:
        steps: torch.Tensor = torch.unflatten(x.narrow(at, 0, count * step), at, (count, step))
        return steps.narrow(at + 1, 0, size).movedim(at + 1, -1)
    # After the last window there is less than a step, so no slice of whole steps contains all windows.
    # Functionalization does not support as_strided of a view, so it is applied to the base of `x`.
    base = x if x._base is None else x._base
    return base.as_strided(seen.shape, seen.stride(), seen.storage_offset())
