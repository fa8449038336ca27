"""Absent gradients: results without users have none in autograd, and a backward needs no zeros for them.

A model that returns its loss and its logits gets only a gradient of the loss. By default, autograd makes zeros for the
other gradient, as large as the logits, and the backward computes with them. It can pass None instead. The program for
such a backward has a constant in that place. Results that depend only on absent gradients are absent, too. In eager
mode, a parameter of a layer with an unused output gets no gradient at all.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Container, Iterable
from typing import Any

import torch

from dcompile import compat


def can_be_absent(joint: Any, alone: bool) -> bool:
    """Can backwards of this joint graph get None for some gradients?

    A graph with one gradient qualifies only if other graphs may follow it: `alone`, a backward without gradients does
    not run. The zeros in place of each gradient must follow from the graph. With symbolic sizes, they must follow from
    the result whose gradient it is.
    """
    nodes = [node for node in joint.graph.find_nodes(op="placeholder") if compat.aot_metadata.is_tangent(node)]
    return len(nodes) > alone and all(map(_is_plain, nodes)) and compat.aot.takes_absent_tangents()


def _is_plain(node: Any) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    if compat.aot_metadata.is_part_of_subclass(node):
        return False  # AOTAutograd splits a subclass into its tensors, which None lacks
    if compat.sizes.is_fixed(value):
        return True
    return compat.aot_metadata.result_index(node) is not None and compat.sizes.is_known_contiguous(value)


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return a dense tensor's dimensions in the order of memory, outermost first; None if it has gaps or overlaps."""
    if value.is_contiguous():
        return tuple(range(value.ndim))
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim))
    return tuple(order) if value.permute(order).is_contiguous() else None


def fixed_size_tangents(backward: Any, places: Iterable[int]) -> frozenset[int]:
    """Return those of these gradients with fixed sizes and dense memory: programs can use constants in their place."""
    inputs = backward.graph.find_nodes(op="placeholder")
    values = {place: inputs[place].meta["val"] for place in places}
    return frozenset(n for n, value in values.items() if compat.sizes.is_fixed(value) and _order(value) is not None)


def shapes_of(backward: Any, places: Iterable[int]) -> tuple[int, ...]:
    """Return positions of results whose shapes each call must save: those whose gradients have symbolic sizes."""
    inputs = backward.graph.find_nodes(op="placeholder")
    symbolic = (inputs[place] for place in places if not compat.sizes.is_fixed(inputs[place].meta["val"]))
    found = (compat.aot_metadata.result_index(node) for node in symbolic)
    return tuple(index for index in found if index is not None)


def tangents(backward: Any) -> tuple[int, ...]:
    """Return the positions, among a backward's inputs, of gradients that autograd passes."""
    inputs = backward.graph.find_nodes(op="placeholder")
    found = enumerate(inputs)
    return tuple(
        n for n, node in found if compat.aot_metadata.is_tangent(node) and isinstance(node.meta["val"], torch.Tensor)
    )


def unlikely(backward: Any) -> tuple[int, ...]:
    """Return the positions of gradients that are probably absent: all others if the first one is that of a loss.

    A training step uses only the loss; other results are for inspection. The loss is a result without dimensions.
    """
    first, *others = tangents(backward)
    value = backward.graph.find_nodes(op="placeholder")[first].meta["val"]
    return tuple(sorted(fixed_size_tangents(backward, others))) if value.ndim == 0 else ()


def without(backward: Any, places: Iterable[int], kept: Container[int] = ()) -> Any:
    """Return a copy of the backward with constant zeros in place of these inputs; without any, the backward itself.

    Results of fixed size that depend only on zeros are None, except those at `kept`; dead nodes are removed.
    Guarantees: the values of `backward` on zeros. Relies on: `can_be_absent` of its joint graph, and that the inputs
    are among `fixed_size_tangents`.
    """
    absent = frozenset(places)
    if not absent:
        return backward
    graph, copies = torch.fx.Graph(), dict[Any, Any]()
    inputs = {node: place for place, node in enumerate(backward.graph.find_nodes(op="placeholder"))}
    results = backward.graph.output_node().args[0]
    gone = {
        n for n in absent_results(backward, absent) if n not in kept and compat.sizes.is_fixed(results[n].meta["val"])
    }
    for node in backward.graph.nodes:
        if inputs.get(node) in absent:
            copies[node] = _zeros(graph, node.meta["val"])
        elif node.op == "output":
            left = [None if place in gone else result for place, result in enumerate(results)]
            graph.output(torch.fx.map_arg(left, copies.__getitem__)).meta = dict(node.meta)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.eliminate_dead_code()
    return compat.aot.lazy_graph_module(backward, graph)


