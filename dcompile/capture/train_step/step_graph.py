"""The graph of a backward whose gradients go to the optimizer's update instead of `.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.saved_values import is_view
from dcompile.capture.train_step.update_rules import Group, UpdateRule
from dcompile.operators.step_ops import reduced

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class ParameterUpdate:
    """One parameter's part of a step: positions in the backward, and how it is updated."""

    gradient: int
    """Position of its gradient among the backward's results."""
    saved: int | None
    """Position of the parameter itself among the backward's inputs, if that reads it."""
    parameter: torch.Tensor
    """A tensor of its shape, dtype and strides; fake or real."""
    state: tuple[torch.Tensor, ...]
    """The same for the optimizer's state."""
    rule: UpdateRule
    group: Group
    number: int
    """Where its first number is in the vector of numbers."""
    accumulated: bool = False
    """Whether `.grad` already holds a gradient of earlier micro-batches, which is an input."""
    reduced: int | None = None
    """The parameter's number in the plan, if the update reads a gradient that ranks have reduced."""
    views: tuple[int, ...] = ()
    """Positions of the backward's inputs that are other views of the parameter's memory."""


@dataclass(frozen=True)
class StepGraph:
    """The joined graph, and what its inputs are after those of the backward."""

    gm: GraphModule
    parameters: tuple[int, ...]
    """Updates (by index) whose parameter is an input of its own, in order; then come all states, then earlier
    gradients, then the vector of numbers."""


def join_update(backward: GraphModule, updates: Sequence[ParameterUpdate], numbers: torch.Tensor) -> StepGraph:
    """Return a backward that applies `updates`, each as soon as nothing reads the old values, and returns no gradient.

    `numbers`: vector of all numbers of a step, in float32, or in float64 if a parameter is. The new inputs follow the
    backward's own. Updated tensors are written in place.
    """
    maker = _Maker(backward)
    apart = tuple(place for place, update in enumerate(updates) if update.saved is None)
    places = maker.places
    made = {at: maker.placeholder(f"parameter{at}", updates[at].parameter) for at in apart}
    parameters = [made[at] if u.saved is None else places[u.saved] for at, u in enumerate(updates)]
    states = [
        [maker.placeholder(f"state{at}_{n}", value) for n, value in enumerate(update.state)]
        for at, update in enumerate(updates)
    ]
    earlier = {
        at: maker.placeholder(f"accumulated{at}", update.parameter)
        for at, update in enumerate(updates)
        if update.accumulated
    }
    vector = maker.placeholder("numbers", numbers)
    for parameter, update in zip(parameters, updates, strict=True):
        maker.read_through(parameter, [places[place] for place in update.views])
    outputs = list(maker.output.args[0])
    for at, update in enumerate(updates):
        targets = [parameters[at], *states[at]]
        maker.insert(update, outputs[update.gradient], earlier.get(at), targets, vector)
        outputs[update.gradient] = None
    maker.output.args = (tuple(outputs),)
    maker.graph.lint()
    return StepGraph(GraphModule(backward, maker.graph), apart)


def readers(node: Node) -> list[Node]:
    """Return the nodes that read a value's memory, also through views."""
    found: list[Node] = []
    for user in node.users:
        found += [user, *(readers(user) if is_view(user) else ())]
    return found


