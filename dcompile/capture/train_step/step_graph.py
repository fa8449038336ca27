"""Graphs of a backward that goes on with its gradients: to their norms, or to the optimizer's update."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import compat
from dcompile.capture.passes.joint.saved_values import is_view
from dcompile.capture.train_step.update_trace import UpdateTrace
from dcompile.operators import step_ops


@dataclass(frozen=True)
class LeafGradient:
    """One parameter's gradient in a backward."""

    place: int
    """Position among the backward's results."""
    reduced: int | None = None
    """The parameter's number in the plan, if ranks reduce the gradient."""
    accumulated: bool = False
    """Whether `.grad` holds a gradient of earlier micro-batches, which is an input and is added."""
    shard: tuple[tuple[int, ...], torch.dtype, torch.dtype] | None = None
    """Size of this rank's part of a sharded parameter, the dtype in which gradients are reduced, and its own dtype."""

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no element of a sharded parameter: it reduces with the others, and updates nothing."""
        return self.shard is not None and 0 in self.shard[0]


@dataclass(frozen=True)
class ParameterUpdate:
    """How one parameter is updated. Tensors, fake or real, tell shapes, dtypes and strides."""

    parameter: torch.Tensor
    state: tuple[torch.Tensor, ...]
    trace: UpdateTrace
    number: int
    """Where its first number is in the vector of numbers."""
    saved: int | None = None
    """Position of the parameter itself among the backward's inputs, if that reads it."""
    views: tuple[int, ...] = ()
    """Positions of the backward's inputs that are other views of the parameter's memory."""


def with_norms(backward: GraphModule, leaves: Sequence[LeafGradient]) -> GraphModule:
    """Return a backward with the 2-norm of each gradient as further results, in the order of `leaves`.

    Its further inputs are gradients of earlier micro-batches, which are added to the results.
    """
    maker = _GraphMaker.of(backward)
    earlier = maker.accumulated(leaves)
    outputs = list(maker.results)
    norms = []
    for at, leaf in enumerate(leaves):
        summed = maker.settled(outputs[leaf.place], leaf, earlier.get(at))
        with maker.before(summed.next):
            norms += maker.traced(lambda x: (torch.linalg.vector_norm(x),), (summed,), "norm")
        if leaf.accumulated:
            outputs[leaf.place] = summed
    return maker.made((*outputs, *norms))


def with_updates(
    backward: GraphModule,
    leaves: Sequence[LeafGradient],
    updates: Sequence[ParameterUpdate],
    numbers: torch.Tensor,
    clips: float | None = None,
    ranks: str = "",
    unscales: bool = False,
) -> GraphModule:
    """Return a backward that applies `updates`, each once nothing reads the old values, and returns no gradient.

    `numbers`: vector of all numbers of a step. Further inputs: parameters without `saved`, states, gradients of earlier
    micro-batches, numbers. What is updated is written in place. With `clips`, gradients are clipped as by
    clip_grad_norm_: the last number is the largest norm, and `clips` is added to the norm before dividing by it. The
    last result is then a vector of each gradient's norm on this rank, with the common one behind. `ranks`: name of the
    process group over which parameters are sharded.

    If it `unscales`, as GradScaler, the vector begins with the numbers of a step after one that was made, and those
    after one that was skipped; and ends with what gradients are multiplied by, and with 1 if the step before was
    skipped, else 0. Nothing changes if a gradient on any rank is infinite or no number: then the last result is 1.
    Without `clips`, that is the end of a vector, behind the count of such numbers in each gradient.
    """
    maker = _GraphMaker.of(backward)
    places = list(maker.inputs)
    parameters = [
        maker.placeholder("parameter", update.parameter) if update.saved is None else places[update.saved]
        for update in updates
    ]
    states = [[maker.placeholder("state", value) for value in update.state] for update in updates]
    earlier = maker.accumulated(leaves)
    vector = maker.placeholder("numbers", numbers)
    for parameter, update in zip(parameters, updates, strict=True):
        maker.read_through(parameter, [places[place] for place in update.views])
    outputs = list(maker.results)
    gradients = {}
    is_late = clips is not None or unscales
    for at, leaf in enumerate(leaves):
        if not leaf.is_empty:
            behind = None if is_late else maker.last_of([parameters[at], *_readers(parameters[at])])
            gradients[at] = maker.settled(outputs[leaf.place], leaf, earlier.get(at), behind)
        if leaf.shard is None:  # the places of shards tell passes the order of reductions
            outputs[leaf.place] = None
    more, found = list[Node](), None
    if is_late:
        with maker.before(maker.output):
            given, more, found = maker.finished([*gradients.values()], vector, clips, ranks, unscales)
            vector = maker.chosen(vector, 2 + (clips is not None)) if unscales else vector
        gradients = dict(zip(gradients, given, strict=True))
    targets = [(parameters[at], states[at]) for at in gradients]
    maker.update_all([updates[at] for at in gradients], [*gradients.values()], targets, vector, found)
    return maker.made((*outputs, *more))


