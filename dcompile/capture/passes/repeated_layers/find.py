"""Find repeated layers in a Dynamo graph: AOTAutograd traces five of them for any number of layers.

Tracing takes as long for the thirtieth layer as for the first, with the same result. A layer is a sequence of
operations that repeats, each time with its own parameters and with results of the layer before. AOTAutograd gets the
graph with five layers: the first two and the last three. `unfold` then checks that two layers were traced to the same
operations. It inserts the others, in forward and backward, as copies of one layer. Layers that do not repeat exactly
are not found here, and are traced one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    for position, result in enumerate(_results(gm)):
        if isinstance(result, Node) and 0 <= layer.get(result, -1) < layers.count:
            found[layer[result]].append((place[result], position))
    return tuple(map(tuple, found))


def _results(gm: GraphModule) -> Sequence[Any]:
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
