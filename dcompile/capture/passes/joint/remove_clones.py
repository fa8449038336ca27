"""Remove copies of values that nothing changes; each would be saved for the backward in addition to its source.

Dropout with probability zero makes such a copy. If a joint graph has no operation that writes to a value, a copy with
its source's strides can be replaced by the source.

Guarantees: the same values. Copies of inputs and of views stay, since the user may write to inputs between forward and
backward. Copies that are results stay, so that no two results share memory that did not before.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from dcompile.passes import PassReport

aten = torch.ops.aten

COPIES = {aten.clone.default, aten.detach.default, aten.alias.default}


def remove_clones(joint: GraphModule) -> PassReport:
    """Replace copies of unchanged values by their sources, in place."""
    if any(_writes(node) for node in joint.graph.nodes):
        return PassReport()
    found = [node for node in joint.graph.nodes if node.op == "call_function" and node.target in COPIES]
    dropped = [node for node in found if _is_its_source(node)]
    for node in dropped:
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)
    joint.recompile()
    return PassReport(len(dropped))


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _is_its_source(copy: Node) -> bool:
    source = copy.args[0]
    assert isinstance(source, Node)
    if any(user.op == "output" for user in copy.users) or "recompute" in copy.meta:
        return False
    mine, its = copy.meta.get("val"), source.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(its, torch.Tensor) or mine.stride() != its.stride():
        return False
    return _has_memory_of_its_own(source)


def _has_memory_of_its_own(node: Node) -> bool:
    """Is a value computed, and no view? Strides and offsets of views refer to memory that others share."""
    return node.op == "call_function" and not getattr(node.target, "is_view", True)