def forward_and_backward(
    forward: GraphModule, backward: GraphModule, results: int, kept: Sequence[int], share: float
) -> GraphModule:
    """Return a forward and its backward as one graph, whose inputs are the forward's.

    It computes the gradients of `share` times the loss, the one result whose gradient the backward takes as its last
    input. Its results are those of the backward, then the forward's at positions `kept`, of its first `results`. What
    the backward computes again stays as it is: a partition has chosen it.
    """
    root, graph = torch.nn.Module(), Graph()
    outputs = _insert(root, graph, forward, {})
    saved = outputs[results:]
    *given, tangent = backward.graph.find_nodes(op="placeholder")
    value = tangent.meta["val"]
    keywords = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    begin = graph.call_function(torch.ops.aten.full.default, (list(value.shape), share), keywords)
    begin.meta["val"] = value
    gradients = _insert(root, graph, backward, {**dict(zip(given, saved, strict=True)), tangent: begin})
    graph.output((*gradients, *(outputs[place] for place in kept)))
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(root, graph)


def _insert(root: torch.nn.Module, graph: Graph, gm: GraphModule, made: dict[Node, Any]) -> Sequence[Any]:
    """Copy a graph's nodes behind those of another one, whose attributes are `root`'s; return what it returns.

    `made`: what takes the place of some of its nodes.
    """
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        if node in made:
            continue
        made[node] = graph.node_copy(node, made.__getitem__)
        if node.op == "get_attr":
            made[node].target = f"held{len(made)}_{len(graph.nodes)}"
            setattr(root, made[node].target, operator.attrgetter(node.target)(gm))
    results: Any = gm.graph.output_node().args[0]
    found: Sequence[Any] = torch.fx.map_arg(results, made.__getitem__)
    return found


def agreed(norms: Sequence[torch.Tensor], found: torch.Tensor | None, ranks: str) -> GraphModule:
    """Return the graph of what all ranks know of sharded gradients: their norm, and whether one is not finite.

    Inputs: this rank's norm of each, if that is asked for; then what this rank has found. See `with_updates`.
    """
    maker = _GraphMaker.of(None)
    nodes = [maker.placeholder("norm", norm) for norm in norms]
    flags = [] if found is None else [maker.placeholder("found", found)]
    with maker.before(maker.output):
        return maker.made(maker.agreed(nodes, flags, ranks))


