"""Trace a few of many equal layers, and replicate them for the others: AOTAutograd traces five for any number.

Tracing takes as long for the thirtieth layer as for the first, with the same result. A layer is a sequence of
operations that repeats, each time with its own parameters and with results of the layer before. AOTAutograd gets the
graph with five layers: the first two and the last three. `unfold` then checks that two layers were traced to the same
operations. It inserts the others, in forward and backward, as copies of one layer. Layers that do not repeat exactly
are traced one by one.

In the traced graph each layer has a range of the forward and, in training, one of the backward, in opposite order. The
second and the third layer are compared node by node. They must have the same operations on the same kinds of values,
from the same places relative to the layer. A layer's trace depends only on its operations and inputs. So each layer
that was left out would have the same trace: it is a copy with its own inputs. Its fake values share memory as in the
layer that it is copied from.

The graph may return values of layers, such as hidden states. The gradient of such a value has one summand more: the
tangent, which the caller passes to the backward.

Symbolic sizes belong to no layer: tracing computes each expression once, at its first use. Layers share these nodes.
They precede the copies, because the two compared layers use the same ones.

In order: finding layers in a Dynamo graph, finding and comparing them in the traced graph, and inserting copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dcompile import compat

TRACED_LAYERS = 5
"""Number of traced layers.

The second and the third are compared, and the third is copied. The last layer's backward differs, since it adds no
gradients to those of later layers. So a layer is traced between it and the third.
"""
MIN_LAYERS = 7
"""Minimum number of layers for which it saves time."""
TAG = "dcompile_layer"
"""Key of each operation's annotation, which tracing preserves: (layer among the traced ones, position in the layer)."""
STAND_IN = "dcompile_stand_in"
"""Key of the annotation of operations of `stand_in`."""
PERIODS = (1, 2, 3, 4, 6)
"""Numbers of layers to try as one, since layers of several kinds may alternate."""


