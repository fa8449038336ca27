"""Insert the layers that `find.py` left out of tracing into the traced graph.

In the traced graph each layer has a range of the forward and, in training, one of the backward, in opposite order. The
second and the third layer are compared node by node. They must have the same operations on the same kinds of values,
from the same places relative to the layer. A layer's trace depends only on its operations and inputs. So each layer
that was left out would have the same trace: it is a copy with its own inputs.

Symbolic sizes belong to no layer: tracing computes each expression once, at its first use. Layers share these nodes.
They precede the copies, because the two compared layers use the same ones.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.repeated_layers.compare import (
    STRETCHES,
    CopiedValues,
    LayersDiffer,
    Place,
    TracedLayers,
    compare_layers,
    find_layers,
    layer_tag,
)
from dcompile.capture.passes.repeated_layers.find import (
    STAND_IN,
    TAG,
    LayerArgument,
    RepeatedLayers,
    operations,
    replace_nodes,
)

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
            position = compat.aot_descriptors.input_index(node)
            for layer, row in enumerate(layers.inputs):
                if position in row:
                    self.nodes[layer, ("input", row.index(position))] = node
        for node in filter(compat.aot_descriptors.is_tangent, traced.graph.find_nodes(op="placeholder")):
            position = compat.aot_descriptors.result_index(node)
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
