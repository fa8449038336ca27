"""Gather in the dtype of memory: torch upsamples 16-bit images as float32, and rounds the gathered values.

Widening is exact, so rounding restores the original values. A gather reads memory, so the wider copy, of twice the
bytes, would have to be written first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile.capture.passes.joint.channels_last import GATHERS
from dcompile.passes import PassReport

aten = torch.ops.aten

WIDE = (torch.float32, torch.float64)


def narrow_gathers(gm: GraphModule) -> PassReport:
    """Make gathers read the 16-bit source of a widened tensor, if all users round the result back."""
    changed = 0
    for gather in [node for node in gm.graph.nodes if node.op == "call_function" and node.target in GATHERS]:
        source = _widened_source(gather.args[0])
        if source is None or not all(_narrows(user, source) for user in gather.users):
            continue
        gather.update_arg(0, source)
        gather.meta["val"] = gather.meta["val"].to(source.meta["val"].dtype)
        for user in list(gather.users):
            user.replace_all_uses_with(gather)
            gm.graph.erase_node(user)
        changed += 1
    if changed:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return PassReport(changed)


def _widened_source(node: Any) -> Node | None:
    """Return the 16-bit source of which `node` is a wider copy, or None."""
    if not _is_plain_cast(node) or node.meta["val"].dtype not in WIDE:
        return None
    source = node.args[0]
    return source if source.meta["val"].dtype in (torch.float16, torch.bfloat16) else None


def _narrows(node: Node, source: Node) -> bool:
    return _is_plain_cast(node) and node.meta["val"].dtype == source.meta["val"].dtype


def _is_plain_cast(node: Any) -> bool:
    """Is a node a copy that differs only in its dtype?"""
    if not (isinstance(node, Node) and node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"}):
        return False
    value, before = node.meta.get("val"), node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    return value.stride() == before.stride()