def update_alone(
    gradients: Sequence[torch.Tensor], updates: Sequence[ParameterUpdate], numbers: torch.Tensor, scaled: bool
) -> GraphModule:
    """Return the graph of updates alone; see `with_updates`.

    Inputs: gradients, parameters, states, numbers, and a factor for all gradients if they are `scaled`.
    """
    maker = _GraphMaker.of(None)
    given = [maker.placeholder("gradient", value) for value in gradients]
    parameters = [maker.placeholder("parameter", update.parameter) for update in updates]
    states = [[maker.placeholder("state", value) for value in update.state] for update in updates]
    vector = maker.placeholder("numbers", numbers)
    factor = maker.placeholder("factor", numbers.new_empty((), dtype=torch.float32)) if scaled else None
    if factor is not None:
        with maker.before(maker.output):
            given = [maker.traced(lambda x, scale: ((x * scale).to(x.dtype),), (x, factor), "scale")[0] for x in given]
    maker.update_all(updates, given, list(zip(parameters, states, strict=True)), vector)
    return maker.made(())


def _count_unsound(x: torch.Tensor) -> tuple[torch.Tensor]:
    """Return how many numbers are infinite, or none."""
    return ((~torch.isfinite(x)).sum(dtype=torch.float32),)


def _kept(found: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.where(found > 0, old, new),)


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read a value's memory, also through views."""
    found: list[Node] = []
    for user in node.users:
        found += [user, *(_readers(user) if is_view(user) else ())]
    return found


