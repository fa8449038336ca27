"""Put regions where they are called: those of `torch.compiler.nested_compile_region`, and checkpointed ones.

TorchDynamo traces a nested region once, however often it is called, and calls its body by an operator. In place of the
operator, the body is a part of the graph as if Dynamo had traced it there: it is optimized with what surrounds it, and
a body that many layers call is a layer that repeats.

A checkpointed region is a body, too, for AOTAutograd to mark what it traces of it as computed again in the backward.
These marks are put on the operations here: AOTAutograd then copies them, as it copies where operations come from.
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
    """Inline what `torch.compiler.nested_compile_region` has made regions of, in a graph and in bodies that it holds.

    Guarantees: the graph that Dynamo captures without the decorator, but for names.
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
    """Inline the checkpointed regions of a captured graph, with marks for the partitioner.

    It is all of them or none: where one is inside another body, or has a `context_fn` that decides operation by
    operation, AOTAutograd numbers them, and the partitioner compares numbers.
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
    """Whether the body's operands are known, and its results are nodes that are taken out one by one."""
    if len(call.bodies) != 1 or call.places() is None:
        return False
    results: Any = call.bodies[0].graph.output_node().args[0]
    names = [str(node.target) for node in call.bodies[0].graph.nodes if node.op in ("get_attr", "call_module")]
    apart = all(user.target is operator.getitem and isinstance(user.args[1], int) for user in call.node.users)
    listed = isinstance(results, tuple | list) and all(isinstance(result, Node) for result in results)
    return apart and listed and not any("." in name for name in names)


def _inline(call: BodyCall, again: bool = False) -> list[Node]:
    """Replace a call by the operations of its body, which are returned. `again`: another copy has the body's values."""
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
    """Where a graph has an attribute of a body that becomes a part of it."""
    candidates = itertools.chain((name,), (f"{name}_{number}" for number in itertools.count(1)))
    found = next(known for known in candidates if getattr(graph, known, value) is value)
    setattr(graph, found, value)
    return found


class _Memory:
    """Memory of a body's values where it becomes a part of a graph: views share theirs with what is outside."""

    def __init__(self, pairs: Iterable[tuple[Node, Any]], again: bool) -> None:
        self._known: dict[int, Any] = {}
        """Memory of a value in the body -> in the graph."""
        self._stays = not again
        for node, other in pairs:
            inside = node.meta.get("example_value")
            outside = other.meta.get("example_value") if isinstance(other, Node) else None
            if isinstance(inside, torch.Tensor) and isinstance(outside, torch.Tensor):
                key = compat.tensors.storage_key(inside)
                self._known[key] = outside.untyped_storage()
                self._stays &= key == compat.tensors.storage_key(outside)

    def of(self, value: Any) -> Any:
        """What stands for a value of the body."""
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
