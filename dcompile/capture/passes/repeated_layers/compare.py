"""Find the layers in a traced graph, and compare them: only equal ones may be copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.repeated_layers.copied_values import MemoryOwner, tensors_of
from dcompile.capture.passes.repeated_layers.find import (
    TAG,
    TRACED_LAYERS,
    LayerArgument,
    RepeatedLayers,
    operations,
    spell_arguments,
)
from dcompile.capture.passes.repeated_layers.shown_results import (
    Place,
    layer_of_sum,
    layer_tangents,
    result_outputs,
    shown_places,
)

STRETCHES = ("forward", "backward")


class LayersDiffer(Exception):
    """Equal layers of the captured graph differ in the traced one."""


@dataclass(frozen=True)
class TracedLayers:
    """The layers of a traced graph."""

    stretches: dict[str, list[list[Node]]]
    """Phase ("forward" or "backward") -> nodes of each traced layer."""
    where: dict[Node, tuple[int, Place]]
    """Node or placeholder -> (traced layer, place there)."""
    gradients: tuple[dict[int, object], ...]
    """For each traced layer: number of its input -> its gradient, relative to the layer."""
    positions: dict[int, int]
    """Position among the Dynamo graph's inputs -> of its gradient among the traced graph's outputs."""
    shown: tuple[tuple[Place | None, ...], ...]
    """For each traced layer: place of each value that the graph returns."""
    results: dict[int, int]
    """Position among the Dynamo graph's results -> among the traced graph's outputs."""
    owners: dict[int, MemoryOwner | None]
    """Memory -> the first of the layers' values that is stored there; None for values outside of layers."""

    def seen_from(self, layer: int) -> Callable[[Node], object]:
        """Return the function that names arguments relative to a layer."""

        def name(argument: Node) -> object:
            if argument not in self.where:
                return argument.name
            there, place = self.where[argument]
            return LayerArgument(there - layer, place)

        return name


def find_layers(traced: GraphModule, layers: RepeatedLayers) -> TracedLayers:
    tangents = layer_tangents(traced, layers)
    stretches: dict[str, list[list[Node]]] = {name: [[] for _ in range(TRACED_LAYERS)] for name in STRETCHES}
    for stretch, layer, node in _in_order(traced, {node: layer for node, (layer, _) in tangents.items()}):
        if not compat.sizes.is_symbolic_number(node.meta.get("val")):
            stretches[stretch][layer].append(node)
    where: dict[Node, tuple[int, Place]] = {}
    for stretch, rows in stretches.items():
        for layer, row in enumerate(rows):
            where |= {node: (layer, (stretch, number)) for number, node in enumerate(row)}
    numbers = {p: (k, s) for k, layer in enumerate(layers.traced) for s, p in enumerate(layers.inputs[layer])}
    for node in traced.graph.find_nodes(op="placeholder"):
        position = compat.aot_metadata.input_index(node)
        if position in numbers:
            layer, number = numbers[position]
            where[node] = (layer, ("input", number))
    where |= tangents
    results = result_outputs(traced)
    shown = tuple(shown_places(traced, layers.shown[layer], results, where, k) for k, layer in enumerate(layers.traced))
    found = TracedLayers(stretches, where, tuple({} for _ in range(TRACED_LAYERS)), {}, shown, results, {})
    for node in traced.graph.nodes:
        for number, tensor in enumerate(tensors_of(node.meta.get("val"))):
            owner = MemoryOwner(*where[node], number, tensor.dtype) if node in where else None
            found.owners.setdefault(compat.tensors.storage_key(tensor), owner)
    output: Any = traced.graph.output_node()
    for place, description in enumerate(output.meta.get("desc", ())):
        position = compat.aot_metadata.primal_index(description)
        if position is not None:
            found.positions[position] = place
            gradient = output.args[0][place]
            if position in numbers and gradient is not None:
                layer, number = numbers[position]
                found.gradients[layer][number] = found.seen_from(layer)(gradient)
    return found