@dataclass(frozen=True)
class RepeatedLayers:
    """Repeated layers of a graph: `count` layers of `length` operations each, from operation `begin` on."""

    begin: int
    length: int
    count: int
    inputs: tuple[tuple[int, ...], ...]
    """For each layer the positions of the graph's inputs that only it uses, in the order of use."""
    shown: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each layer the values that the graph returns: (position in the layer, position among the graph's results)."""

    @property
    def traced(self) -> tuple[int, ...]:
        """Numbers of the `TRACED_LAYERS` layers that are traced."""
        return 0, 1, self.count - 3, self.count - 2, self.count - 1

    @property
    def left_out(self) -> range:
        """Numbers of the layers that are not traced."""
        return range(2, self.count - 3)

    def layer_of(self, place: int) -> int:
        """Return the layer of an operation, by its position; below 0 before the first layer, `count` after the last."""
        return min((place - self.begin) // self.length, self.count)


@dataclass(frozen=True)
class LayerArgument:
    """An argument relative to the layer of its user: the difference of layers, and the place in its layer."""

    layers: int
    place: Any


def operations(gm: GraphModule) -> list[Node]:
    """Return a graph's nodes except inputs and results, in order."""
    return [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]


def repeated_layers(gm: GraphModule) -> RepeatedLayers | None:
    """Return the longest repetition in a graph that has at least `MIN_LAYERS` layers, or None."""
    body = operations(gm)
    if any(_is_special(node) for node in gm.graph.nodes):
        return None
    marks = [_operation_hash(node) for node in body]
    for begin, length, count in _stretches(marks):
        for size in PERIODS:
            layers = _check_layers(gm, body, begin, length * size, count // size)
            if layers is not None:
                return layers
    return None


def _is_special(node: Node) -> bool:
    """May equal nodes have different traces? Tensor subclasses, other layouts and operators with subgraphs may."""
    if node.op == "call_module" or compat.dynamo.holds_graphs(node.target):
        return True
    value = node.meta.get("example_value")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(not _is_plain(item) for item in values)


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        plain = (bool, int, float, str, torch.dtype, torch.device, torch.SymInt, torch.SymBool)
        return value is None or isinstance(value, plain)
    return not compat.tensors.is_wrapper(value) and value.layout == torch.strided


def _describe(value: Any) -> str:
    """Return a text of all properties of a value that tracing sees. Symbolic sizes appear as expressions: no guards."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_describe, value))})"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    layout = (value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), value.requires_grad)
    return f"{layout}"


def _operation_hash(node: Node) -> int:
    """Return a hash that is equal for operations that differ only in the nodes that are their arguments."""
    return hash(
        (node.op, node.target, spell_arguments(node, lambda _: None), _describe(node.meta.get("example_value")))
    )


def spell_arguments(node: Node, name: Callable[[Node], object]) -> str:
    """Return the text of a node's arguments, with nodes named by `name`; unlike with `==`, 1 and True differ."""
    return repr(replace_nodes((node.args, node.kwargs), lambda argument: NodeReference(name(argument))))


def replace_nodes(arguments: Any, other: Callable[[Node], Any]) -> Any:
    """Return arguments with each node replaced by `other` of it."""
    return map_arg(arguments, other)


class NodeReference:
    """Placeholder for a node among arguments."""

    def __init__(self, name: object) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name!r}>"


def _stretches(marks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, length, count) of possible repetitions, longest first.

    Candidates for `length` are distances between operations of one of the rarest marks.
    """
    counts = Counter(marks)
    often = [mark for mark in counts if counts[mark] >= MIN_LAYERS]
    if not often:
        return
    rare = min(often, key=counts.__getitem__)
    places = [place for place, mark in enumerate(marks) if mark == rare]
    found = []
    for length in {b - a for a, b in pairwise(places)}:
        begin, end = _longest(marks, length)
        found.append((end - begin, begin, length))
    for size, begin, length in sorted(found, reverse=True):
        yield begin, length, size // length + 1


def _longest(marks: Sequence[int], length: int) -> tuple[int, int]:
    """Return the longest range (begin, end) in which each mark equals the one `length` positions later."""
    best = (0, 0)
    begin = 0
    for place in range(len(marks) - length + 1):
        if place == len(marks) - length or marks[place] != marks[place + length]:
            best = max(best, (begin, place), key=lambda found: found[1] - found[0])
            begin = place + 1
    return best


def _check_layers(gm: GraphModule, body: list[Node], begin: int, length: int, count: int) -> RepeatedLayers | None:
    """Return the layers if they are the same up to their inputs, else None.

    The last one is excluded if operations after the layers read its inner values.
    """
    for fewer in (count, count - 1):
        if fewer < MIN_LAYERS:
            return None
        found = RepeatedLayers(begin, length, fewer, ())
        layer = {node: found.layer_of(place) for place, node in enumerate(body)}
        if _only_the_last_is_used(layer, fewer):
            inputs, shown = _own_inputs(gm, layer, fewer), _shown_values(gm, body, layer, found)
            found = RepeatedLayers(begin, length, fewer, tuple(map(tuple, inputs)), shown)
            if _are_the_same(gm, body, layer, found) and _have_leaves(gm, body, found):
                return found
    return None


def _shown_values(
    gm: GraphModule, body: list[Node], layer: dict[Node, int], layers: RepeatedLayers
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the values of each layer that the graph returns."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(layers.count)]
    place = {node: (number - layers.begin) % layers.length for number, node in enumerate(body)}
    for position, result in enumerate(_graph_results(gm)):
        if isinstance(result, Node) and 0 <= layer.get(result, -1) < layers.count:
            found[layer[result]].append((place[result], position))
    return tuple(map(tuple, found))


def _graph_results(gm: GraphModule) -> Sequence[Any]:
    results: Any = gm.graph.output_node().args[0]
    return results if isinstance(results, tuple | list) else (results,)


def _leaf(gm: GraphModule, layers: RepeatedLayers, layer: int) -> Node | None:
    """Return an input that only this layer uses and that needs a gradient, if there is one."""
    inputs = [gm.graph.find_nodes(op="placeholder")[position] for position in layers.inputs[layer]]
    return next((node for node in inputs if _learns(node)), None)


def _learns(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _have_leaves(gm: GraphModule, body: list[Node], layers: RepeatedLayers) -> bool:
    """Can `stand_in` replace each returned value? One that needs a gradient needs an input that does."""
    for layer, row in enumerate(layers.shown):
        nodes = [body[layers.begin + layer * layers.length + place] for place, _ in row]
        if len({*nodes}) < len(nodes) or not all(isinstance(n.meta.get("example_value"), torch.Tensor) for n in nodes):
            return False
        if any(map(_learns, nodes)) and _leaf(gm, layers, layer) is None:
            return False
    return True


def stand_in(like: torch.Tensor, leaf: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor like `like`, in place of the result of a layer that is not traced.

    AOTAutograd then plans for as many results, and for a gradient of each. `leaf` connects it to autograd.
    """
    made = like.detach().clone()
    return made if leaf is None else made + leaf.sum().to(device=made.device, dtype=made.dtype)


def _only_the_last_is_used(layer: dict[Node, int], count: int) -> bool:
    """Are the values of each layer but the last read only by itself, the next layer and the caller?"""
    inside = ((node, number) for node, number in layer.items() if 0 <= number < count - 1)
    return all(
        user.op == "output" or layer.get(user, count) in (number, number + 1)
        for node, number in inside
        for user in node.users
    )


def _own_inputs(gm: GraphModule, layer: dict[Node, int], count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    positions = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for node, number in layer.items():
        for source in node.all_input_nodes if 0 <= number < count else ():
            alone = source in positions and all(layer.get(user) == number for user in source.users)
            if alone and positions[source] not in found[number]:
                found[number].append(positions[source])
    return found


def _are_the_same(gm: GraphModule, body: list[Node], layer: dict[Node, int], layers: RepeatedLayers) -> bool:
    """Does each layer but the first have the arguments of the layer before it, shifted by one layer?"""
    placeholders = gm.graph.find_nodes(op="placeholder")
    place = {node: (number - layers.begin) % layers.length for number, node in enumerate(body)}
    own = {placeholders[p]: (n, s) for n, row in enumerate(layers.inputs) for s, p in enumerate(row)}

    def texts(number: int) -> list[str]:
        def name(argument: Node) -> object:
            if argument in own:
                return LayerArgument(own[argument][0] - number, ("input", own[argument][1]))
            if 0 <= layer.get(argument, -1) < layers.count:
                return LayerArgument(layer[argument] - number, place[argument])
            return argument.name

        begin = layers.begin + number * layers.length
        return [
            *(_describe(placeholders[p].meta.get("example_value")) for p in layers.inputs[number]),
            *(spell_arguments(node, name) for node in body[begin : begin + layers.length]),
            *_region_changes(body[begin - 1 : begin + layers.length]),
            *(f"shown {place}" for place, _ in layers.shown[number]),
        ]

    first = texts(1)
    return all(texts(number) == first for number in range(2, layers.count))


def _region_changes(nodes: Sequence[Node]) -> list[str]:
    """Return the places among these operations where a checkpointed region begins or ends, or the next one follows."""
    regions = [compat.aot.checkpoint_region(node) for node in nodes]
    changes = [(place, one, other) for place, (one, other) in enumerate(pairwise(regions)) if one != other]
    return [f"{place} {one is None} {other is None}" for place, one, other in changes]


def _stand_ins(
    gm: GraphModule, body: list[Node], layers: RepeatedLayers, graph: Graph, copies: dict[Node, Node]
) -> dict[Node, Node]:
    """Add `stand_in` for each returned value of the layers that are not traced."""
    found = {}
    for layer in layers.left_out:
        for place, _ in layers.shown[layer]:
            shown = body[layers.begin + layer * layers.length + place]
            like = copies[body[layers.begin + (layers.count - 1) * layers.length + place]]
            leaf = _leaf(gm, layers, layer) if _learns(shown) else None
            made = graph.call_function(stand_in, (like, None if leaf is None else copies[leaf]))
            made.meta["custom"] = {TAG: (TRACED_LAYERS, 0), STAND_IN: True}
            found[shown] = made
    return found


def shorten(gm: GraphModule, layers: RepeatedLayers) -> GraphModule:
    """Return a copy of a graph with `TRACED_LAYERS` of its layers, whose operations are tagged, and all inputs."""
    body = operations(gm)
    begin, length = layers.begin, layers.length
    gap = (layers.count - TRACED_LAYERS) * length
    place = {node: number for number, node in enumerate(body)}
    left_out = set(body[begin + 2 * length : begin + 2 * length + gap])
    graph, copies = Graph(), dict[Node, Node]()

    def source(node: Node) -> Node:
        return copies[body[place[node] - gap] if node in left_out else node]

    for node in gm.graph.nodes:
        if node in left_out:
            continue
        if node.op == "output":
            copies |= _stand_ins(gm, body, layers, graph, copies)
            graph.node_copy(node, copies.__getitem__ if any(layers.shown) else source)
            continue
        copies[node] = made = graph.node_copy(node, source)
        if node in place:
            number = place[node] if place[node] < begin + 2 * length else place[node] - gap
            made.meta["custom"] = {**made.meta.get("custom", {}), TAG: divmod(number - begin, length)}
    short = GraphModule(gm, graph)
    short.meta = gm.meta
    return short


# --- values that the graph returns ------------------------------------------------------------------------------------

Place = tuple[str, Any]
"""Place in a layer: ("input" | "tangent", number there), or ("forward" | "backward", one of `_places`)."""


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


# --- memory of copies -------------------------------------------------------------------------------------------------


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


# --- comparing --------------------------------------------------------------------------------------------------------

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
            where |= {node: (layer, (stretch, place)) for node, place in zip(row, _places(row), strict=True)}
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


def _places(row: Sequence[Node]) -> Iterator[tuple[int, int]]:
    """Yield the place of each node: (the layer's operation that was traced to it, number among the nodes of that).

    So a node that only the first layer lacks, as where the model's input needs no gradient, moves few others.
    """
    counts, origin = Counter[int](), -1
    for node in row:
        tag = layer_tag(node)
        origin = origin if tag is None else tag[1]
        yield origin, counts[origin]
        counts[origin] += 1


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
            if _operation_text(one, 1, found) != _operation_text(other, 2, found):
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


def _operation_text(node: Node, layer: int, found: TracedLayers) -> str:
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


# --- inserting --------------------------------------------------------------------------------------------------------

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
                    for node in rows[TEMPLATE_LAYER]:
                        self._copy(node, layer, self.found.where[node][1])
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