def _zeros(graph: Any, value: torch.Tensor) -> Any:
    """Add zeros with a gradient's strides to a graph."""
    order = _order(value)
    assert order is not None, "only what is dense can be absent"
    laid = value.permute(order)
    keywords = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    zeros = graph.call_function(torch.ops.aten.full.default, (list(laid.shape), 0), keywords)
    zeros.meta["val"] = laid
    if order == tuple(range(value.ndim)):
        return zeros
    back = [order.index(dim) for dim in range(value.ndim)]
    looked = graph.call_function(torch.ops.aten.permute.default, (zeros, back))
    looked.meta["val"] = value
    return looked


def absent_results(backward: Any, places: Iterable[int]) -> tuple[int, ...]:
    """Return the positions of a backward's results that depend only on these of its gradients, and on no other."""
    absent = frozenset(places)
    inputs = {node: place for place, node in enumerate(backward.graph.find_nodes(op="placeholder"))}
    given: dict[Any, frozenset[bool]] = {}
    for node in backward.graph.nodes:
        if node in inputs:
            given[node] = frozenset((inputs[node] in absent,)) if compat.aot_metadata.is_tangent(node) else frozenset()
        elif isinstance(node.meta.get("val"), torch.SymInt):
            given[node] = frozenset()  # sizes of an absent gradient are those of a result
        elif node.op != "output":
            given[node] = frozenset().union(*(given[source] for source in node.all_input_nodes))
    results = enumerate(backward.graph.output_node().args[0])
    return tuple(place for place, node in results if given.get(node) == frozenset((True,)))


def unsure(backward: Any, places: Iterable[int]) -> tuple[int, ...]:
    """Return those of these result positions that are absent if only some of the backward's gradients are present.

    This depends only on the graph's structure, which is the same on ranks with other sizes.
    """
    places, given, every = tuple(places), dict[Any, int](), 0
    if not places:
        return ()
    for node in backward.graph.nodes:
        if compat.aot_metadata.is_tangent(node):
            given[node] = 1 << every.bit_length()
            every |= given[node]
        elif node.op != "output" and not isinstance(node.meta.get("val"), torch.SymInt):
            sources = (given.get(source, 0) for source in node.all_input_nodes)
            given[node] = functools.reduce(operator.or_, sources, 0)
    results = backward.graph.output_node().args[0]
    return tuple(place for place in places if given.get(results[place], 0) != every)


def zeros_for(backward: Any, place: int) -> torch.Tensor:
    """Make the zeros that autograd would pass for an absent gradient, in the backward of that call."""
    node = backward.graph.find_nodes(op="placeholder")[place]
    value = node.meta["val"]
    index = compat.aot_metadata.result_index(node)
    if compat.sizes.is_fixed(value) or index is None:
        return _zeros_like(value)
    return torch.zeros(compat.aot.absent_shapes()[index], dtype=value.dtype, device=value.device)


def zeros_of(backward: Any, place: int) -> torch.Tensor:
    """Make the result at this position if it depends only on zeros; its size must be fixed."""
    return _zeros_like(backward.graph.output_node().args[0][place].meta["val"])


def _zeros_like(value: torch.Tensor) -> torch.Tensor:
    """Make real zeros with the shape and strides of a fake tensor."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()


def take_out(args: list[Any], places: Iterable[int]) -> None:
    """Remove these arguments from a call's argument list, in place."""
    for place in sorted(places, reverse=True):
        del args[place]
