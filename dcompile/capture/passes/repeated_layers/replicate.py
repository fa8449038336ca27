"""Insert the layers that `find.py` left out of tracing into the traced graph, if those that were traced are equal.

In the traced graph each layer has a range of the forward and, in training, one of the backward, in opposite order. The
second and the third layer are compared node by node. They must have the same operations on the same kinds of values,
from the same places relative to the layer. A layer's trace depends only on its operations and inputs. So each layer
that was left out would have the same trace: it is a copy with its own inputs. Its fake values share memory as in the
layer that it is copied from.

The graph may return values of layers, such as hidden states. The gradient of such a value has one summand more: the
tangent, which the caller passes to the backward. These outputs and tangents come first.

Symbolic sizes belong to no layer: tracing computes each expression once, at its first use. Layers share these nodes.
They precede the copies, because the two compared layers use the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.repeated_layers.find import (
    STAND_IN,
    TAG,
    TRACED_LAYERS,
    LayerArgument,
    RepeatedLayers,
    operations,
    replace_nodes,
    spell_arguments,
)

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


TEMPLATE_LAYER = 2
"""Index of the traced layer that is copied."""


def unfold(traced: GraphModule, gm: GraphModule, layers: RepeatedLayers) -> None:
    """Complete the trace of `shorten(gm, layers)`, in place. Raises LayersDiffer before it has changed anything.

    Guarantees: the graph that tracing `gm` gives, except for names. Relies on: no pass has changed the trace yet.
    """
    found = find_layers(traced, layers)
    compare_layers(found)
    with compat.tensors.real_tensors(), compat.sizes.adding_no_guards(traced):
        _Copies(traced, gm, layers, found).make()
    for node in traced.graph.nodes:
        _drop_tag(node)
    traced.recompile()


def check_inputs(layers: RepeatedLayers) -> None:
    """Raise LayersDiffer, inside a compiler of AOTAutograd, if layers return their inputs or views, or change inputs.

    A change of shape counts, too. AOTAutograd handles such inputs outside the graph, and knows only the traced layers.
    """
    changed = compat.aot_metadata.not_only_read()
    if any(not changed.isdisjoint(layers.inputs[layer]) for layer in layers.traced[1:3]):
        raise LayersDiffer("a layer changes or returns an input")
    kinds = compat.aot_metadata.result_kinds()
    positions = [[position for _, position in layers.shown[layer]] for layer in (layers.traced[2], *layers.left_out)]
    if any([kinds[p] for p in row] != [kinds[p] for p in positions[0]] for row in positions[1:]):
        raise LayersDiffer("a layer returns a view, or what has no gradient")


def _drop_tag(node: Node) -> None:
    custom = node.meta.get("custom")
    if not custom or TAG not in custom:
        return
    rest = {name: value for name, value in custom.items() if name != TAG}
    node.meta |= {"custom": rest}
    if not rest:
        del node.meta["custom"]


class _Copies:
    """Copies of the third traced layer for the layers that were left out."""

    def __init__(self, traced: GraphModule, gm: GraphModule, layers: RepeatedLayers, found: TracedLayers) -> None:
        self.traced = traced
        self.layers = layers
        self.found = found
        self.body = operations(gm)
        self.left_out = layers.left_out
        self.nodes: dict[tuple[int, Place], Node] = {}
        """(layer of the whole model, place in it) -> node."""
        for node, (layer, place) in found.where.items():
            self.nodes[layers.traced[layer], place] = node
        for node in traced.graph.find_nodes(op="placeholder"):
            position = compat.aot_metadata.input_index(node)
            for layer, row in enumerate(layers.inputs):
                if position in row:
                    self.nodes[layer, ("input", row.index(position))] = node
        for node in filter(compat.aot_metadata.is_tangent, traced.graph.find_nodes(op="placeholder")):
            position = compat.aot_metadata.result_index(node)
            for layer, shown in enumerate(layers.shown):
                for number, (_, its) in enumerate(shown):
                    if position == its:
                        self.nodes[layer, ("tangent", number)] = node
        self.values = CopiedValues(found.owners, layers.traced, self.nodes)

    def make(self) -> None:
        for stretch, order in (("forward", self.left_out), ("backward", reversed(self.left_out))):
            rows = self.found.stretches[stretch]
            before = (rows[2] if stretch == "forward" else rows[1])[:1]
            for layer in order if before else ():
                with self.traced.graph.inserting_before(before[0]):
                    for number, node in enumerate(rows[TEMPLATE_LAYER]):
                        self._copy(node, layer, (stretch, number))
        for layer, neighbour in ((1, 2), (2, 1)):  # in the trace they are neighbours
            for stretch in STRETCHES:
                for node in self.found.stretches[stretch][layer]:
                    self._turn(node, layer, neighbour)
        self._return_results()
        self._number_regions()

    def _argument(self, argument: Node, layer: int) -> Node:
        """Return the argument of a layer's copy in place of the third traced layer's `argument`."""
        if argument not in self.found.where:
            return argument
        there, place = self.found.where[argument]
        return self.nodes[layer + there - TEMPLATE_LAYER, place]

    def _copy(self, node: Node, layer: int, place: Place) -> None:
        args = replace_nodes(node.args, lambda argument: self._argument(argument, layer))
        kwargs = replace_nodes(node.kwargs, lambda argument: self._argument(argument, layer))
        made = self.traced.graph.create_node(node.op, node.target, args, kwargs)
        self.nodes[layer, place] = made
        made.meta = {**node.meta, **self._origin(node, layer)}
        if "val" in node.meta:
            made.meta["val"] = self.values.of(node.meta["val"], layer, place, like=TEMPLATE_LAYER)

    def _origin(self, node: Node, layer: int) -> dict[str, Any]:
        """Return the metadata of a copy's origin: the model's source lines and the path of the module."""
        tag = layer_tag(node)
        if tag is None:
            return {}
        place = (layer + tag[0] - TEMPLATE_LAYER) * self.layers.length + tag[1]
        origin = self.body[self.layers.begin + place].meta
        found = {name: origin[name] for name in ("stack_trace",) if name in origin and name in node.meta}
        for name in ("nn_module_stack", "source_fn_stack"):
            found |= {key: origin[name] for key in (name, f"fwd_{name}") if key in node.meta and name in origin}
        return found

    def _turn(self, node: Node, layer: int, neighbour: int) -> None:
        """Replace a node's arguments from the neighbour in the trace by those of its inserted neighbour."""
        number = self.layers.traced[layer]

        def other(argument: Node) -> Node:
            there, place = self.found.where.get(argument, (layer, ("", 0)))
            return self.nodes[number + neighbour - layer, place] if there == neighbour else argument

        node.args, node.kwargs = replace_nodes(node.args, other), replace_nodes(node.kwargs, other)
        if "val" in node.meta:
            node.meta["val"] = self.values.of(node.meta["val"], number, self.found.where[node][1], like=layer)

    def _number_regions(self) -> None:
        """Renumber checkpointed regions in their order, since copies have the numbers of the copied layer.

        The partitioner saves values that a region reads from another one with a lower number.
        """
        layers = {node: layer for (layer, _), node in self.nodes.items()}
        known: dict[tuple[int | None, int], int] = {}
        for node in self.traced.graph.nodes:
            if (region := compat.aot.checkpoint_region(node)) is not None:
                number = known.setdefault((layers.get(node), region), len(known) + 1)
                compat.aot.number_region(node, number)

    def _return_results(self) -> None:
        """Return gradients and values of the copies, and erase `stand_in`."""
        output: Any = self.traced.graph.output_node()
        results = list(output.args[0])
        for layer in self.left_out:
            for number, step in self.found.gradients[TEMPLATE_LAYER].items():
                assert isinstance(step, LayerArgument), "gradients of inputs of a layer are computed in layers"
                position = self.found.positions[self.layers.inputs[layer][number]]
                results[position] = self.nodes[layer + step.layers, step.place]
            for (_, position), shown in zip(self.layers.shown[layer], self.found.shown[TEMPLATE_LAYER], strict=True):
                assert shown is not None, "compared before"
                results[self.found.results[position]] = self.nodes[layer, shown]
        output.args = (type(output.args[0])(results),)
        for node in reversed(list(self.traced.graph.nodes)):
            if STAND_IN in (node.meta.get("custom") or {}) and not node.users:
                self.traced.graph.erase_node(node)
