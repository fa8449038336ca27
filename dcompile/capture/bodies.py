"""Bodies of higher-order operators: graphs that a captured graph holds, and what their inputs are outside.

A checkpointed layer is a graph of its own, which the captured graph calls through an operator
(`tag_activation_checkpoint`); so are the branches of `cond`, the steps of `scan`, and regions that are compiled once.
Every rewrite of the captured graph goes through `Nest.graphs`, or it misses what is inside. Where it has to know how
an argument was made, `Nest.sources` leads from a body's placeholder to the operands outside: one for each call. An
operand that no body reads any more is taken away, and with it what made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import GraphModule, Node

from dcompile import compat

Place: TypeAlias = "tuple[int, ...]"
"""Where an operand stands among a call's arguments: its position, and the position in there if that is a list."""
Places: TypeAlias = "list[Place | None]"
"""For each placeholder of a body: the place of its operand; None where that differs from one run to the next."""


def _behind(count: int) -> Callable[[Node], Places]:
    """Operands are all arguments but the first `count`."""
    return lambda call: [(place,) for place in range(count, len(call.args))]


def _listed(place: int, *varying: int) -> Callable[[Node], Places]:
    """Operands are a list at `place`; the elements of those at `varying` come first, and change while it runs."""

    def places(call: Node) -> Places:
        before = sum(len(_items(call.args[n])) for n in varying)
        return [*[None] * before, *((place, n) for n in range(len(_items(call.args[place]))))]

    return places


def _items(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, tuple | list) else ()


_OPERANDS: Mapping[str, Callable[[Node], Places]] = {
    "tag_activation_checkpoint": _behind(1),
    "wrap_activation_checkpoint": _behind(1),
    "wrap": _behind(1),
    "local_map_hop": _behind(1),
    "invoke_subgraph": _behind(2),
    "wrap_with_set_grad_enabled": _behind(2),
    "dynamo_bypassing_wrapper": _behind(2),
    "wrap_with_autocast": _behind(5),
    "strict_mode": _listed(1),
    "hints_wrapper": _listed(1),
    "cond": _listed(3),
    "while_loop": _listed(3, 2),
    "while_loop_stack_output": _listed(3, 2),
    "scan": _listed(3, 1, 2),
    "associative_scan": _listed(2, 1, 1),
    "map_impl": _listed(2, 1),
}
"""Higher-order operators that give each of their bodies the same operands. Bodies of others are rewritten, too, but
nothing is known of what they are given: those of `autograd_function_apply` are a forward and a backward."""
_FIXED = frozenset(("local_map_hop",))
"""Operators that note elsewhere how many operands they have."""


@dataclass(frozen=True)
class Call:
    """A call of a higher-order operator."""

    node: Node
    graph: GraphModule
    """The graph that the call is in."""
    bodies: tuple[GraphModule, ...]

    def places(self) -> Places | None:
        """Where the operand of each placeholder stands, as the graphs are now; None if it is not known."""
        rule = _OPERANDS.get(_name(self.node.target))
        found = None if rule is None else rule(self.node)
        counts = {len(placeholders(body)) for body in self.bodies}
        return found if found is not None and counts == {len(found)} else None

    def operand(self, position: int) -> Any:
        """The argument for the placeholder at `position`, a node or a constant; None if it is not known or varies."""
        places = self.places()
        place = None if places is None else places[position]
        if place is None:
            return None
        argument: Any = self.node.args
        for step in place:
            argument = argument[step]
        return argument


def placeholders(body: GraphModule) -> list[Node]:
    """The inputs of a body, in order."""
    return list(body.graph.find_nodes(op="placeholder"))


class Nest:
    """A captured graph with all bodies that it holds, however deep.

    It stays true while nodes are added and erased, as long as no call of a body is.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.graphs: list[GraphModule] = []
        """The captured graph first, then bodies, each once and behind a graph that calls it."""
        self.calls: list[Call] = []
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
        """The nodes of all graphs; some may be erased meanwhile."""
        for graph in self.graphs:
            yield from list(graph.graph.nodes)

    def calls_of(self, body: GraphModule) -> list[Call]:
        """The calls that run a body."""
        return [call for call in self.calls if any(body is other for other in call.bodies)]

    def sources(self, placeholder: Node) -> list[Node] | None:
        """What a body's placeholder stands for: the operand of each call that runs the body, the same in each run.

        None where that is not known: inputs of the captured graph, what a loop carries, operands that are no nodes.
        """
        body = self._owners[placeholder.graph]
        calls, position = self.calls_of(body), placeholders(body).index(placeholder)
        found = [call.operand(position) for call in calls]
        nodes = [operand for operand in found if isinstance(operand, Node)]
        return nodes if calls and len(nodes) == len(found) else None

    def erase_unused(self, nodes: Iterable[Node], is_pure: Callable[[Node], bool]) -> None:
        """Erase nodes that nothing uses, and what they alone were made from, in their graph and in those around it.

        Only nodes that `is_pure` holds for go, and operands of bodies that use them no more.
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
        """Take an unused placeholder from its body, and its operand from each call; what the operands were.

        Nothing is done where another body of such a call, or another call, still needs it.
        """
        body = self._owners[placeholder.graph]
        position = placeholders(body).index(placeholder)
        calls, bodies = self._tied_to(body)
        if not calls or any(_name(call.node.target) in _FIXED or not call.places() for call in calls):
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

    def _tied_to(self, body: GraphModule) -> tuple[list[Call], list[GraphModule]]:
        """All calls and bodies that have to have the same operands as this body."""
        bodies, calls = [body], list[Call]()
        for other in bodies:  # grows meanwhile
            for call in self.calls_of(other):
                if not any(call is known for known in calls):
                    calls.append(call)
                    bodies += [found for found in call.bodies if not any(found is known for known in bodies)]
        return calls, bodies

    def recompile(self) -> None:
        """Make the code of all graphs anew."""
        for graph in self.graphs:
            graph.recompile()


def _calls(graph: GraphModule) -> Iterator[Call]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and compat.dynamo.holds_graphs(node.target):
            bodies = [body for argument in node.args if (body := _body(graph, argument)) is not None]
            distinct = [body for n, body in enumerate(bodies) if not any(body is other for other in bodies[:n])]
            if distinct:
                yield Call(node, graph, tuple(distinct))


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
    """Arguments without the one at a place."""
    first, *rest = place
    items = list(arguments)
    if rest:
        items[first] = type(items[first])(_without(items[first], tuple(rest)))
    else:
        del items[first]
    return tuple(items)
