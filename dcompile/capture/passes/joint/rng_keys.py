"""Gives a graph's random operations a key: one draw from torch's generator for each call of the graph.

The key is an ordinary value that the forward saves for the backward, where masks are computed again from it. So
`torch.manual_seed` decides the numbers, successive calls differ, and a recomputed layer (activation checkpointing) sees
the mask that it saw the first time.
"""

from __future__ import annotations

from typing import Any

import torch

from dcompile import random_ops
from dcompile.passes import PassReport


def assign_rng_keys(gm: Any) -> PassReport:
    """Draw a key in `gm`, and hand it to all random operations of ours.

    Each also gets a number of its own, in graph order, so that no two draw the same.
    """
    graph = gm.graph
    nodes = [n for n in graph.nodes if n.op == "call_function" and random_ops.is_random(n.target)]
    nodes = [n for n in nodes if n.kwargs.get("key") is None and n.users]
    if not nodes:
        return PassReport()
    keys: dict[torch.device, Any] = {}
    for number, node in enumerate(nodes):
        device = node.meta["val"].device
        if device not in keys:
            keys[device] = _draw(graph, nodes[0], device)
        node.kwargs = {**node.kwargs, "key": keys[device], "draw": number}
    gm.recompile()
    return PassReport(len(nodes))


def _draw(graph: Any, before: Any, device: torch.device) -> Any:
    low, high = random_ops.KEY_RANGE
    settings = {"dtype": torch.int64, "device": device, "pin_memory": False}
    with graph.inserting_before(before):
        key = graph.call_function(torch.ops.aten.randint.low, (low, high, [1]), settings)
    key.meta["val"] = before.meta["val"].new_empty((1,), dtype=torch.int64, device=device)
    return key
