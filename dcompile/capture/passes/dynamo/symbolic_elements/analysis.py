"""Analyse the elements of a captured graph's tensors, from a node back to its operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.capture.passes.dynamo.symbolic_elements.elements import (
    DTYPES,
    Elements,
    Operation,
    Read,
    Reads,
    UnknownElements,
    is_of_torch,
    name_of,
    position_in,
    shape_of,
    value_of,
)
from dcompile.capture.passes.dynamo.symbolic_elements.rules import AS_OTHER, LIKE, RULES
from dcompile.ir.piecewise import TooManyCases


class ElementsOf:
    """Elements of the nodes in a nest of graphs, each computed once."""

    def __init__(self, nest: NestedGraphs, changed: Callable[[Node], bool]) -> None:
        """Start without results. `changed` is true for nodes whose memory is written: these are unknown."""
        self._nest, self._changed = nest, changed
        self._known: dict[Node, Elements | None] = {}
        self._batched: dict[Graph, frozenset[Node]] = {}
        self.reads = Reads()

    def __call__(self, node: Node) -> Elements | None:
        """Return the elements of a node's tensor; None if they are unknown.

        Where no rule determines them, those of boolean and integer tensors are reads.
        """
        pending = [node]
        while pending:
            top = pending[-1]
            needed = self._needed(top) if top not in self._known else []
            missing = next((other for other in needed or () if other not in self._known), None)
            if top in self._known:
                pending.pop()
            elif needed is None or any(self._known.get(other, top) is None for other in needed):
                self._known[top] = self._read(top)
            elif missing is not None:
                pending.append(missing)
            else:
                self._known[top] = self._worked_out(top, needed)
        return self._known[node]

    def _needed(self, node: Node) -> list[Node] | None:
        """Return the nodes whose elements determine those of `node`; None if its elements are unknown anyway."""
        if not isinstance(value_of(node), torch.Tensor) or self._changed(node):
            return None
        if node.op == "placeholder":
            return self._nest.sources(node)
        if not is_of_torch(node) or "out" in node.kwargs or name_of(node) not in RULES:
            return None
        inputs = [other for other in node.all_input_nodes if isinstance(value_of(other), torch.Tensor)]
        if name_of(node) in LIKE:
            return [other for other in inputs if other is not inputs[0]]  # the fill value may be a tensor's element
        return inputs[:1] if name_of(node) in AS_OTHER else inputs

    def _worked_out(self, node: Node, needed: list[Node]) -> Elements | None:
        known = {other: found for other in needed if (found := self._known[other]) is not None}
        value = value_of(node)
        try:
            if node.op == "placeholder":
                first, *others = known.values()
                same = all(other == first for other in others) and first.shape == shape_of(value)
                return first if same and first.dtype == value.dtype else self._read(node)
            return RULES[name_of(node)](Operation(node, known, self.reads))
        except (UnknownElements, TooManyCases):
            return self._read(node)

    def _read(self, node: Node) -> Elements | None:
        """Return a tensor's elements as reads of it; None if it is written, or of another dtype than masks have."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES or self._changed(node):
            return None
        if node in self._in_vmap(node.graph):
            return None  # its shape lacks the dimensions of batches
        try:
            shape = shape_of(value)
        except UnknownElements:
            return None
        read = Read(node, tuple(position_in(dim, shape) for dim in range(len(shape))))
        return Elements(shape, value.dtype, self.reads.element(read, value.dtype))

    def _in_vmap(self, graph: Graph) -> frozenset[Node]:
        """Return the nodes of a graph that `vmap` maps over batches."""
        if graph not in self._batched:
            depth, inside = 0, []
            for node in graph.nodes:
                depth += {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}.get(name_of(node), 0)
                inside += [node] if depth else []
            self._batched[graph] = frozenset(inside)
        return self._batched[graph]
