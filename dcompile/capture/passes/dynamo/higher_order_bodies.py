"""Bodies of higher-order operators: subgraphs of a captured graph, and the operands of their placeholders.

A checkpointed layer is a subgraph, which the captured graph calls through an operator (`tag_activation_checkpoint`). So
are the branches of `cond`, the steps of `scan`, and regions that are compiled once. Every rewrite of the captured graph
iterates over `NestedGraphs.graphs`, or it misses what is inside. `NestedGraphs.sources` maps a body's placeholder to
its operands outside, one for each call. Operands that no body reads any more are removed, with the nodes that only they
need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import GraphModule, Node

from dcompile import compat

Place: TypeAlias = "tuple[int, ...]"
"""Position of an operand among a call's arguments, and the index in that argument if it is a list."""
Places: TypeAlias = "list[Place | None]"
"""For each placeholder of a body the place of its operand; None if the value differs from run to run."""


_FLAT = {
    "tag_activation_checkpoint": 1, "wrap_activation_checkpoint": 1, "wrap": 1, "local_map_hop": 1,
    "invoke_subgraph": 2, "wrap_with_set_grad_enabled": 2, "dynamo_bypassing_wrapper": 2, "wrap_with_autocast": 5,
}  # fmt: skip
"""Operator -> number of leading arguments; all others are its operands."""
_LISTED = {
    "strict_mode": 1, "hints_wrapper": 1, "cond": 3, "while_loop": 3, "while_loop_stack_output": 3, "scan": 3,
    "associative_scan": 2, "map_impl": 2,
}  # fmt: skip
"""Operator with a list of operands -> position of the list."""
_VARYING = {
    "while_loop": (2,),
    "while_loop_stack_output": (2,),
    "scan": (1, 2),
    "associative_scan": (1, 1),
    "map_impl": (1,),
}
"""Operator -> positions of lists whose elements, or values of each run, its bodies get before the operands."""
_CHECKPOINTS = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_INLINED = (*_CHECKPOINTS, "wrap")
"""Operators whose bodies AOTAutograd inlines into the graph that calls them."""
_FIXED = frozenset(("local_map_hop",))
"""Operators whose number of operands is also stored elsewhere, so that it cannot change."""


def _places(call: Node) -> Places | None:
    """Return the places of a call's operands; None for operators of unknown kinds.

    Inputs of their bodies are unknown: `autograd_function_apply` has a forward and a backward, for example.
    """
    name = _name(call.target)
    if name in _FLAT:
        return [(place,) for place in range(_FLAT[name], len(call.args))]
    if name not in _LISTED:
        return None
    varying = sum(len(_items(call.args[place])) for place in _VARYING.get(name, ()))
    return [*[None] * varying, *((_LISTED[name], n) for n in range(len(_items(call.args[_LISTED[name]]))))]


def _items(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, tuple | list) else ()


@dataclass(frozen=True)
class BodyCall:
    """A call of a higher-order operator."""

    node: Node
    graph: GraphModule
    """The graph that contains the call."""
    bodies: tuple[GraphModule, ...]

    def places(self) -> Places | None:
        """Return the place of each placeholder's operand, as the graphs are now; None if they are unknown."""
        found = _places(self.node)
        counts = {len(placeholders(body)) for body in self.bodies}
        return found if found is not None and counts == {len(found)} else None

    def operand(self, position: int) -> Any:
        """Return the argument for the placeholder at `position`, a node or a constant; None if unknown or varying."""
        places = self.places()
        place = None if places is None else places[position]
        if place is None:
            return None
        argument: Any = self.node.args
        for step in place:
            argument = argument[step]
        return argument


def is_checkpointed(gm: GraphModule) -> bool:
    """Does a captured graph have regions that its backward recomputes (`torch.utils.checkpoint`)?"""
    return any(_name(node.target) in _CHECKPOINTS for node in NestedGraphs(gm).nodes() if node.op == "call_function")


def placeholders(body: GraphModule) -> list[Node]:
    """Return the inputs of a body, in order."""
    return list(body.graph.find_nodes(op="placeholder"))


