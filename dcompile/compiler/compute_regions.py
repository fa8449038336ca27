"""Compile computation between collectives with another compiler: cut a graph into regions, and insert calls.

A region is as large as collectives allow. Its operations wait for the same all-gathers, follow the same library calls
outside regions, and lead to the same gradient reduction. Library calls outside are the model's own collectives, random
numbers, and in-place changes of inputs. Numbered in order, each of the three only grows along an edge of the graph, so
a region depends only on earlier ones. Views are not operations: each region makes its own views of its inputs.

An operation runs as early as possible, since early computation hides collectives. There are two exceptions. An
operation that waits for nothing runs with its first user; otherwise a backward would start with all its recomputation.
An operation that only one reduction needs runs with the last gradient of that reduction; the region grows, and nothing
starts later.

Where collectives will split a graph's computation is predicted before lowering, by its inputs and outputs.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from dcompile import compat
from dcompile.codegen.lower import all_aten
from dcompile.codegen.lower.fx_nodes import has_effect, is_in_place, op_text, returns_alias, written_arguments
from dcompile.codegen.schedule.order.cost_model import fused_seconds
from dcompile.collectives.contract import ParamInfo, Request
from dcompile.collectives.ddp_all_reduce import lay_out_all
from dcompile.collectives.fsdp_units import holder_of_unit, shard_of, unit_buckets
from dcompile.compat.process_state import precision_settings
from dcompile.compat.sizes import guard_count
from dcompile.config import Config
from dcompile.device_traits import HOST, traits_of
from dcompile.kernel_backends.compile_region import Compiled, Layout, RegionCall, compile_region, region_name
from dcompile.kernel_backends.names import KernelBackend
from dcompile.logs import log
from dcompile.runtime.cache.key import NotCacheable, environment, graph_text
from dcompile.runtime.measure.calibration import device_name
from dcompile.runtime.measure.region_times import RegionTimes, measure_us


@dataclass(frozen=True, slots=True)
class RegionCuts:
    """Collectives by number, in the order in which the graph needs their results or makes their operands."""

    gathers: Mapping[int, int] = field(default_factory=dict)
    """Position of an input -> the all-gather that it comes from, counted from 1."""
    reductions: Mapping[int, int] = field(default_factory=dict)
    """Position of an output -> the reduction of its gradient, counted from 0."""


def region_cuts(request: Request, first_use: Mapping[int, int], ready: Mapping[int, int]) -> RegionCuts:
    """Predict the collectives that the loop passes will insert, by inputs and outputs of the graph.

    `first_use`: position of an input -> place of the first operation that uses it, if any. `ready`: position of an
    output -> place of the operation that makes it. The passes place collectives again, after the steps of the regions.
    Where their choice differs, a collective only waits longer than necessary.
    """
    infos = {info.number: info for info in request.params}
    return RegionCuts(_gathers(request, infos, first_use), _reductions(request, infos, ready))


def _gathers(request: Request, infos: Mapping[int, ParamInfo], first_use: Mapping[int, int]) -> dict[int, int]:
    used = {number: position for position, number in request.gathers if position in first_use}
    params = [infos[number] for number in used]
    places: dict[int, int] = {}
    for param in params:
        unit, place = shard_of(param).unit, first_use[used[param.number]]
        places[unit] = min(place, places.get(unit, place))
    holders = {param.number: holder_of_unit("all_gather", shard_of(param).unit) for param in params}
    buckets = unit_buckets("all_gather", params, places, holders)
    return {used[n]: count for count, (_, bucket) in enumerate(buckets, 1) for n in bucket.params}


def _reductions(request: Request, infos: Mapping[int, ParamInfo], ready: Mapping[int, int]) -> dict[int, int]:
    """Number the reductions in the order of their starts.

    All-reduces keep the order of their buckets, which depends on parameters alone, so none is ready before its
    predecessor. Reduce-scatters come in the order in which they are ready.
    """
    output = {number: at for at, number in request.grads if at in ready and number in infos}
    placed = [*_all_reduces(request, infos, output, ready), *_reduce_scatters(infos, output, ready)]
    placed.sort(key=lambda found: found[0])
    return {output[number]: count for count, (_, members) in enumerate(placed) for number in members}


def _all_reduces(
    request: Request, infos: Mapping[int, ParamInfo], output: Mapping[int, int], ready: Mapping[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """(place at which it can start, parameters) of each of DDP's buckets."""
    if request.rule is None or not output:
        return []
    params = request.params if request.rule.covers_all_params else [infos[number] for number in output]
    buckets, _ = lay_out_all(params, request.rule, {number: f"grad{number}" for number in output})
    places = [max((ready[output[number]] for number in bucket.params), default=-1) for bucket in buckets]
    return [(at, bucket.params) for at, bucket in zip(accumulate(places, max), buckets, strict=True) if bucket.params]


