"""Assign a key to a graph's random operations: one draw from torch's generator in each call of the graph.

The key is an ordinary value that the forward saves for the backward, which recomputes masks from it. So
`torch.manual_seed` determines the numbers, and successive calls differ. A recomputed layer (activation checkpointing)
gets the same mask again.
"""

from __future__ import annotations

from typing import Any

import torch

from dcompile.capture.passes.dynamo.captured_nodes import argument
from dcompile.operators import random_ops
from dcompile.passes import PassReport


def assign_rng_keys(gm: Any) -> PassReport:
    """Draw a key for each device in `gm`, and pass it to all of dcompile's random operations.

    Each also gets its own number, in graph order, so that no two draw the same numbers.
    """
    graph = gm.graph
    nodes = [n for n in graph.nodes if n.op == "call_function" and random_ops.is_random(n.target)]
    nodes = [n for n in nodes if argument(n, 3, "key") is None and n.users]
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
