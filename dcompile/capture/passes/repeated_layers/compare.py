"""Find the layers in a traced graph, and compare them: only equal ones may be copied.

The graph may return values of layers, such as hidden states. The gradient of such a value has one summand more: the
tangent, which the caller passes to the backward. These outputs and tangents come first. Fake values of the operations
of copied layers follow, which share memory as in the layer that they are copied from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.repeated_layers.find import (
    TAG,
    TRACED_LAYERS,
    LayerArgument,
    RepeatedLayers,
    operations,
    spell_arguments,
)

Place = tuple[str, int]
"""Place in a layer: ("forward" | "backward" | "input" | "tangent", position there)."""


def result_outputs(traced: GraphModule) -> dict[int, int]:
    """Return position among the Dynamo graph's results -> position among the traced graph's outputs."""
    descriptions = traced.graph.output_node().meta.get("desc", ())
    found = {compat.aot_descriptors.plain_result(description): place for place, description in enumerate(descriptions)}
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
    for node in filter(compat.aot_descriptors.is_tangent, traced.graph.find_nodes(op="placeholder")):
        position = compat.aot_descriptors.result_index(node)
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
    return 0 if layer == 1 and any(map(compat.aot_descriptors.is_tangent, others)) else layer


@dataclass(frozen=True)
class MemoryOwner:
    """A value of a layer, which owns memory."""

    layer: int
    """Index among the traced layers."""
    place: Place
    number: int
    """Position among several results of one operation."""
    dtype: torch.dtype


class CopiedValues:
    """Fake values of copied nodes, which share memory with each other as those of the traced layer do."""

    def __init__(
        self,
        owners: Mapping[int, MemoryOwner | None],
        traced: Sequence[int],
        nodes: Mapping[tuple[int, Place], Node],
    ) -> None:
        """`owners`: storages of the traced graph -> who owns them. `traced`: numbers of the layers that were traced.

        `nodes`: (layer, place) -> node, of all layers, as far as they are made.
        """
        self.owners, self.traced, self.nodes = owners, traced, nodes
        self.new: dict[tuple[int, Place, int], Any] = {}
        """(layer, place, position among several results) -> its new memory."""
        self.fills: dict[tuple[Place, int], bool] = {}
        """(place, position among several results) -> whether such a value has all of its memory."""

    def of(self, value: Any, layer: int, place: Place, like: int) -> Any:
        """Return the value in `layer` that corresponds to the value at this place of the traced layer `like`."""
        if isinstance(value, tuple | list):
            items = [self._tensor(item, layer, place, like, number) for number, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return self._tensor(value, layer, place, like, 0)

    def _tensor(self, tensor: Any, layer: int, place: Place, like: int, number: int) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        owner = self.owners[compat.tensors.storage_key(tensor)]
        if owner is None:
            return tensor
        there = layer + owner.layer - like
        if self.traced[owner.layer] == there:
            return tensor  # it has the right memory already
        if (there, owner.place, owner.number) == (layer, place, number):
            return self._owner(tensor, layer, place, number)
        return compat.tensors.fake_like(tensor, self._memory(there, owner.place, owner.number))

    def _owner(self, tensor: Any, layer: int, place: Place, number: int) -> Any:
        """Return a tensor in memory of its own. With symbolic sizes it takes a third of the time if it fills that."""
        known = self.fills.get((place, number))
        if known is not False:
            made = compat.tensors.fake_like(tensor, None)
            if known is None:
                ours, theirs = made.untyped_storage().nbytes(), tensor.untyped_storage().nbytes()
                known = self.fills[place, number] = str((tensor.storage_offset(), ours)) == str((0, theirs))
            if known:
                self.new[layer, place, number] = made.untyped_storage()
                return made
        memory = self.new[layer, place, number] = compat.tensors.fake_memory(tensor.untyped_storage().nbytes())
        return compat.tensors.fake_like(tensor, memory)

    def _memory(self, layer: int, place: Place, number: int) -> Any:
        if (layer, place, number) in self.new:
            return self.new[layer, place, number]
        return list(tensors_of(self.nodes[layer, place].meta["val"]))[number].untyped_storage()


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors of a value, which may be several results."""
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, torch.Tensor) and item.layout == torch.strided:
            yield item


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
        position = compat.aot_descriptors.input_index(node)
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
        position = compat.aot_descriptors.primal_index(description)
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