def _reduce_scatters(
    infos: Mapping[int, ParamInfo], output: Mapping[int, int], ready: Mapping[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """(place at which its last gradient is ready, parameters) of each reduction of sharded parameters."""
    params = [infos[number] for number in output if infos[number].shard is not None]
    places: dict[int, int] = {}
    for param in params:
        unit = shard_of(param).unit
        places[unit] = max(ready[output[param.number]], places.get(unit, -1))
    buckets = unit_buckets("reduce_scatter", params, places, {param.number: f"grad{param.number}" for param in params})
    return [(at, bucket.params) for at, bucket in buckets]


Kind = Literal["input", "view", "compute", "single", "output"]


@dataclass(frozen=True, slots=True)
class Region:
    """Operations that another compiler compiles together, as a graph of their own."""

    number: int
    nodes: tuple[Node, ...]
    """Its operations, in graph order."""
    inputs: tuple[Node, ...]
    """Values of the whole graph that it reads."""
    outputs: tuple[Node, ...]
    """Its values that are used outside."""
    graph: GraphModule


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of the first use of each input and of the definition of each output: the input of `region_cuts`."""

    first_use: Mapping[int, int]
    ready: Mapping[int, int]


Order = tuple[float, float, float]
"""(all-gathers waited for, outside calls before it, reduction that it leads to)."""
Cuts = tuple[Mapping[int, int], Mapping[int, int]]
"""`region_cuts.RegionCuts`: all-gather of an input, by position, and reduction of an output."""


class RegionPlan:
    """A graph with its operations sorted into regions. `takes`: whether an operation may be in a region at all."""

    def __init__(self, gm: GraphModule, takes: Callable[[Node], bool]) -> None:
        self.gm = gm
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.kind: dict[Node, Kind] = {}
        for node in self.nodes:
            self.kind[node] = self._kind(node, takes)
        self.inputs = gm.graph.find_nodes(op="placeholder")
        returned: Any = gm.graph.output_node().args[0]
        self.returned: list[Any] = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        self.order: dict[Node, Order] = {}
        """Order of each node, set by `regions`."""

    def places(self) -> Places:
        """Return the positions of each input's first use by an operation, through views, and of each output."""
        first: dict[int, int] = {}
        for position, node in enumerate(self.inputs):
            users = [self.place[user] for user in self._users(node) if self.kind[user] in ("compute", "single")]
            if users:
                first[position] = min(users)
        made = {at: self.root(node) for at, node in enumerate(self.returned) if isinstance(node, Node)}
        return Places(first, {at: self.place[node] if self.kind[node] != "input" else -1 for at, node in made.items()})

    def regions(self, cuts: Cuts) -> list[Region]:
        """Return the regions, in an order in which they can run."""
        self.order = orders = self._orders(cuts)
        computing = [node for node in self.nodes if self.kind[node] == "compute"]
        ends = self._ends(cuts[1], orders)
        number: dict[Order, int] = {}
        count = 0
        found = sorted({orders[node] for node in computing})
        for order, following in zip(found, [*found[1:], None], strict=True):
            number[order] = count
            if following is None or following[:2] != order[:2] or order in ends:
                count += 1
        members: list[list[Node]] = [[] for _ in range(count)]
        for node in computing:
            members[number[orders[node]]].append(node)
        return [self._region(n, nodes) for n, nodes in enumerate(members)]

    # --- kinds of nodes ---

    def _kind(self, node: Node, takes: Callable[[Node], bool]) -> Kind:
        match node.op:
            case "placeholder" | "get_attr":
                return "input"
            case "output":
                return "output"
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            of = self.kind[node.args[0]]
            return "single" if of == "input" else of  # a part has the kind of its whole
        if is_view(node):
            return "view"
        return "compute" if takes(node) else "single"

    def root(self, node: Node) -> Node:
        """Return the base of a view, or of a part of one."""
        while self.kind[node] == "view":
            node = node.all_input_nodes[0]
        return node

    def _views(self, node: Node) -> Iterator[Node]:
        """Yield all views of a value."""
        for user in node.users:
            if self.kind[user] == "view" and user.all_input_nodes[0] is node:
                yield user
                yield from self._views(user)

    def _users(self, node: Node) -> Iterator[Node]:
        """Yield the users of a value, through views."""
        for user in node.users:
            if self.kind[user] == "view" and user.all_input_nodes[0] is node:
                yield from self._users(user)
            else:
                yield user

    # --- the order of operations ---

    def _orders(self, cuts: Cuts) -> dict[Node, Order]:
        """Return the order of each node."""
        before = self._before()
        after: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node, earlier in before.items():
            for other in earlier:
                after[other].append(node)
        leads, serves = self._leads(cuts[1], after, min), self._leads(cuts[1], after, max)
        waits, behind = self._soonest(cuts[0], before)
        last = self._last(cuts[1], waits)
        for node in reversed(self.nodes):
            if self.kind[node] != "compute" and (self.kind[node] != "single" or has_effect(node)):
                continue
            users = [user for n in (node, *self._views(node)) for user in after[n] if self.kind[user] != "view"]
            serves_one = serves[node] == leads[node] < inf
            if serves_one or not waits[node]:
                waits[node] = min([*(waits[user] for user in users), *last.get(node, ())], default=waits[node])
            if serves_one or not behind[node]:
                behind[node] = min((behind[user] - self._is_step(node, user) for user in users), default=behind[node])
        found: dict[Node, Order] = {node: (waits[node], behind[node], leads[node]) for node in self.nodes}
        for node in self.nodes:  # several results of one call are ready at once
            if node.target is operator.getitem and self.kind[node] == "compute":
                found[node] = found[node.all_input_nodes[0]]
        return found

    def _before(self) -> dict[Node, list[Node]]:
        """Return the nodes that must come before each call: its inputs, and those in `_ordering`."""
        ordering = self._ordering()
        calls = [node for node in self.nodes if node.op == "call_function"]
        return {node: [*node.all_input_nodes, *ordering.get(node, ())] for node in calls}

    def _soonest(
        self, gathers: Mapping[int, int], before: Mapping[Node, Sequence[Node]]
    ) -> tuple[dict[Node, int], dict[Node, int]]:
        """Return the last all-gather that each node waits for, and the number of successive outside calls before it."""
        waits = {node: gathers.get(position, 0) for position, node in enumerate(self.inputs)}
        behind: dict[Node, int] = {}
        for node in self.nodes:
            earlier = before.get(node, ())
            waits[node] = max((waits[n] for n in earlier), default=waits.get(node, 0))
            behind[node] = max((behind[n] + self._is_step(n, node) for n in earlier), default=0)
        return waits, behind

    def _is_step(self, node: Node, user: Node) -> bool:
        """Return whether an outside call uses a region's result."""
        return self.kind[user] == "single" and self._is_computed(node)

    def _leads(
        self,
        reductions: Mapping[int, int],
        after: Mapping[Node, Sequence[Node]],
        which: Callable[[Sequence[float]], float],
    ) -> dict[Node, float]:
        """Return the first (`min`) or last (`max`) reduction that needs each node; infinity for other results."""
        found: dict[Node, list[float]] = {node: [] for node in self.nodes}
        for at, node in enumerate(self.returned):
            if isinstance(node, Node):
                found[node].append(reductions.get(at, inf))
        leads: dict[Node, float] = {}
        for node in reversed(self.nodes):
            leads[node] = which([*found[node], *(leads[user] for user in after[node])] or [inf])
        return leads

    def _last(self, reductions: Mapping[int, int], waits: Mapping[Node, int]) -> dict[Node, list[int]]:
        """Return, for each gradient, the all-gather that the last gradient of the same reduction waits for."""
        roots = [(number, self.root(self.returned[at])) for at, number in reductions.items()]
        last: dict[int, int] = {}
        for number, node in roots:
            last[number] = max(waits[node], last.get(number, 0))
        found: dict[Node, list[int]] = {}
        for number, node in roots:
            found.setdefault(node, []).append(last[number])
        return found

    def _is_computed(self, node: Node) -> bool:
        """Return whether a value comes from an operation that may be in a region."""
        return self.kind[self.root(node)] == "compute"

    def _ordering(self) -> dict[Node, list[Node]]:
        """Return the nodes that must come before another one without being its inputs.

        Calls with effects keep their order. Reads of an input stay on their side of a change of that input.
        """
        found: dict[Node, list[Node]] = {}
        readers: dict[Node, list[Node]] = {}
        changed: dict[Node, Node] = {}
        last: Node | None = None
        for node in self.nodes:
            if self.kind[node] not in ("compute", "single") or node.target is operator.getitem:
                continue
            before: list[Node] = []
            read = {self.root(n) for n in node.all_input_nodes}
            before += [changed[n] for n in read if n in changed]
            if self.kind[node] == "single" and has_effect(node):
                before += [last] if last is not None else []
                last = node
                written = {self.root(n) for n in written_arguments(node) or node.all_input_nodes}
                for value in written if is_in_place(node.target) else ():
                    before += readers.get(value, ())
                    changed[value] = node
            for value in read:
                readers.setdefault(value, []).append(node)
            found[node] = before
        return found

    def _ends(self, reductions: Mapping[int, int], orders: Mapping[Node, Order]) -> set[Order]:
        """Return the orders of operations after which a reduction has all its gradients."""
        last: dict[int, Order] = {}
        for at, number in reductions.items():
            node = self.root(self.returned[at])
            if self.kind[node] == "compute":
                last[number] = max(orders[node], last.get(number, orders[node]))
        return set(last.values())

    # --- a region's graph ---

    def _region(self, number: int, nodes: Sequence[Node]) -> Region:
        own = set(nodes)
        inputs: dict[Node, None] = {}
        for node in nodes:
            inputs |= dict.fromkeys(n for n in self._reads(node) if n not in own)
        sizes = self._sizes(nodes, inputs)
        outputs = [node for node in nodes if self._is_used_outside(node, own)]
        graph = _graph_of(self, nodes, (*inputs, *sizes), outputs)
        return Region(number, tuple(nodes), (*inputs, *sizes), tuple(outputs), graph)

    def _reads(self, node: Node) -> Iterator[Node]:
        """Yield the inputs of an operation without views: their bases, and sizes used to make them."""
        for value in node.all_input_nodes:
            if self.kind[value] == "view":
                yield from self._reads(value)
            else:
                yield value

    def _is_used_outside(self, node: Node, own: set[Node]) -> bool:
        users = [user for user in self._users(node) if user not in own]
        return isinstance(node.meta.get("val"), torch.Tensor) and bool(users)

    def _sizes(self, nodes: Sequence[Node], inputs: Mapping[Node, None]) -> list[Node]:
        """Return further graph inputs: sizes that occur in the shapes of the region's tensors."""
        symbols = compat.sizes.symbols_of(n.meta.get("val") for n in (*nodes, *inputs))
        if not symbols:
            return []
        given = compat.sizes.symbols_of(n.meta["val"] for n in inputs if isinstance(n.meta.get("val"), torch.SymInt))
        return [
            node
            for node in self.inputs
            if node not in inputs
            and isinstance(node.meta.get("val"), torch.SymInt)
            and compat.sizes.symbols_of([node.meta["val"]]) & (symbols - given)
        ]


def _graph_of(plan: RegionPlan, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """Copy the operations into a graph of their own, with names independent of their position in the whole graph."""
    graph, made = Graph(), dict[Node, Node]()
    for place, node in enumerate(inputs):
        made[node] = graph.placeholder(f"input{place}")
        made[node].meta = {"val": node.meta.get("val")}

    def taken(node: Node) -> Node:
        if node not in made:  # a view: made inside the region
            made[node] = _copied(graph, node, taken, f"n{len(made)}")
        return made[node]

    for node in nodes:
        made[node] = _copied(graph, node, taken, f"n{len(made)}")
    graph.output(tuple(made[node] for node in outputs))
    gm = GraphModule(torch.nn.Module(), graph)
    gm.meta = {}
    return gm


def _copied(graph: Graph, node: Node, taken: Callable[[Node], Node], name: str) -> Node:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), taken)  # type: ignore[misc, unused-ignore]
    copy = graph.create_node(node.op, node.target, args, kwargs, name=name)
    copy.meta = dict(node.meta)
    return copy


def with_calls(plan: RegionPlan, regions: Sequence[Region], calls: Mapping[int, Any]) -> GraphModule:
    """Replace each region in `calls`, by number, by a call; other regions stay as they were.

    Inputs and outputs keep their positions and names. Units follow the order of the regions; each outside call comes
    before the first region that may need it.
    """
    graph, made = Graph(), dict[Node, Node]()

    def taken(node: Node) -> Node:
        if node not in made:
            made[node] = _copied(graph, node, taken, node.name)
        return made[node]

    for node in plan.nodes:
        if plan.kind[node] == "input":
            made[node] = _copied(graph, node, taken, node.name)
    for unit in _units(plan, regions):
        if isinstance(unit, Region) and unit.number in calls:
            _call(graph, unit, calls[unit.number], made)
        else:
            for node in unit.nodes if isinstance(unit, Region) else (unit,):
                taken(node)
    output = plan.gm.graph.output_node()
    copy = graph.output(torch.fx.map_arg(output.args[0], taken))
    copy.meta = dict(output.meta)
    gm = GraphModule(plan.gm, graph)
    gm.meta = dict(plan.gm.meta)
    return gm


def _units(plan: RegionPlan, regions: Sequence[Region]) -> list[Region | Node]:
    """Return regions and outside calls, in an order in which each follows its dependences.

    An outside call comes right before the first region that may need it.
    """
    keyed: list[tuple[tuple[float, ...], Region | Node]] = []
    of_wait: dict[tuple[float, float], list[tuple[float, int]]] = {}
    for region in regions:
        waits, behind, _ = plan.order[region.nodes[0]]
        last = max(plan.order[node][2] for node in region.nodes)
        of_wait.setdefault((waits, behind), []).append((last, region.number))
        keyed.append(((waits, behind, region.number, 1), region))
    for node in plan.nodes:
        if plan.kind[node] == "single":
            waits, behind, leads = plan.order[node]
            later = [number for last, number in of_wait.get((waits, behind), ()) if last >= leads]
            keyed.append(((waits, behind, min(later, default=len(regions)), 0, plan.place[node]), node))
    keyed.sort(key=lambda entry: entry[0])
    return [unit for _, unit in keyed]


def _call(graph: Graph, region: Region, call: Any, made: dict[Node, Node]) -> None:
    values = tuple(node.meta["val"] for node in region.outputs)
    name = region.outputs[0].name if len(values) == 1 else f"{call.__name__}_results"
    node = graph.create_node("call_function", call, tuple(made[n] for n in region.inputs), name=name)
    if len(values) == 1:
        node.meta["val"] = values[0]
        made[region.outputs[0]] = node
        return
    node.meta["val"] = values
    for place, output in enumerate(region.outputs):
        part = graph.create_node("call_function", operator.getitem, (node, place), name=output.name)
        part.meta["val"] = values[place]
        made[output] = part


def is_view(node: Node) -> bool:
    """Return whether an operation only returns views of its argument."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return (
        node.op == "call_function"
        and returns_alias(node.target)
        and not is_in_place(node.target)
        and str(node.target) not in compat.storage_offsets.FROM_STORAGE
        and all(isinstance(item, torch.Tensor) for item in tensors)
    )


_OUR_OWN = "dcompile"
_KEPT = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def can_compile_in_region(node: Node, custom_ops: bool) -> bool:
    """Return whether an operation is a plain function of tensors: no effect, no dcompile op, sizes known in advance.

    `custom_ops`: whether to accept operators registered outside torch.
    """
    target: Any = node.target
    value = node.meta.get("val")
    tensors = [item for item in (value if isinstance(value, (tuple, list)) else (value,)) if item is not None]
    if not hasattr(target, "_schema") or not tensors or (has_effect(node) and not _draws_nothing(node)):
        return False
    namespace = op_text(target).partition(".")[0]
    if namespace.startswith(_OUR_OWN) or not (custom_ops or namespace in ("aten", "prims")):
        return False
    if any(tag in target.tags for tag in _KEPT) or str(target) in compat.storage_offsets.FROM_STORAGE:
        return False
    return all(isinstance(item, torch.Tensor) and item.layout == torch.strided for item in tensors)


def _draws_nothing(node: Node) -> bool:
    """Return whether an operation is attention with a dropout probability of 0, which draws no random numbers."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names or is_in_place(node.target):
        return False
    place = names.index("dropout_p")
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", 0.0)
    return isinstance(given, (int, float)) and given == 0


@dataclass(frozen=True, slots=True)
class RegionResult:
    """Graph with calls in place of its regions, and refusals of other regions."""

    gm: Any
    calls: Mapping[int, RegionCall]
    refused: Mapping[str, int]
    """Reason -> number of regions."""

    @property
    def names(self) -> tuple[str, ...]:
        """Nodes that represent regions; the program gets them as constants."""
        return tuple(call.__name__ for call in self.calls.values())


class RegionCompiler:
    """Splits graphs into regions and compiles them. Equal regions, as those of equal layers, share one result."""

    def __init__(self, config: Config, backend: KernelBackend) -> None:
        self.config, self.backend = config, backend
        self._made: dict[str, Compiled | str] = {}
        self.guards = 0
        """Total number of guards on sizes that the compiler has added. A program from the cache makes it add them
        again.
        """

    def compile(self, gm: Any, request: Request) -> RegionResult:
        """Replace the graph's regions by calls of compiled code."""
        plan, regions = self._cut(gm, request)
        calls: dict[int, RegionCall] = {}
        refused: Counter[str] = Counter()
        for region in regions:
            cost_us = self._cost_us(region, request)  # first: a compiler may change the graph that it gets
            found = self._made_of(region, request)
            if isinstance(found, str):
                refused[found] += 1
                what = f"{request.name}: region {region.number}, {len(region.nodes)} operations, left: {found}"
                log(self.config, "kernels", logging.INFO, what)
            else:
                calls[region.number] = self._call(region, request, found, cost_us)
        text = f"{request.name}: {len(calls)} of {len(regions)} regions by {self.backend}"
        text += f", with {len(request.region_us)} measured times" if request.region_us else ""
        log(self.config, "kernels", logging.INFO, text)
        return RegionResult(with_calls(plan, regions, calls), calls, refused)

    def measure(self, gm: Any, request: Request, times: RegionTimes) -> tuple[tuple[str, float], ...]:
        """Return (key, microseconds of a call) of each region that can be measured, for `Request.region_us`.

        Regions with symbolic sizes or refused ones have none. Equal regions have one key.
        """
        found: dict[str, float | None] = {}
        for region in self._cut(gm, request)[1]:
            key = self._time_key(region, request)
            if key is not None and key not in found:
                found[key] = times.time_us(key, functools.partial(self._measured_us, region, request))
        return tuple(sorted((key, us) for key, us in found.items() if us is not None))

    def load(self, gm: Any, request: Request, names: Collection[str]) -> dict[str, RegionCall] | None:
        """Compile the regions of a program from the cache again. None if the compiler refuses one now."""
        _, regions = self._cut(gm, request)
        found: dict[str, RegionCall] = {}
        for region in regions:
            if region_name(region.number) in names:
                made = self._made_of(region, request)
                if isinstance(made, str):
                    return None
                found[region_name(region.number)] = self._call(region, request, made)
        return found if found.keys() == set(names) else None

    def _cut(self, gm: Any, request: Request) -> tuple[RegionPlan, list[Region]]:
        row = self.backend.row
        plan = RegionPlan(gm, lambda node: can_compile_in_region(node, row.custom_ops))
        places = plan.places()
        cuts = region_cuts(request, places.first_use, places.ready)
        return plan, [region for region in plan.regions((cuts.gathers, cuts.reductions)) if region.outputs]

    def _cost_us(self, region: Region, request: Request) -> float:
        """Time of a region in microseconds: measured if it was, else estimated by the cost model."""
        measured = dict(request.region_us).get(self._time_key(region, request) or "") if request.region_us else None
        return _estimate_us(region, request) if measured is None else measured

    def _time_key(self, region: Region, request: Request) -> str | None:
        """Name of a region's measured time, the same on all ranks of a kind; None if there is none."""
        text = _text_of(region.graph)
        if text is None:
            return None
        around = (*(f"{what} {value}" for what, value in environment().items()), device_name(_device(region.graph)))
        lines = ("time of a region", f"{self.backend}", f"{request.kind != 'inference'}", *around, text)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _measured_us(self, region: Region, request: Request) -> float | None:
        layouts = [_layout(node.meta["val"]) for node in region.graph.graph.find_nodes(op="placeholder")]
        results = sum(node.meta["val"].nbytes for node in region.outputs)
        device = _device(region.graph)
        made = self._made_of(region, request)
        if isinstance(made, str):
            return None
        return measure_us(made, [layout for layout in layouts if layout is not None], results, device)

    def _made_of(self, region: Region, request: Request) -> Compiled | str:
        """Compiled code of a region, or the reason for a refusal; compiled once for all equal regions."""
        text = _text_of(region.graph)
        if text is None:
            return self._ask(region, request)
        text = f"{_device(region.graph)}\n{text}"  # code may be for one of several GPUs
        key = hashlib.sha256(f"{request.kind != 'inference'}\n{text}".encode()).hexdigest()
        if key not in self._made:
            self._made[key] = self._ask(region, request)
        return self._made[key]

    def _ask(self, region: Region, request: Request) -> Compiled | str:
        before = guard_count(region.graph)
        made = compile_region(self.backend, region.graph, request.kind != "inference")
        added = guard_count(region.graph) - before
        self.guards += added
        if added and request.kind == "backward":  # its forward has run already, so nothing would check them
            return "it asks for guards on symbolic sizes"
        return made

    def _call(self, region: Region, request: Request, made: Compiled, cost_us: float = 0.0) -> RegionCall:
        what = f"region {region.number} of {request.name}, {len(region.nodes)} operations, by {self.backend.name}"
        layouts = [_layout(node.meta["val"]) for node in region.outputs]
        return RegionCall(region.number, self.backend.name, made, layouts, what, cost_us)


def _estimate_us(region: Region, request: Request) -> float:
    """Estimated time of a region by the cost model, in microseconds."""
    program, _ = all_aten.lower(region.graph, f"region{region.number}")
    return round(fused_seconds(program, request.figures) * 1e6, 3)


def _device(gm: Any) -> torch.device:
    """Device that a region computes on: that of its first tensor which is not on the host, if there is one."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return min(devices, key=lambda device: traits_of(device.type).is_host, default=torch.device(HOST))


def _layout(value: torch.Tensor) -> Layout | None:
    """Required layout of a result; None if it depends on the call."""
    if not compat.sizes.is_fixed(value):
        return None
    return tuple(value.shape), tuple(value.stride()), value.dtype


def _text_of(gm: Any) -> str | None:
    """Text that equal regions share; None if some part of a region has no text.

    None with symbolic sizes, too: guards that a compiler adds for those belong to one graph only.
    """
    if compat.sizes.symbols_of(node.meta.get("val") for node in gm.graph.nodes):
        return None
    settings = (
        torch.get_num_threads(),
        precision_settings(),
        torch.are_deterministic_algorithms_enabled(),
    )
    values = (node.meta.get("val") for node in gm.graph.nodes)
    devices = [value.device.type for value in values if isinstance(value, torch.Tensor)]
    try:
        return "\n".join((*map(str, settings), *devices, *graph_text(gm)))
    except NotCacheable:
        return None
