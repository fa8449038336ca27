"""Functionalize in-place changes of constant tensors that a graph makes itself.

`mask = full(...); mask.masked_fill_(hidden, 0)` is a common way to make masks. Later readers of the tensor get the
result of the functional operation, as under AOTAutograd. So passes on the captured graph can analyse the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.capture.passes.dynamo.symbolic_elements.elements import value_of

_AS_NEW = {"masked_fill_": "masked_fill", "triu_": "triu", "tril_": "tril", "logical_not_": "logical_not"}
"""In-place method -> its functional form, for methods whose result has the tensor's dtype."""
_FILLS = {"fill_": torch.full_like, "zero_": torch.zeros_like}


def change_constants_anew(nest: NestedGraphs, makes: Iterable[str]) -> int:
    """Functionalize such changes in all graphs; return their number. `makes`: names of functions that make constants.

    A tensor's changes stay if another view of its memory exists before the last one.
    """
    makers, count = frozenset(makes), 0
    memory = _by_memory(nest)
    for graph in nest.graphs:
        for node in list(graph.graph.nodes):
            if (
                node.op == "call_function"
                and getattr(node.target, "__name__", "") in makers
                and "out" not in node.kwargs
            ):
                count += _rewritten(node, memory.get(_memory_of(node), []))
    return count


def _by_memory(nest: NestedGraphs) -> dict[Any, list[Node]]:
    """Return memory -> nodes of all graphs whose values are stored there, in order."""
    found: dict[Any, list[Node]] = {}
    for node in nest.nodes():
        if (key := _memory_of(node)) is not None:
            found.setdefault(key, []).append(node)
    return found


def _memory_of(node: Node) -> Any:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not compat.tensors.has_storage(value):
        return None
    return compat.tensors.storage_key(value)


def _rewritten(made: Node, sharing: list[Node]) -> int:
    """Functionalize the changes of one tensor; return their number."""
    changes = [node for node in sharing if _is_change(node)]
    if not changes or any(node.graph is not made.graph for node in changes):
        return 0
    order = {node: place for place, node in enumerate(made.graph.nodes)}
    last = order[changes[-1]]
    own = {made, *changes}
    before = [node for node in sharing if node.graph is made.graph and order[node] < last and node not in own]
    bodies = [user for node in own for user in node.users if compat.dynamo.holds_graphs(user.target)]
    if before or any(node.args[0] not in own for node in changes) or any(order[call] < last for call in bodies):
        return 0
    for change in changes:
        newest = [node for node in own if order[node] < order[change]]
        for node in newest:
            for user in list(node.users):
                if user in order and order[user] > order[change]:
                    user.replace_input_with(node, change)
        _write_anew(change)
    return len(changes)


def _is_change(node: Node) -> bool:
    return node.op == "call_method" and (node.target in _AS_NEW or node.target in _FILLS)


def _write_anew(change: Node) -> None:
    if change.target in _AS_NEW:
        change.target = _AS_NEW[str(change.target)]
        return
    function: Any = _FILLS[str(change.target)]
    change.op, change.target = "call_function", function
