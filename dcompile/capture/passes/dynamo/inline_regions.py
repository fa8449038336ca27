"""Inline regions at their calls: those of `torch.compiler.nested_compile_region`, and checkpointed ones.

TorchDynamo traces a nested region once for any number of calls, and calls its body by an operator. Inlined, the body is
part of the graph as if Dynamo had traced it there. So it is optimized with the operations around it, and a body that
many layers call becomes a repeated layer.

A checkpointed region is a body, too, so that AOTAutograd marks its traced operations for recomputation in the backward.
This pass puts these marks on the operations. AOTAutograd then copies them, as other metadata, to traced operations.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.dynamo.higher_order_bodies import BodyCall, NestedGraphs, placeholders
from dcompile.passes import PassReport

NESTED = "invoke_subgraph"
CHECKPOINT = "tag_activation_checkpoint"


def inline_nested_regions(gm: GraphModule) -> PassReport:
    """Inline regions of `torch.compiler.nested_compile_region` in a graph and its subgraphs, in place.

    Guarantees: the graph that Dynamo captures without the decorator, except for names.
    """
    count, inlined = 0, set[int]()
    while calls := [call for call in NestedGraphs(gm).calls if _is_of(call, NESTED) and _can_inline(call)]:
        for call in calls:
            _inline(call, again=id(call.bodies[0]) in inlined)
            inlined.add(id(call.bodies[0]))
        NestedGraphs(gm).recompile()
        count += len(calls)
    return PassReport(count)


def inline_checkpoints(gm: GraphModule) -> PassReport:
    """Inline the checkpointed regions of a captured graph, in place, with marks for the partitioner.

    All regions are inlined, or none. None are if one is inside another body, or has a `context_fn`, which decides for
    each operation. AOTAutograd numbers such regions itself, and the partitioner compares numbers of all.
    """
    calls = [call for call in NestedGraphs(gm).calls if _is_of(call, CHECKPOINT)]
    if not all(call.graph is gm and _can_inline(call) and not _is_selective(call) for call in calls):
        return PassReport()
    for number, call in enumerate(calls, 1):
        for node in _inline(call):
            compat.aot.prefer_recompute(node, number)
    if calls:
        gm.recompile()
    return PassReport(len(calls))


def _is_of(call: BodyCall, kind: str) -> bool:
    return getattr(call.node.target, "__name__", "") == kind


def _is_selective(call: BodyCall) -> bool:
    return "_checkpoint_context_fn" in call.bodies[0].meta


def _can_inline(call: BodyCall) -> bool:
    """Are the body's operands known, and are its results nodes, each read through getitem?"""
    if len(call.bodies) != 1 or call.places() is None:
        return False
    results: Any = call.bodies[0].graph.output_node().args[0]
    names = [str(node.target) for node in call.bodies[0].graph.nodes if node.op in ("get_attr", "call_module")]
    apart = all(user.target is operator.getitem and isinstance(user.args[1], int) for user in call.node.users)
    listed = isinstance(results, tuple | list) and all(isinstance(result, Node) for result in results)
    return apart and listed and not any("." in name for name in names)


def _inline(call: BodyCall, again: bool = False) -> list[Node]:
    """Replace a call by copies of its body's operations; return these.

    `again`: whether the body was inlined before, so that its fake values belong to the other copy.
    """
    (body,), graph = call.bodies, call.graph.graph
    results: Any = body.graph.output_node().args[0]
    copies: dict[Node, Any] = {node: call.operand(place) for place, node in enumerate(placeholders(body))}
    parts = [(part, results[part.args[1]]) for part in call.node.users]
    memory = _Memory([*copies.items(), *((result, part) for part, result in parts)], again)
    made = []
    with graph.inserting_before(call.node):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = copy = graph.node_copy(node, copies.__getitem__)
            made.append(copy)
            if node.op in ("get_attr", "call_module"):
                copy.target = _adopt(call.graph, getattr(body, str(node.target)), str(node.target))
            if "example_value" in node.meta:
                copy.meta["example_value"] = memory.of(node.meta["example_value"])
    for part, result in parts:
        part.replace_all_uses_with(copies[result])
        graph.erase_node(part)
    names = [argument for argument in call.node.args if isinstance(argument, Node) and argument.op == "get_attr"]
    graph.erase_node(call.node)
    for name in names:
        if not name.users:
            graph.erase_node(name)
    return made


def _adopt(graph: GraphModule, value: Any, name: str) -> str:
    """Set a body's attribute on the graph, under a free name if need be; return the name."""
    candidates = itertools.chain((name,), (f"{name}_{number}" for number in itertools.count(1)))
    found = next(known for known in candidates if getattr(graph, known, value) is value)
    setattr(graph, found, value)
    return found


class _Memory:
    """Memory of the fake values of an inlined body: views share memory with values outside."""

    def __init__(self, pairs: Iterable[tuple[Node, Any]], again: bool) -> None:
        self._known: dict[int, Any] = {}
        """Key of memory in the body -> memory in the graph."""
        self._stays = not again
        for node, other in pairs:
            inside = node.meta.get("example_value")
            outside = other.meta.get("example_value") if isinstance(other, Node) else None
            if isinstance(inside, torch.Tensor) and isinstance(outside, torch.Tensor):
                key = compat.tensors.storage_key(inside)
                self._known[key] = outside.untyped_storage()
                self._stays &= key == compat.tensors.storage_key(outside)

    def of(self, value: Any) -> Any:
        """Return the fake value in the graph that corresponds to a value of the body."""
        if self._stays:
            return value
        if type(value) in (tuple, list):
            return type(value)(map(self.of, value))
        if not isinstance(value, torch.Tensor) or not compat.tensors.has_storage(value):
            return value
        key = compat.tensors.storage_key(value)
        with compat.tensors.real_tensors():
            if key not in self._known:
                self._known[key] = compat.tensors.fake_memory(value.untyped_storage().nbytes())
            return compat.tensors.fake_like(value, self._known[key]).requires_grad_(value.requires_grad)