class NestedGraphs:
    """A captured graph with all its subgraphs, at any depth.

    It stays valid while nodes are added and erased, except calls of bodies.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.graphs: list[GraphModule] = []
        """The captured graph first, then bodies, each once and after a graph that calls it."""
        self.calls: list[BodyCall] = []
        self._owners: dict[Any, GraphModule] = {}
        pending = [gm]
        while pending:
            graph = pending.pop(0)
            if any(graph is other for other in self.graphs):
                continue
            self.graphs.append(graph)
            self._owners[graph.graph] = graph
            for call in _calls(graph):
                self.calls.append(call)
                pending += call.bodies

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes of all graphs; nodes may be erased during the iteration."""
        for graph in self.graphs:
            yield from list(graph.graph.nodes)

    def calls_of(self, body: GraphModule) -> list[BodyCall]:
        """Return the calls that run a body."""
        return [call for call in self.calls if any(body is other for other in call.bodies)]

    def is_inlined(self, graph: GraphModule) -> bool:
        """Is this the captured graph, or a body that AOTAutograd inlines at its only call?"""
        while graph is not self.graphs[0]:
            calls = self.calls_of(graph)
            if len(calls) != 1 or _name(calls[0].node.target) not in _INLINED:
                return False
            graph = calls[0].graph
        return True

    def sources(self, placeholder: Node) -> list[Node] | None:
        """Return the operand of a body's placeholder in each call of the body; it is the same in each run.

        None if it is unknown: for inputs of the captured graph, loop-carried values, and operands that are no nodes.
        """
        body = self._owners[placeholder.graph]
        calls, position = self.calls_of(body), placeholders(body).index(placeholder)
        found = [call.operand(position) for call in calls]
        nodes = [operand for operand in found if isinstance(operand, Node)]
        return nodes if calls and len(nodes) == len(found) else None

    def owner(self, node: Node) -> GraphModule:
        """Return the graph that contains a node."""
        return self._owners[node.graph]

    def can_give(self, body: GraphModule) -> bool:
        """Can a body get another operand?"""
        calls, _ = self._tied_to(body)
        return bool(calls) and all(call.places() is not None and not _is_fixed(call) for call in calls)

    def give(self, body: GraphModule, operands: Sequence[Node]) -> Node:
        """Pass nodes to a body, one by each of `calls_of(body)`; return the placeholder, an existing one if possible.

        Relies on: `can_give`, and that no other call runs a body of these calls.
        """
        for node in placeholders(body):
            if self.sources(node) == list(operands):
                return node
        calls, bodies = self._tied_to(body)
        assert len(calls) == len(operands), "each call has an operand for the body"
        for call, operand in zip(self.calls_of(body), operands, strict=True):
            call.node.args = _with(call.node, operand)
        made = [_new_placeholder(other, operands[0]) for other in bodies]
        return next(node for node in made if node.graph is body.graph)

    def erase_unused(self, nodes: Iterable[Node], is_pure: Callable[[Node], bool]) -> None:
        """Erase unused nodes, and the nodes that only they use, in their graph and in those around it.

        Only nodes for which `is_pure` is true are erased, and operands that no body uses any more.
        """
        pending = list(nodes)
        erased = set[Node]()
        while pending:
            dead = pending.pop()
            if dead in erased or dead.users:
                continue
            if dead.op == "placeholder":
                pending += self._drop_operand(dead, erased)
            elif is_pure(dead):
                inputs = list(dead.all_input_nodes)
                dead.graph.erase_node(dead)
                erased.add(dead)
                pending += inputs

    def _drop_operand(self, placeholder: Node, erased: set[Node]) -> list[Node]:
        """Remove an unused placeholder from its body, and its operand from each call; return the operands' nodes.

        Nothing is removed if another body of such a call, or another call, still needs it.
        """
        body = self._owners[placeholder.graph]
        position = placeholders(body).index(placeholder)
        calls, bodies = self._tied_to(body)
        if not calls or any(_is_fixed(call) or not call.places() for call in calls):
            return []
        places = [(call.places() or [])[position] for call in calls]
        unused = [placeholders(other)[position] for other in bodies]
        if None in places or any(node.users for node in unused):
            return []
        operands = []
        for call, place in zip(calls, places, strict=True):
            assert place is not None, "an operand that varies was left alone"
            operands.append(call.operand(position))
            call.node.args = _without(call.node.args, place)
        for node in unused:
            node.graph.erase_node(node)
            erased.add(node)
        return [operand for operand in operands if isinstance(operand, Node)]

    def _tied_to(self, body: GraphModule) -> tuple[list[BodyCall], list[GraphModule]]:
        """Return all calls and bodies that must have the same operands as this body."""
        bodies, calls = [body], list[BodyCall]()
        for other in bodies:  # the loop appends to it
            for call in self.calls_of(other):
                if not any(call is known for known in calls):
                    calls.append(call)
                    bodies += [found for found in call.bodies if not any(found is known for known in bodies)]
        return calls, bodies

    def recompile(self) -> None:
        """Recompile all graph modules."""
        for graph in self.graphs:
            graph.recompile()


def _is_fixed(call: BodyCall) -> bool:
    return _name(call.node.target) in _FIXED


def _with(call: Node, operand: Node) -> tuple[Any, ...]:
    """Return the arguments of a call with another operand at the end."""
    listed = _LISTED.get(_name(call.target))
    if listed is None:
        return (*call.args, operand)
    items: Any = call.args[listed]
    return (*call.args[:listed], type(items)((*items, operand)), *call.args[listed + 1 :])


def _new_placeholder(body: GraphModule, like: Node) -> Node:
    """Add an input to a body, after the others."""
    known = placeholders(body)
    before = known[-1].next if known else next(iter(body.graph.nodes))
    with body.graph.inserting_before(before):
        node = body.graph.placeholder(like.name)
    node.meta["example_value"] = like.meta["example_value"]
    return node


def _calls(graph: GraphModule) -> Iterator[BodyCall]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and compat.dynamo.holds_graphs(node.target):
            bodies = [body for argument in node.args if (body := _body(graph, argument)) is not None]
            distinct = [body for n, body in enumerate(bodies) if not any(body is other for other in bodies[:n])]
            if distinct:
                yield BodyCall(node, graph, tuple(distinct))


def _body(graph: GraphModule, argument: Any) -> GraphModule | None:
    if not isinstance(argument, Node) or argument.op != "get_attr":
        return None
    found: Any = graph
    for name in str(argument.target).split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, GraphModule) else None


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", ""))


def _without(arguments: Any, place: Place) -> tuple[Any, ...]:
    """Return arguments without the one at a place."""
    first, *rest = place
    items = list(arguments)
    if rest:
        items[first] = type(items[first])(_without(items[first], tuple(rest)))
    else:
        del items[first]
    return tuple(items)