@dataclass
class _Maker:
    """The graph while it is built."""

    backward: GraphModule
    graph: Graph = field(default_factory=Graph)
    traced: dict[Any, GraphModule] = field(default_factory=dict)
    """Updates of one kind are traced once."""

    def __post_init__(self) -> None:
        copied = self.graph.graph_copy(self.backward.graph, {}, return_output_node=True)
        assert isinstance(copied, tuple)
        value, old = copied
        self.output = self.graph.output(value)
        self.output.meta = dict(old.meta)
        self.output.meta.pop("desc", None)
        self.places = self.graph.find_nodes(op="placeholder")
        self.last = self.places[-1]
        self.mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in self.places])
        self.order = {node: at for at, node in enumerate(self.graph.nodes)}

    def placeholder(self, name: str, like: torch.Tensor) -> Node:
        """Add an input after all others."""
        with self.graph.inserting_after(self.last):
            node = self.graph.placeholder(name)
        node.meta["val"] = self._fake(like)
        self.last = node
        return node

    def _fake(self, like: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def read_through(self, parameter: Node, views: Sequence[Node]) -> None:
        """Read saved views of a parameter through the parameter itself, so that the update comes after them."""
        for view in views:
            value = view.meta["val"]
            with self.graph.inserting_before(self.first):
                layout = list(value.shape), list(value.stride()), value.storage_offset()
                seen = self.graph.call_function(torch.ops.aten.as_strided.default, (parameter, *layout))
            seen.meta["val"] = value
            self.order[seen] = -1
            view.replace_all_uses_with(seen)

    @property
    def first(self) -> Node:
        """The first operation."""
        return self.last.next

    def insert(
        self, update: ParameterUpdate, gradient: Node, earlier: Node | None, targets: Sequence[Node], vector: Node
    ) -> None:
        """Insert one update after its gradient and after the last reader of the parameter's old value."""
        needed = [gradient, *targets, *readers(targets[0])]
        behind = max((node for node in needed if node in self.order and node is not self.output), key=self.order.__getitem__)
        if behind.op == "placeholder":
            behind = self.last
        if update.reduced is not None:
            gradient = self._reduced(gradient, update.reduced, targets[0], behind)
            behind = gradient
        traced = self._trace(update, gradient, earlier)
        given = [gradient, *([] if earlier is None else [earlier]), *targets, vector]
        values: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), given, strict=True))
        first = behind.next
        with self.graph.inserting_before(first):
            for node in traced.graph.nodes:
                if node.op == "call_function":
                    arguments, keywords = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    if node.target is torch.ops.aten.select.int and node.args[0] in values and values[node.args[0]] is vector:
                        arguments = (vector, 0, update.number + node.args[2])
                    values[node] = self.graph.call_function(node.target, arguments, keywords)
                    values[node].meta = dict(node.meta)
            results = [values[node] for node in traced.graph.output_node().args[0]]
            for target, result in zip(targets, results, strict=True):
                written = self.graph.call_function(torch.ops.aten.copy_.default, (target, result))
                written.meta["val"] = target.meta["val"]

    def _reduced(self, gradient: Node, number: int, parameter: Node, behind: Node) -> Node:
        with self.graph.inserting_after(behind):
            node = self.graph.call_function(torch.ops.dcompile_step.reduced.default, (gradient, number, parameter))
        with self.mode:
            node.meta["val"] = reduced(gradient.meta["val"], number, parameter.meta["val"])
        return node

    def _trace(self, update: ParameterUpdate, gradient: Node, earlier: Node | None) -> GraphModule:
        """Return the graph of (gradient, [earlier gradient], parameter, state..., numbers) -> new values."""
        rule, group = update.rule, update.group
        given = [gradient.meta["val"], *([] if earlier is None else [earlier.meta["val"]])]
        kept = [update.parameter, *update.state]
        count = len(rule.numbers(group, 1))
        key = (
            id(rule),
            id(group),
            *((tuple(x.shape), x.stride(), x.dtype) for x in (*given, *kept)),
        )
        if key in self.traced:
            return self.traced[key]

        def step(gradient: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
            *more, vector = others
            if earlier is not None:
                gradient = more.pop(0) + gradient
            parameter, *state = [x.to(WIDER.get(x.dtype, x.dtype)) for x in more]
            numbers = [vector[place] for place in range(count)]
            new = rule.update(group, parameter, gradient.to(parameter.dtype), state, numbers)
            return tuple(value.to(old.dtype) for value, old in zip(new, more, strict=True))

        wide = update.parameter.dtype is torch.float64
        numbers = torch.empty(count, dtype=torch.float64 if wide else torch.float32, device=update.parameter.device)
        found = compat.flex.traced_again(step, [*given, *map(self._fake, kept), self._fake(numbers)], {})
        self.traced[key] = found
        return found
