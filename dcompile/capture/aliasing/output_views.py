"""Results of a forward that are views of computed values: separate tensors that share one version counter.

Autograd raises an error if a view that was made inside a function is changed in place. So AOTAutograd returns such a
result as a separate tensor (`aten._unsafe_view`) with its own version counter. Saved tensors in the same memory keep
the old counter. A caller who changes logits in place before the backward then gets wrong gradients without an error.
Here saved tensors become views of the result itself, so that autograd detects the change and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.passes import OutputStep
from dcompile.results.result_steps import DtypeViews


def memory_of(node: Any) -> int | None:
    """Return a key of the storage of a node's value, equal for values that share memory; None if it has no storage."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return compat.tensors.storage_key(value)


def saved_in_same_memory(gm: Any, places: Sequence[int], count: int) -> dict[int, tuple[int, ...]]:
    """Return position of a result -> positions of saved tensors in the same memory.

    `places`: positions among a forward's first `count` outputs, which are its results.
    """
    outputs = gm.graph.output_node().args[0]
    saved = [(place, memory_of(outputs[place])) for place in range(count, len(outputs))]
    found = {}
    for place in places:
        memory = memory_of(outputs[place])
        found[place] = tuple(other for other, its in saved if memory is not None and its == memory)
    return found


def results_to_detach(gm: Any, constant: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Return positions of `constant` results, which have no gradient, that share memory with a result that has one.

    A program returns one tensor for `h.detach()` and `h`, and a view of `h` for `h[0].detach()`. Autograd, which marks
    such results as not differentiable, would mark `h` as well, or let the view inherit its base's gradient. A node that
    the graph returns several times is one tensor, so its positions form one tuple.
    """
    nodes = gm.graph.output_node().args[0][:count]
    memories = [memory_of(node) for node in nodes]
    learning = {memory for n, memory in enumerate(memories) if n not in constant}
    places: dict[Any, list[int]] = {}
    for n in constant:
        if memories[n] is not None and (memories[n] in learning or nodes.count(nodes[n]) > 1):
            places.setdefault(nodes[n], []).append(n)
    return tuple(map(tuple, places.values()))


def saved_input_views(gm: Any, count: int) -> tuple[int, ...]:
    """Return positions, after a forward's `count` results, of saved views of an input, except the input itself.

    In a program, a view of a whole input with the same strides is the input itself. By the backward, that may have
    another `.data`, which eager's view does not follow.
    """
    inputs = {memory_of(node) for node in gm.graph.find_nodes(op="placeholder")} - {None}
    saved = enumerate(gm.graph.output_node().args[0][count:], count)
    return tuple(n for n, node in saved if memory_of(node) in inputs and node.op != "placeholder")


def remove_dtype_views(gm: Any, count: int) -> tuple[tuple[int, int, DtypeViews], ...]:
    """Remove results that are views of another result as another dtype: (position, position of the other, views).

    The graph then returns the other result there, and its caller applies the views. A program's memory has one dtype,
    and a copy would not change with its source.
    """
    output = gm.graph.output_node()
    results = list(output.args[0])
    places = {node: place for place, node in reversed([*enumerate(results[:count])])}
    found, unread = [], set[Any]()
    for place, node in enumerate(results[:count]):
        base, looks = node, list[Any]()
        while _is_plain_look(base) and (base is node or base not in places):
            looks.append(base)
            base = base.args[0]
        if base in places and any(look.target is torch.ops.aten.view.dtype for look in looks):
            found.append((place, places[base], tuple((x.target, x.args[1:], x.kwargs) for x in reversed(looks))))
            results[place] = base
            unread.update(looks)
    output.args = (tuple(results),)
    for node in reversed(gm.graph.nodes):
        if node in unread and not node.users:
            gm.graph.erase_node(node)
    return tuple(found)


def _is_plain_look(node: Any) -> bool:
    """Is a node a view of one tensor, without symbolic numbers among its arguments?"""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return False  # a graph may return numbers, too
    return getattr(node.target, "is_view", False) and len(node.all_input_nodes) == 1


def results_to_separate(gm: Any) -> tuple[tuple[int, int, bool], ...]:
    """Return (position, earlier position, is a view) of two results that may be one tensor in a program.

    In a program, a view of a whole result with the same strides is the result itself: `return h, h.view_as(h)`. In
    eager mode the view has a base. AOTAutograd needs it if a later graph changes one and returns a view of the other.
    `h.detach()` has no base.
    """
    nodes = gm.graph.output_node().args[0]
    earlier: dict[int, list[int]] = {}
    apart = []
    for place, memory in enumerate(map(memory_of, nodes)):
        if memory is not None:
            others = earlier.setdefault(memory, [])
            apart += [(place, other) for other in others if nodes[place] is not nodes[other]]
            others.append(place)
    return tuple((n, m, not (_is_detached(nodes[n]) or _is_detached(nodes[m]))) for n, m in apart)


def constant_results_to_separate(gm: Any, constant: Sequence[int]) -> tuple[tuple[int, int, bool], ...]:
    """Return the same for a forward's `constant` results, which are views of each other, not of one with gradient."""
    pairs = results_to_separate(gm) if constant else ()
    return tuple(pair for pair in pairs if pair[0] in constant and pair[1] in constant)


def _is_detached(node: Any) -> bool:
    """Does a chain of views contain `detach`?"""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        if node.target is torch.ops.aten.detach.default:
            return True
        node = node.args[0]
    return False


def repeated_results(gm: Any) -> tuple[tuple[int, int], ...]:
    """Return (position, first position) of nodes that a graph returns several times; in eager mode they are one tensor.

    A program makes a new view of memory for each position. A graph after a graph break would then have two overlapping
    inputs instead of one, and AOTAutograd refuses to change such inputs through `as_strided`.
    """
    first: dict[Any, int] = {}
    nodes = enumerate(gm.graph.output_node().args[0])
    found = [(place, first.setdefault(node, place)) for place, node in nodes if isinstance(node, torch.fx.Node)]
    return tuple((place, earlier) for place, earlier in found if place != earlier)


def results_without_gradients(gm: Any, learning: Collection[int]) -> tuple[int, ...]:
    """Return positions of a Dynamo graph's `learning` results that are views made under `torch.no_grad()`.

    In eager mode such a view is a leaf, and its gradients do not reach its base. Examples are the prototypes of a head,
    or a target that is a part of an input. AOTAutograd recreates such views outside of the graph, with gradients.
    Inputs are excluded: an input may be a leaf and a view, too, and `x.to(x.dtype)` returns the input itself.
    """
    inputs = {id(node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder")}
    found = []
    for place, node in enumerate(gm.graph.output_node().args[0]):
        value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.Tensor) and id(value) not in inputs and value._is_view() and value.is_leaf:
            found.append(place)
    return tuple(place for place in found if place in learning)


def view_without_gradients(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Return `compiled` with the results at these positions made views under `torch.no_grad()`."""
    if not places:
        return compiled

    def seeing(*args: Any) -> list[Any]:
        results = list(compiled(*args))
        with torch.no_grad():
            for place in places:
                results[place] = results[place].view_as(results[place])
        return results

    return seeing


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """Facts from AOTAutograd about a graph's results, by position."""

    count: int
    """Number of results; a forward's saved values follow them."""
    views: Sequence[int] = ()
    """A forward's results that are views of computed values."""
    constant: Sequence[int] = ()
    """A forward's results without gradients."""


def plan_outputs(
    rows: Sequence[OutputStep], gm: Any, request: OutputRequest, stage: str
) -> tuple[tuple[Callable[[list[Any], Any], None], Any], ...]:
    """Return (function, its plan) of all rows that change results of this graph, in order of execution.

    Plans that rewrite the graph are made after all others.
    """
    wanted = [row for row in rows if stage in row.stages]
    plans = {id(row): row.plan(gm, request) for row in sorted(wanted, key=lambda row: row.rewrites)}
    return tuple((row.run, plans[id(row)]) for row in wanted if plans[id(row)])
