"""Elements of a captured graph's tensors as piecewise functions of their positions, to recognize attention masks.

The part of the graph that makes a mask is run again, with a `MaskTracer` that computes each operator's elements by
lowering's rules. Nodes of bodies get those of their operands outside. If a node's elements have no form, those of
boolean and integer tensors are reads of it. Only nodes whose operands have elements are run: what masks are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from dcompile import compat
from dcompile.capture.passes.dynamo.captured_nodes import is_of_torch, name_of, sizes_of, value_of
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.ir.elements import Elements, Reads, UnknownElements
from dcompile.ir.piecewise import TooManyCases

FROM_NUMBERS = ("ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "empty", "empty_like")
"""Functions that make a tensor with memory of its own."""
LIKE = frozenset(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"))
"""Functions that use only the shape, dtype and device of their first argument."""
AS_OTHER = frozenset(("expand_as", "view_as", "reshape_as", "type_as", "to"))
"""Functions that use only the shape, dtype and device of their other arguments."""
_VMAP = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}


class MaskTracer(Protocol):
    """The interface of `codegen.lower.elements.ElementTracer`."""

    reads: Reads

    def tracing(self) -> AbstractContextManager[Any]:
        """Context in which operators are traced; they raise UnknownElements."""

    def bind(self, tensor: torch.Tensor, elements: Elements | None) -> None:
        """Set the elements of a tensor that functions are about to be called with; None for unknown ones."""

    def elements(self, tensor: torch.Tensor) -> Elements | None:
        """Return the elements of a tensor that was traced or bound."""

    def read(self, tensor: torch.Tensor, source: Any) -> Elements | None:
        """Return elements that are reads of `source`; None for dtypes that masks do not have, or unknown sizes."""


class ElementsOf:
    """Elements of the nodes in a nest of graphs, each computed once."""

    def __init__(self, nest: NestedGraphs, changed: Callable[[Node], bool], tracer: MaskTracer) -> None:
        """Start without results. `changed` is true for nodes whose memory is written: these are unknown."""
        self._nest, self._changed, self._tracer = nest, changed, tracer
        self._known: dict[Node, Elements | None] = {}
        self._values: dict[Node, Any] = {}
        """Results of the nodes that were run."""

    @property
    def reads(self) -> Reads:
        return self._tracer.reads

    def __call__(self, node: Node) -> Elements | None:
        """Return the elements of a node's tensor; None if they are unknown.

        Where no rule determines them, those of boolean and integer tensors are reads.
        """
        if node not in self._known:
            needed = self._needed(node)
            with getattr(value_of(node), "fake_mode", None) or nullcontext(), torch.no_grad():
                self._run_graph(node.graph, needed, set())
        return self._known[node]

    def is_constant(self, node: Node) -> bool:
        """Does a node compute without side effects: a tensor by operators with a rule, a new one, or a size?"""
        is_size = isinstance(value_of(node), torch.SymInt) and getattr(node.target, "__module__", "") == "_operator"
        is_new = is_of_torch(node) and name_of(node) in FROM_NUMBERS and "out" not in node.kwargs
        return node in self._values or is_size or is_new

    def _needed(self, node: Node) -> dict[Node, list[Node] | None]:
        """Return the nodes that determine a node's elements, itself among them, each with its operands."""
        found: dict[Node, list[Node] | None] = {}
        pending = [node]
        while pending:
            if (top := pending.pop()) not in found:
                found[top] = self._operands(top)
                pending += found[top] or ()
        return found

    def _operands(self, node: Node) -> list[Node] | None:
        """Return the nodes whose elements determine those of `node`; None if its elements are unknown anyway."""
        if not isinstance(value_of(node), torch.Tensor) or self._changed(node):
            return None
        if node.op == "placeholder":
            return self._nest.sources(node)
        if not is_of_torch(node) or "out" in node.kwargs:
            return None
        inputs = [other for other in node.all_input_nodes if isinstance(value_of(other), torch.Tensor)]
        if name_of(node) in LIKE:
            return [other for other in inputs if other is not inputs[0]]  # the fill value may be a tensor's element
        return inputs[:1] if name_of(node) in AS_OTHER else inputs

    def _run_graph(self, graph: Graph, needed: Mapping[Node, list[Node] | None], done: set[Graph]) -> None:
        """Run the needed nodes of a graph, after those of graphs around it that give it operands."""
        done.add(graph)
        for placeholder in graph.find_nodes(op="placeholder"):
            for operand in needed.get(placeholder) or ():
                if operand.graph not in done:
                    self._run_graph(operand.graph, needed, done)
        levels = 0
        try:
            for node in graph.nodes:
                if name_of(node) in _VMAP:  # nodes up to the end of its level are mapped over a batch, and run anew
                    node.target(*map_arg(node.args, self._value))
                    levels += _VMAP[name_of(node)]
                elif node in needed and (levels or node not in self._known):
                    self._known[node] = self._run(node, needed[node], is_mapped=levels > 0)
        finally:
            compat.dynamo.leave_vmap(levels)

    def _run(self, node: Node, operands: list[Node] | None, *, is_mapped: bool) -> Elements | None:
        """Return a node's elements; None if they are unknown, and for those that are mapped."""
        self._values.pop(node, None)
        if operands is not None:
            found = [self._known[operand] for operand in operands]
            if node.op == "placeholder":
                if found[0] is not None and all(other == found[0] for other in found) and _is_of(node, found[0]):
                    return found[0]
            elif all(known or operand in self._values for known, operand in zip(found, operands, strict=True)):
                try:
                    made = self._computed(node)
                except (UnknownElements, TooManyCases):  # Dynamo has run the node: torch refuses it no more than then
                    made = None
                if isinstance(made, torch.Tensor) and (is_mapped or self._tracer.elements(made) is not None):
                    self._values[node] = made
                    return self._tracer.elements(made)
        return None if is_mapped or self._changed(node) else self._tracer.read(value_of(node), node)

    def _computed(self, node: Node) -> Any:
        for operand in node.all_input_nodes:
            if isinstance(value := self._value(operand), torch.Tensor):
                self._tracer.bind(value, self._known.get(operand))
        args, kwargs = map_arg((node.args, node.kwargs), self._value)
        target: Any = node.target
        with self._tracer.tracing():
            if node.op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    def _value(self, node: Node) -> Any:
        return self._values.get(node, value_of(node))


def _is_of(node: Node, elements: Elements) -> bool:
    return sizes_of(node) == elements.shape and str(value_of(node).dtype) == f"torch.{elements.dtype}"
