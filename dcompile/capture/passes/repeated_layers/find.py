"""Layers that repeat in a Dynamo graph: AOTAutograd traces five of them, however many there are.

Tracing takes as long for the thirtieth layer as for the first, and finds the same again. So a graph in which a stretch
of operations repeats, each time on parameters of its own and on what the time before computed, is handed to AOTAutograd
with all but five layers left out: the first two and the last three. `unfold` then puts the others between them, in
forward and backward, as copies of one, after it has seen that two of those were traced to the same. Whatever
does not repeat exactly is not found here, and traced as it is.
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
"""Layers that are traced. The second and the third are compared; the backward of the last adds no gradients to those of
layers behind it, so one lies between them."""
MIN_LAYERS = 7
"""Layers from which on it is worth while."""
TAG = "dcompile_layer"
"""Name of what is noted with each operation, and follows it through tracing: (layer among the traced ones, place)."""
STAND_IN = "dcompile_stand_in"
"""Name of what is noted with the operations of `stand_in`."""
PERIODS = (1, 2, 3, 4, 6)
"""Layers of several kinds may take turns: so many of them are then one."""


@dataclass(frozen=True)
class RepeatedLayers:
    """Where a graph repeats: `count` stretches of `length` operations, from the `begin`-th on."""

    begin: int
    length: int
    count: int
    inputs: tuple[tuple[int, ...], ...]
    """For each layer: positions of the graph's inputs that it alone uses, in the order in which it does."""
    shown: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each layer: (place in the layer, position among the graph's results) of the values that the graph returns."""

    @property
    def traced(self) -> tuple[int, ...]:
        """The layers that are traced: KEPT of them."""
        return 0, 1, self.count - 3, self.count - 2, self.count - 1

    @property
    def left_out(self) -> range:
        """The other layers."""
        return range(2, self.count - 3)

    def layer_of(self, place: int) -> int:
        """The layer that an operation is in, by its place among all; below 0 before the first, `count` behind."""
        return min((place - self.begin) // self.length, self.count)


@dataclass(frozen=True)
class LayerArgument:
    """An argument as seen from its layer: how many layers further on it is, and where in there."""

    layers: int
    place: Any


def operations(gm: GraphModule) -> list[Node]:
    """What a graph does, in order: its nodes without inputs and results."""
    return [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]


def repeated_layers(gm: GraphModule) -> RepeatedLayers | None:
    """The longest stretch of a graph that repeats, if it has MIN_LAYERS layers."""
    body = operations(gm)
    if any(_is_special(node) for node in gm.graph.nodes):
        return None
    marks = [_mark(node) for node in body]
    for begin, length, count in _stretches(marks):
        for size in PERIODS:
            layers = _check_layers(gm, body, begin, length * size, count // size)
            if layers is not None:
                return layers
    return None


def _is_special(node: Node) -> bool:
    """What is not known to be the same each time: subclasses, memory that is not dense, operations that hold graphs."""
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


def _looks(value: Any) -> str:
    """All that tracing sees of a value. Symbolic sizes read as their expressions, which adds no guard."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(_looks, value))})"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    layout = (value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), value.requires_grad)
    return f"{layout}"


def _mark(node: Node) -> int:
    """A number that operations share which differ at most in whose results they take."""
    return hash((node.op, node.target, spell_arguments(node, lambda _: None), _looks(node.meta.get("example_value"))))


def spell_arguments(node: Node, name: Callable[[Node], object]) -> str:
    """The arguments of a node, with those that are nodes called as `name` says; 1 and True are not the same here."""
    return repr(replace_nodes((node.args, node.kwargs), lambda argument: NodeReference(name(argument))))


def replace_nodes(arguments: Any, other: Callable[[Node], Any]) -> Any:
    """Arguments with something else in place of each node."""
    return map_arg(arguments, other)


class NodeReference:
    """Stands for a node among arguments."""

    def __init__(self, name: object) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name!r}>"


def _stretches(marks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(begin, length, count) of what seems to repeat, longest first, at the distances of one of the rarest marks."""
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
    """The longest stretch in which each mark is that of the place `length` further on."""
    best = (0, 0)
    begin = 0
    for place in range(len(marks) - length + 1):
        if place == len(marks) - length or marks[place] != marks[place + length]:
            best = max(best, (begin, place), key=lambda found: found[1] - found[0])
            begin = place + 1
    return best


def _check_layers(gm: GraphModule, body: list[Node], begin: int, length: int, count: int) -> RepeatedLayers | None:
    """The layers, if they are the same up to their inputs; without the last where others than its own look inside."""
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
    """What the graph returns of each layer."""
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
    """An input that a layer alone uses and that is to have a gradient."""
    inputs = [gm.graph.find_nodes(op="placeholder")[position] for position in layers.inputs[layer]]
    return next((node for node in inputs if _learns(node)), None)


def _learns(node: Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _have_leaves(gm: GraphModule, body: list[Node], layers: RepeatedLayers) -> bool:
    """Whether layers that show what is to have a gradient can do without their operations: see `stand_in`."""
    for layer, row in enumerate(layers.shown):
        nodes = [body[layers.begin + layer * layers.length + place] for place, _ in row]
        if len({*nodes}) < len(nodes) or not all(isinstance(n.meta.get("example_value"), torch.Tensor) for n in nodes):
            return False
        if any(map(_learns, nodes)) and _leaf(gm, layers, layer) is None:
            return False
    return True


def stand_in(like: torch.Tensor, leaf: torch.Tensor | None) -> torch.Tensor:
    """What a layer that is left out returns while others are traced: a tensor like theirs, with a gradient if need be.

    So AOTAutograd knows of as many results, of their kinds, and expects a gradient for each.
    """
    made = like.detach().clone()
    return made if leaf is None else made + leaf.sum().to(device=made.device, dtype=made.dtype)


def _only_the_last_is_used(layer: dict[Node, int], count: int) -> bool:
    """Whether nobody but the layer itself, the next one and the caller looks into any but the last."""
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
    """Whether each layer but the first takes what the one before it takes, a layer further on."""
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
            *(_looks(placeholders[p].meta.get("example_value")) for p in layers.inputs[number]),
            *(spell_arguments(node, name) for node in body[begin : begin + layers.length]),
            *_region_changes(body[begin - 1 : begin + layers.length]),
            *(f"shown {place}" for place, _ in layers.shown[number]),
        ]

    first = texts(1)
    return all(texts(number) == first for number in range(2, layers.count))


def _region_changes(nodes: Sequence[Node]) -> list[str]:
    """Between which of these operations a checkpointed region begins or ends, or one becomes the next."""
    regions = [compat.aot.checkpoint_region(node) for node in nodes]
    changes = [(place, one, other) for place, (one, other) in enumerate(pairwise(regions)) if one != other]
    return [f"{place} {one is None} {other is None}" for place, one, other in changes]


def _stand_ins(
    gm: GraphModule, body: list[Node], layers: RepeatedLayers, graph: Graph, copies: dict[Node, Node]
) -> dict[Node, Node]:
    """What stands for the values that layers that are left out return; made like those of the last layer."""
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
    """A copy of a graph with KEPT of its layers, whose operations are tagged; its inputs are all there."""
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
