"""Values of layers that the graph returns, such as hidden states: their outputs and tangents in the traced graph.

The gradient of such a value has one summand more: the tangent, which the caller passes to the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.repeated_layers.find import RepeatedLayers

Place = tuple[str, int]
"""Place in a layer: ("forward" | "backward" | "input" | "tangent", position there)."""


def result_outputs(traced: GraphModule) -> dict[int, int]:
    """Return position among the Dynamo graph's results -> position among the traced graph's outputs."""
    descriptions = traced.graph.output_node().meta.get("desc", ())
    found = {compat.aot_metadata.plain_result(description): place for place, description in enumerate(descriptions)}
    return {position: place for position, place in found.items() if position is not None}


def shown_places(
    traced: GraphModule,
    shown: Sequence[tuple[int, int]],
    results: Mapping[int, int],
    where: Mapping[Node, tuple[int, Place]],
    layer: int,
) -> tuple[Place | None, ...]:
    """Return the places of a traced layer's values that the graph returns; None for a value outside of the layer."""
    outputs: Any = traced.graph.output_node().args[0]
    nodes = [outputs[results[position]] if position in results else None for _, position in shown]
    found = [where.get(node, (-1, None)) if isinstance(node, Node) else (-1, None) for node in nodes]
    return tuple(place if there == layer else None for there, place in found)


def layer_tangents(traced: GraphModule, layers: RepeatedLayers) -> dict[Node, tuple[int, Place]]:
    """Return the tangents of the traced layers' results: placeholder -> (traced layer, place)."""
    places = {p: (k, s) for k, layer in enumerate(layers.traced) for s, (_, p) in enumerate(layers.shown[layer])}
    found = dict[Node, tuple[int, Place]]()
    for node in filter(compat.aot_metadata.is_tangent, traced.graph.find_nodes(op="placeholder")):
        position = compat.aot_metadata.result_index(node)
        if position in places:
            layer, number = places[position]
            found[node] = (layer, ("tangent", number))
    return found


def layer_of_sum(node: Node, layer: int, tangents: Mapping[Node, int]) -> int:
    """Return the layer of a backward node without a tag that follows a node of `layer`."""
    given = [tangents[argument] for argument in node.all_input_nodes if argument in tangents]
    if given:
        return min(layer, max(given) + 1)
    # the first layer's input may be returned, too; its gradient gets the tangent before any other summand
    others = [argument for argument in node.all_input_nodes if argument.op == "placeholder"]
    return 0 if layer == 1 and any(map(compat.aot_metadata.is_tangent, others)) else layer