def _in_order(traced: GraphModule, tangents: Mapping[Node, int]) -> Iterator[tuple[str, int, Node]]:
    """Yield ("forward" or "backward", layer, node) for the nodes of the traced layers.

    A node without a tag, such as a sum of gradients, belongs to the layer of the node before it. A sum with
    the caller's gradient of a layer's result is the first node of the next layer's backward.
    """
    layer, last = -1, "forward"
    for node in operations(traced):
        stretch = "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
        layer = TRACED_LAYERS if stretch != last else layer
        tag = layer_tag(node)
        if tag is not None:
            before, layer = layer, min(max(tag[0], -1), TRACED_LAYERS)
            if (stretch, last) == STRETCHES or (layer < before if stretch == "forward" else layer > before):
                raise LayersDiffer(f"{node.name} is not in the order of layers")
        elif stretch == "backward":
            layer = layer_of_sum(node, layer, tangents)
        last = stretch
        if 0 <= layer < TRACED_LAYERS:
            yield stretch, layer, node


def layer_tag(node: Node) -> tuple[int, int] | None:
    tag = (node.meta.get("custom") or {}).get(TAG)
    return tuple(tag) if tag is not None else None


def compare_layers(found: TracedLayers) -> None:
    """Check that the second and third layer have equal traces that only neighbours read. Raises LayersDiffer."""
    for stretch, rows in found.stretches.items():
        if len(rows[1]) != len(rows[2]):
            raise LayersDiffer(f"{stretch}s of {len(rows[1])} and {len(rows[2])} operations")
        for one, other in zip(rows[1], rows[2], strict=True):
            if _text(one, 1, found) != _text(other, 2, found):
                raise LayersDiffer(f"{one.name} and {other.name} differ")
            if _changes_something(one):
                raise LayersDiffer(f"{one.name} changes one of its arguments")
    inside = all(isinstance(step, LayerArgument) for step in found.gradients[2].values())
    if found.gradients[1] != found.gradients[2] or not inside:
        raise LayersDiffer("gradients come from other places")
    if found.shown[1] != found.shown[2] or None in found.shown[2]:
        raise LayersDiffer("what they return is computed in other places")
    for node, (layer, _) in found.where.items():
        if layer in (1, 2):
            _check_users(node, layer, found)


def _check_users(node: Node, layer: int, found: TracedLayers) -> None:
    """Check that a node is read only by its layer and neighbours, and returned only as an input's gradient."""
    for user in node.users:
        if user.op == "output":
            results: Any = user.args[0]
            returned = {place for place, result in enumerate(results) if result is node}
            known = returned <= {*found.positions.values(), *found.results.values()}
        else:
            known = user in found.where and abs(found.where[user][0] - layer) <= 1
        if not known:
            raise LayersDiffer(f"{user.name} looks into a layer, at {node.name}")


def _text(node: Node, layer: int, found: TracedLayers) -> str:
    """Return a text of all properties of an operation that must be equal in two layers."""
    tag, value = layer_tag(node), node.meta.get("val")
    memory = [_memory(tensor, layer, found) for tensor in tensors_of(value)]
    shown = (node.target, tag and (tag[0] - layer, tag[1]), _kind(value), memory, node.meta.get("recompute"))
    return f"{shown} {spell_arguments(node, found.seen_from(layer))}"


def _memory(tensor: torch.Tensor, layer: int, found: TracedLayers) -> object:
    """Return the value that owns a tensor's memory, relative to its layer."""
    key = compat.tensors.storage_key(tensor)
    owner = found.owners[key]
    if owner is None:
        return key
    if abs(owner.layer - layer) > 1 or owner.dtype != tensor.dtype:
        raise LayersDiffer("a value lies in memory of a layer further away, or of another type")
    return owner.layer - layer, owner.place, owner.number


def _kind(value: Any) -> object:
    if type(value) in (tuple, list):
        return tuple(map(_kind, value))
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise LayersDiffer("memory is not dense")
        return value.dtype, value.device, value.shape, value.stride(), value.storage_offset()
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    raise LayersDiffer(f"a value is a {type(value).__name__}")


def _changes_something(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
