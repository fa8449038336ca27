"""Insert calls into a joint graph, with their fake values, as parts of the model that existing nodes belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

ORIGIN = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr")
"""Metadata of a node's origin, which calls inserted for it share."""
WORK_ORIGIN = (*ORIGIN, "custom", "recompute", "ac_graph_id")
"""The same with annotations and marks of a checkpointed region, for calls that do a part of the node's own work."""


def insert_call(
    graph: Graph,
    mode: Any,
    target: Any,
    args: tuple[Any, ...],
    origin: Node,
    *,
    before: Node | None = None,
    after: Node | None = None,
    kwargs: Mapping[str, Any] | None = None,
    shares: tuple[str, ...] = WORK_ORIGIN,
) -> Node:
    """Insert a call before or after a node; return it, with its value by the fake tensor mode `mode`.

    `shares`: the metadata that it has in common with `origin`.
    """
    place = graph.inserting_before(before) if before is not None else graph.inserting_after(after)
    with place, mode:
        node = graph.call_function(target, args, dict(kwargs or {}))
        values = map_arg(args, lambda arg: arg.meta["val"])
        node.meta = {name: kept for name, kept in origin.meta.items() if name in shares}
        node.meta["val"] = target(*values, **node.kwargs)
    return node