@dataclass
class _GraphMaker:
    """A graph while it is built."""

    root: Any
    graph: Graph
    output: Node
    inputs: list[Node]
    mode: Any
    order: dict[Node, int] = field(default_factory=dict)
    """Order of the backward's own nodes."""
    known: dict[Any, GraphModule] = field(default_factory=dict)
    """Functions of the same shapes are traced once."""

    @staticmethod
    def of(backward: GraphModule | None) -> _GraphMaker:
        """Start with a copy of a backward's graph, or with an empty graph."""
        graph = Graph()
        if backward is None:
            return _GraphMaker(torch.nn.Module(), graph, graph.output(()), [], compat.tensors.fake_mode())
        copied = graph.graph_copy(backward.graph, {})
        output = graph.output(copied)
        inputs = graph.find_nodes(op="placeholder")
        mode = compat.aot.detect_fake_mode([node.meta.get("val") for node in inputs])
        order = {node: at for at, node in enumerate(graph.nodes)}
        return _GraphMaker(backward, graph, output, inputs, mode, order)

    @property
    def results(self) -> Sequence[Any]:
        """What the backward returns."""
        return self.output.args[0]  # type: ignore[return-value]

    def made(self, outputs: Sequence[Any]) -> GraphModule:
        """Return the module of the graph."""
        self.output.args = (tuple(outputs),)
        self.graph.lint()
        return GraphModule(self.root, self.graph)

    def before(self, node: Node) -> Any:
        """Return a context in which nodes are inserted before another."""
        return self.graph.inserting_before(node)

    def placeholder(self, name: str, like: torch.Tensor) -> Node:
        """Add an input after all others."""
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_after(self.inputs[-1]) if self.inputs else self.graph.inserting_before(first):
            node = self.graph.placeholder(f"{name}{len(self.inputs)}")
        node.meta["val"] = self._fake(like)
        self.inputs.append(node)
        return node

    def accumulated(self, leaves: Sequence[LeafGradient]) -> dict[int, Node]:
        """Add inputs for gradients of earlier micro-batches: index of a leaf -> input."""
        held = (at for at, leaf in enumerate(leaves) if leaf.accumulated)
        return {at: self.placeholder("accumulated", self._like_earlier(leaves[at])) for at in held}

    def _like_earlier(self, leaf: LeafGradient) -> torch.Tensor:
        if leaf.shard is None:
            return self.results[leaf.place].meta["val"]  # type: ignore[no-any-return]
        size, _, dtype = leaf.shard
        with self.mode:
            return torch.empty(size, dtype=dtype, device=self.results[leaf.place].meta["val"].device)

    def _fake(self, like: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def last_of(self, nodes: Sequence[Node]) -> Node:
        """Return the last of these nodes in the backward, or its last input."""
        found = [node for node in nodes if node in self.order and node is not self.output]
        last = max(found, key=self.order.__getitem__, default=None)
        return self.inputs[-1] if last is None or last.op == "placeholder" else last

    def read_through(self, parameter: Node, views: Sequence[Node]) -> None:
        """Read saved views of a parameter through the parameter itself, so that its update comes after them."""
        for view in views:
            value = view.meta["val"]
            with self.before(self.inputs[-1].next):
                layout = list(value.shape), list(value.stride()), value.storage_offset()
                seen = self.graph.call_function(torch.ops.aten.as_strided.default, (parameter, *layout))
            seen.meta["val"] = value
            self.order[seen] = -1
            view.replace_all_uses_with(seen)

    def settled(self, gradient: Node, leaf: LeafGradient, earlier: Node | None, behind: Node | None = None) -> Node:
        """Return a leaf's whole gradient: reduced, and with that of earlier micro-batches.

        It is the last node that is needed for it, after `behind`.
        """
        last = self.last_of([gradient] if behind is None else [gradient, behind])
        with self.before(last.next):
            if leaf.reduced is not None:
                value = gradient.meta["val"]
                size, reduced, dtype = leaf.shard or (tuple(value.shape), value.dtype, value.dtype)
                given = leaf.reduced, size, reduced
                node = self.graph.call_function(torch.ops.dcompile_step.reduced.default, (gradient, *given))
                with self.mode:
                    node.meta["val"] = step_ops.reduced(value, *given)
                if node.meta["val"].dtype != dtype:
                    (node,) = self.traced(lambda new: (new.to(dtype),), (node,), dtype)
                if earlier is None:
                    return node
                gradient = node
            if earlier is not None:
                return self.traced(lambda old, new: (old + new,), (earlier, gradient), "sum")[0]
            return self.traced(lambda new: (torch.ops.aten.alias(new),), (gradient,), "alias")[0]

    def finished(
        self, gradients: Sequence[Node], vector: Node, clips: float | None, ranks: str, unscales: bool
    ) -> tuple[list[Node], list[Node], Node | None]:
        """Unscale and clip gradients; return them, the step's further results, and whether one was not finite."""
        given, norms, flags = list(gradients), list[Node](), list[Node]()
        none = [] if given else self.traced(lambda numbers: ((numbers[0] * 0).float(),), (vector,), "none")
        if unscales:
            flags = [self.traced(_count_unsound, (x,), "unsound")[0] for x in given] or none
            (inverse,) = self.traced(lambda numbers: (numbers[-2],), (vector,), "inverse")
            given = self._multiplied(given, inverse)
        if clips is not None:
            norms = [self.traced(lambda x: (torch.linalg.vector_norm(x),), (x,), "norm")[0] for x in given] or none
        results = self.agreed(norms, flags, ranks)
        if clips is not None:
            added, at = clips, -3 if unscales else -1

            def scale(vector: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor]:
                return (torch.clamp(vector[at].to(norm.dtype) / (norm + added), max=1.0),)

            given = self._multiplied(given, self.traced(scale, (vector, results[0]), (added, at))[0])
        measured = self.traced(lambda *x: (torch.stack(x),), (*(norms or flags), results[0]), "measured")
        return given, [*measured, *results[1:]], results[-1] if unscales else None

    def _multiplied(self, gradients: Sequence[Node], factor: Node) -> list[Node]:
        return [self.traced(lambda x, f: ((x * f).to(x.dtype),), (x, factor), "scale")[0] for x in gradients]

    def chosen(self, vector: Node, more: int) -> Node:
        """Return the numbers of this step, of which there are two kinds, and `more` behind them."""
        count = (vector.meta["val"].numel() - more) // 2

        def choose(numbers: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.where(numbers[-1] > 0, numbers[count : 2 * count], numbers[:count]),)

        return self.traced(choose, (vector,), "chosen")[0]

    def update_all(
        self,
        updates: Sequence[ParameterUpdate],
        gradients: Sequence[Node],
        targets: Sequence[tuple[Node, Sequence[Node]]],
        vector: Node,
        found: Node | None = None,
    ) -> None:
        """Insert updates: each after its gradient, or all at the end if one trace is for all of them.

        They change nothing if `found` is not 0.
        """
        flat = [[parameter, *state] for parameter, state in targets]
        if updates and updates[0].trace.is_joint:
            self._update(updates[0], gradients, [x for each in flat for x in each], vector, self.output, found)
            return
        for update, gradient, own in zip(updates, gradients, flat, strict=True):
            behind = self.output if gradient.op == "placeholder" or found is not None else gradient.next
            self._update(update, [gradient], own, vector, behind, found)

    def agreed(self, norms: Sequence[Node], flags: Sequence[Node], ranks: str) -> list[Node]:
        """Return the common norm of what has these norms, and 1 if a flag is not 0, else 0; each if there are any.

        On all ranks of a group if it has a name, by one all-reduce.
        """
        total = self.traced(lambda *x: (torch.linalg.vector_norm(torch.stack(x)),), norms, "total") if norms else []
        count = self.traced(lambda *x: (torch.stack(x).sum(),), flags, "count") if flags else []
        dtype = total[0].meta["val"].dtype if total else torch.float32
        if ranks:
            squares = [self.traced(lambda x: (x.float().square(),), (norm,), "square")[0] for norm in total]
            (sums,) = self.traced(lambda *x: (torch.stack(x),), (*squares, *count), "parts")
            start, wait = compat.groups.functional_sum()
            for target, given in ((start, ("sum", ranks)), (wait, ())):
                value = sums.meta["val"]
                sums = self.graph.call_function(target, (sums, *given))
                sums.meta["val"] = self._fake(value)
            if total:
                total = self.traced(lambda x: (x[0].sqrt().to(dtype),), (sums,), ("root", dtype))
            count = self.traced(lambda x: (x[-1],), (sums,), "last") if count else []
        found = [self.traced(lambda x: ((x > 0).float(),), (each,), "found")[0] for each in count]
        return [*total, *found]

    def _update(
        self,
        update: ParameterUpdate,
        gradients: Sequence[Node],
        targets: Sequence[Node],
        vector: Node,
        behind: Node,
        found: Node | None,
    ) -> None:
        """Insert one update, and the copies into what it changes, which then keeps its value if `found` is not 0."""
        last = update.number + max(1, len(update.trace.tape.slots))
        with self.before(behind):
            numbers = self.graph.call_function(torch.ops.aten.slice.Tensor, (vector, 0, update.number, last))
            with self.mode:
                numbers.meta["val"] = vector.meta["val"][update.number : last]
            new = self.traced(update.trace.gm, (*gradients, *targets, numbers), id(update.trace))
            for target, value in zip(targets, new, strict=True):
                if value is not target:
                    if found is not None:
                        (value,) = self.traced(_kept, (found, target, value), "kept")
                    written = self.graph.call_function(torch.ops.aten.copy_.default, (target, value))
                    written.meta["val"] = target.meta["val"]

    def traced(self, function: Callable[..., Any], given: Sequence[Node], name: Any) -> list[Node]:
        """Insert a function's operations here; return the nodes of its results. `name` tells functions apart."""
        values = [node.meta["val"] for node in given]
        key = name, *((tuple(x.shape), x.stride(), x.dtype) for x in values)
        if key not in self.known:
            # tracing tells its inputs apart by identity
            self.known[key] = compat.aot.traced_again(function, [*map(self._fake, values)], {})
        graph = self.known[key].graph
        made: dict[Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), given, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                arguments, keywords = torch.fx.map_arg((node.args, node.kwargs), made.__getitem__)
                made[node] = self.graph.call_function(node.target, arguments, keywords)
                made[node].meta = dict(node.meta)
        results: Any = graph.output_node().args[0]
        return [made[node] for node in results]
