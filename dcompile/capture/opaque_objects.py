"""Remove device meshes and process groups, which programs do not read, from a traced graph's inputs and results.

AOTAutograd splits a DTensor into its local tensor and its mesh. The mesh passes through the graphs unread: it is an
input, and a result for each result or gradient that becomes a DTensor. The program's caller removes such objects from
the arguments, and inserts them into the results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat

Boxed = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class OpaqueObjects:
    """The inputs and results that were removed from a graph."""

    inputs: tuple[int, ...] = ()
    """Positions of the inputs, ascending."""
    results: tuple[tuple[int, int], ...] = ()
    """(position of a result, index into `inputs` of its object), ascending."""

    def around(self, run: Boxed) -> Boxed:
        """Return `run` with these objects among its arguments and results."""
        if not self.inputs:
            return run
        inputs, places = self.inputs[::-1], tuple((at, len(self.inputs) - 1 - place) for at, place in self.results)

        def running(args: list[Any]) -> list[Any]:
            objects = [args.pop(position) for position in inputs]
            results = run(args)
            for at, place in places:
                results.insert(at, objects[place])
            return results

        return running

    def input_place(self, position: int) -> int:
        """Return the position of the whole graph's input among the remaining ones."""
        return position - sum(removed < position for removed in self.inputs)

    def result_place(self, position: int) -> int:
        """Return the position of the whole graph's result among the remaining ones."""
        return position - sum(removed < position for removed, _ in self.results)

    def result_places(self, positions: Collection[int]) -> tuple[int, ...]:
        """Return the positions of several results among the remaining ones, without removed ones."""
        removed = {at for at, _ in self.results}
        return tuple(self.result_place(position) for position in positions if position not in removed)

    def views(self, aliases: Mapping[int, int]) -> dict[int, int]:
        """Return position of a result -> of the input that it is a view of, both among the remaining ones."""
        removed = {at for at, _ in self.results}
        found = ((at, of) for at, of in aliases.items() if at not in removed)
        return {self.result_place(at): self.input_place(of) for at, of in found}


def remove_opaque_objects(gm: Any) -> OpaqueObjects:
    """Remove opaque inputs that the graph only returns, and remove them from its results.

    An object that an operation of the graph takes stays; lowering reports it as unsupported.
    """
    output = gm.graph.output_node()
    placeholders = enumerate(gm.graph.find_nodes(op="placeholder"))
    found = {
        node: position
        for position, node in placeholders
        if compat.tensors.is_opaque(node.meta.get("val")) and all(user is output for user in node.users)
    }
    if not found:
        return OpaqueObjects()
    places = {node: place for place, node in enumerate(found)}
    results = list(output.args[0])
    returned = [
        (at, places[node]) for at, node in enumerate(results) if isinstance(node, torch.fx.Node) and node in found
    ]
    removed = {at for at, _ in returned}
    output.args = (tuple(node for at, node in enumerate(results) if at not in removed),)
    if "desc" in output.meta:
        output.meta["desc"] = [desc for at, desc in enumerate(output.meta["desc"]) if at not in removed]
    for node in found:
        gm.graph.erase_node(node)
    gm.recompile()
    return OpaqueObjects(tuple(found.values()), tuple(returned))


def without_opaque_objects(gm: Any) -> Any:
    """Return a copy of a graph without opaque objects, or the graph itself if it has none."""
    if not any(compat.tensors.is_opaque(node.meta.get("val")) for node in gm.graph.find_nodes(op="placeholder")):
        return gm
    graph = torch.fx.Graph()
    copied = graph.output(graph.graph_copy(gm.graph, {}))
    copied.meta = dict(gm.graph.output_node().meta)
    copy = torch.fx.GraphModule(gm, graph)
    remove_opaque_objects(copy)
    return copy
