"""Choose, under a budget of memory, which values a forward saves for its backward; the backward recomputes the others.

The partitioner's own choice is the quickest plan: it saves what is not nearly free to recompute. From there, values are
dropped one after another, those first whose recomputation takes the least time for their bytes, with all operations
that then run again. Among equal ones, the earliest of the forward goes first: its backward comes last, when little else
is left. Each step of this order is a plan, and the result is the first one whose peak is within the budget. So a larger
budget never gives a slower plan. Dropping by time over bytes is the heuristic of Kirisame et al., "Dynamic Tensor
Rematerialization" (ICLR 2021), applied ahead of time and without staleness. The peak is that of a simulated step.

Guarantees: every value that the backward reads is saved, an input, or recomputed by operations that give the same
values again. The plan depends only on the graph, the budget and the figures, so it is the same on every rank.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from dcompile import compat
from dcompile.capture.passes.joint.saved_values import is_view
from dcompile.ir.buffers import Buffer
from dcompile.ir.library_ops import extern_flops
from dcompile.ir.nodes import Extern, View
from dcompile.machine_model import Figures

PLANS_AT_ONCE = 48
"""Parts of equal bytes into which the order of dropped values is divided to look for the first plan that fits."""


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What a plan is made for."""

    budget_bytes: int
    """Bytes that the step may allocate at its peak, above what exists when the forward begins."""
    figures: Figures
    sharded: frozenset[str] = frozenset()
    """Names of placeholders that are gathered before their first use, and freed after their last one."""
    scattered: frozenset[str] = frozenset()
    """Names of their gradients, which are reduced and freed at once."""
    gathered_ahead_bytes: int = 0
    """Bytes of parameters and gradients of other units that are gathered, or wait to be reduced, at any time."""


@dataclass(frozen=True, slots=True)
class Partition:
    """What the partitioner knows of a joint graph, and how it would cut it."""

    forward: frozenset[Node]
    """Nodes that the forward's results, or the backward, need from the forward."""
    backward: frozenset[Node]
    """Nodes that depend on gradients of results."""
    saved: tuple[Node, ...]
    """Values that it would save, with inputs and sizes that the backward reads."""
    checkpointed: tuple[Node, ...]
    """The same if it recomputes what the user has marked to be recomputed."""
    is_fused: Callable[[Node], bool]
    """Whether an operation becomes part of a loop, so that its result need not be in memory."""
    may_rerun: Callable[[Node], bool]
    """Whether an operation may run again: it draws no numbers, exchanges nothing, and has no other effects."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Values that a forward saves, and what the step is predicted to take."""

    saved: tuple[Node, ...]
    saved_bytes: int
    peak_bytes: int
    """Above what exists when the forward begins."""
    recompute_s: float
    """Time of recomputed operations, by the cost model, beyond those that are recomputed without a budget."""
    default_bytes: int
    """Peak of the partitioner's own plan, without the user's checkpoints."""
    within_budget: bool
    regions: tuple[int, int]
    """(checkpointed regions none of whose library calls are recomputed, all regions)."""

    def note(self, budget: str, peak_bytes: int, budget_bytes: int) -> str:
        """Describe the plan in a line for the receipt.

        `budget`: how the user gave it. `peak_bytes` is the predicted peak with all that exists before a step.
        """
        kept, regions = self.regions
        said = f"memory_budget={budget}: peak of {mebibytes(peak_bytes)} expected, of {mebibytes(budget_bytes)}; "
        if regions:
            said += f"checkpoints: {kept} of {regions} regions kept; "
        said += f"{mebibytes(self.saved_bytes)} saved for the backward, {1e3 * self.recompute_s:.1f} ms recomputed"
        if not self.within_budget:
            said += "; no plan is within the budget, so this is the one with the least peak"
        return said


def mebibytes(nbytes: int) -> str:
    """Return bytes as text in MiB."""
    return f"{nbytes / 2**20:.0f} MiB"


def plan_saved_values(partition: Partition, nodes: Sequence[Node], request: MemoryRequest) -> MemoryPlan:
    """Return the quickest plan whose peak is within the budget, or the plan with the least peak."""
    graph = _Graph(nodes, partition, request)
    states = _Order(graph).states()
    cache: dict[int, int] = {}

    def peak(number: int) -> int:
        if number not in cache:
            cache[number] = graph.peak_bytes(states[number].saved)
        return cache[number]

    number = _first_within(states, peak, request.budget_bytes)
    chosen, peak_bytes, extra_s = states[number].saved, peak(number), states[number].extra_s
    if peak_bytes > request.budget_bytes:  # the user's checkpoints are an upper bound
        theirs = frozenset(partition.checkpointed)
        if (least := graph.peak_bytes(theirs)) < peak_bytes:
            chosen, peak_bytes, extra_s = theirs, least, graph.seconds_between(states[0].saved, theirs)
    return MemoryPlan(
        graph.with_inputs(chosen),
        graph.bytes_of(chosen),
        peak_bytes,
        extra_s,
        peak(0),
        peak_bytes <= request.budget_bytes,
        graph.regions_kept(chosen),
    )


def _first_within(states: Sequence[_State], peak: Callable[[int], int], budget: int) -> int:
    """Return the number of the first state whose peak is within the budget, else that with the least peak.

    Only the ends of parts are tried, and then the states of the first part whose end fits.
    """
    ends = _parts(states)
    begin = 0
    for end in ends:
        if peak(end) <= budget:
            return next(number for number in range(begin, end + 1) if peak(number) <= budget)
        begin = end + 1
    return min(ends, key=peak)


def _parts(states: Sequence[_State]) -> list[int]:
    """Return the last state of each part of equal bytes; the first state is a part by itself."""
    most, least = states[0].saved_bytes, states[-1].saved_bytes
    step = max(1, (most - least) // PLANS_AT_ONCE)
    ends, limit = [0], most - step
    for number, state in enumerate(states[1:], 1):
        if state.saved_bytes <= limit or number == len(states) - 1:
            ends.append(number)
            limit = state.saved_bytes - step
    return ends


# --- the graph --------------------------------------------------------------------------------------------------------


class _Graph:
    """A joint graph with bytes, times and memory of its nodes."""

    def __init__(self, nodes: Sequence[Node], partition: Partition, request: MemoryRequest) -> None:
        self.partition, self.request = partition, request
        self.nodes = [node for node in nodes if node.op != "output"]
        self.place = {node: place for place, node in enumerate(self.nodes)}
        (output,) = (node for node in nodes if node.op == "output")
        self.results = frozenset(node for node in output.all_input_nodes if node not in partition.backward)
        self.gradients = frozenset(node for node in output.all_input_nodes if node in partition.backward)
        self.bytes = {node: _nbytes(node) for node in self.nodes}
        self.root = self._roots()
        fused, figures = partition.is_fused, request.figures
        self.picoseconds = {node: round(1e12 * _seconds(node, figures, fused(node))) for node in partition.forward}
        self.roots_needed = [
            node
            for node in self.nodes
            if node not in partition.backward and any(user in partition.backward for user in node.users)
        ]

    def _roots(self) -> dict[Node, Node]:
        """Return node -> the node whose memory it is in."""
        root: dict[Node, Node] = {}
        for node in self.nodes:
            looks = is_view(node) and node.all_input_nodes
            part = node.target is operator.getitem and isinstance(
                node.all_input_nodes[0].meta.get("val"), (tuple, list)
            )
            root[node] = root[node.all_input_nodes[0]] if looks and not part else node
        return root

    def is_materialized(self, node: Node) -> bool:
        """Whether a value is in memory: not if loops alone compute and read it."""
        if not self.partition.is_fused(node):
            return True
        return not all(self.partition.is_fused(user) or is_view(user) for user in node.users)

    def recomputed(self, saved: frozenset[Node]) -> set[Node]:
        """Return the operations of the forward that a backward runs again if these values are saved."""
        found, waiting = set[Node](), list(self.roots_needed)
        while waiting:
            node = waiting.pop()
            if node in saved or node in found or node.op == "placeholder":
                continue
            found.add(node)
            waiting += node.all_input_nodes
        return found

    def with_inputs(self, saved: frozenset[Node]) -> tuple[Node, ...]:
        """Return saved values in the graph's order, with inputs and sizes from which others are recomputed."""
        recomputed = self.recomputed(saved)
        inputs = {node for one in recomputed for node in one.all_input_nodes if node.op == "placeholder"}
        inputs |= {node for node in self.roots_needed if node.op == "placeholder"}
        inputs |= {node for node in self.partition.saved if node.op == "placeholder"}
        return tuple(sorted(saved | inputs, key=self.place.__getitem__))

    def bytes_of(self, saved: Iterable[Node]) -> int:
        """Return the bytes of saved values that are no inputs, each memory once."""
        memories = {self.root[node] for node in saved if node.op != "placeholder"}
        return sum(self.bytes[node] for node in memories if node.op != "placeholder")

    def seconds_between(self, default: frozenset[Node], saved: frozenset[Node]) -> float:
        """Return the time of what a plan recomputes more than another."""
        more = self.recomputed(saved) - self.recomputed(default)
        return 1e-12 * sum(self.picoseconds.get(node, 0) for node in more)

    def regions_kept(self, saved: frozenset[Node]) -> tuple[int, int]:
        """Return (checkpointed regions of which a plan recomputes nothing for the budget's sake, all regions)."""
        regions = {compat.aot.checkpointed_by_user(node) for node in self.partition.forward} - {None}
        more = self.recomputed(saved) - self.recomputed(frozenset(self.partition.saved))
        recomputed = {compat.aot.checkpointed_by_user(node) for node in more if self.picoseconds.get(node, 0)}
        return len(regions - recomputed), len(regions)

    # --- peak ---

    def peak_bytes(self, saved: frozenset[Node]) -> int:
        """Simulate a step; return its peak above what exists when the forward begins."""
        forward = [node for node in self.nodes if node in self.partition.forward and node.op != "placeholder"]
        kept = {self.root[node] for node in saved if node.op != "placeholder"} | {self.root[n] for n in self.results}
        kept = {node for node in kept if node.op != "placeholder"}
        first = self._peak(forward, kept, set(), lambda node: self.is_materialized(node) or node in kept)
        backward = self._backward_order(saved)
        ends = {self.root[node] for node in self.gradients if node.name not in self.request.scattered}
        second = self._peak(backward, ends, kept, self.is_materialized)
        return max(first, second) + self.request.gathered_ahead_bytes

    def _backward_order(self, saved: frozenset[Node]) -> list[Node]:
        """Return the backward's operations, each recomputed one just before its first use, as torch orders them."""
        order, done = list[Node](), set(saved)
        for node in self.nodes:
            if node not in self.partition.backward or node.op == "placeholder":
                continue
            waiting, chain = [node], list[Node]()
            seen = set[Node]()
            while waiting:
                one = waiting.pop()
                if one in done or one in seen or one.op == "placeholder":
                    continue
                seen.add(one)
                chain.append(one)
                waiting += one.all_input_nodes
            order += sorted(chain, key=self.place.__getitem__)
            done |= seen
        return order

    def _peak(
        self, order: Sequence[Node], kept: set[Node], before: set[Node], in_memory: Callable[[Node], bool]
    ) -> int:
        """Return the most bytes in memory. `before` exist at the beginning; all but `kept` go after their last use."""
        last = dict[Node, int]()
        for step, node in enumerate(order):
            for value in (node, *node.all_input_nodes):
                last[self.root[value]] = step
        going: list[list[Node]] = [[] for _ in order]
        for value, step in last.items():
            if value not in kept:
                going[step].append(value)
        alive = {value: self.bytes[value] for value in before}
        now = peak = sum(alive.values())
        for step, node in enumerate(order):
            for value in (self.root[node], *map(self.root.__getitem__, node.all_input_nodes)):
                if value in alive:
                    continue
                is_sharded = value.name in self.request.sharded
                arrives = is_sharded if value.op == "placeholder" else value is node and in_memory(node)
                alive[value] = self.bytes[value] if arrives else 0
                now += alive[value]
            peak = max(peak, now)
            for value in going[step]:
                now -= alive.get(value, 0)
                alive[value] = 0
        return peak


def _nbytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not compat.sizes.is_fixed(value):
        return 0
    return int(value.numel() * value.itemsize)


def _seconds(node: Node, figures: Figures, fused: bool) -> float:
    """Return the time of running an operation again: a library call's, or that of writing a loop's result."""
    value = node.meta.get("val")
    if node.op != "call_function" or is_view(node):
        return 0.0
    results = value if isinstance(value, (tuple, list)) else [value]
    tensors = [one for one in results if isinstance(one, torch.Tensor) and compat.sizes.is_fixed(one)]
    nbytes = sum(one.numel() * one.itemsize for one in tensors)
    memory_s = 1e-9 / figures.memory_gbs
    if fused or not tensors:
        return nbytes * memory_s
    nbytes += sum(map(_nbytes, node.all_input_nodes))
    flops, rate = fx_flops(node), figures.rate(str(tensors[0].dtype).removeprefix("torch."))
    rate *= figures.attention if "attention" in str(node.target) else 1.0
    return max(figures.library_us * 1e-6, nbytes * memory_s, flops / rate)


def fx_flops(node: Node) -> int:
    """Floating point operations of a library call in an FX graph; 0 where only its bytes are known."""
    value = node.meta.get("val")
    result = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(result, torch.Tensor):
        return 0

    def plain(arg: Any) -> Any:
        given = arg.meta.get("val") if isinstance(arg, Node) else arg
        if isinstance(given, torch.Tensor):
            return View("", tuple(map(int, given.shape)), tuple(map(int, given.stride())))
        return given if isinstance(given, (int, float, bool, str)) else None

    out = Buffer("out", "float32", tuple(map(int, result.shape)), tuple(map(int, result.stride())))
    kwargs = tuple((name, plain(arg)) for name, arg in node.kwargs.items())
    call = Extern(str(node.target), tuple(map(plain, node.args)), kwargs, ("out",), "alloc")
    return extern_flops(call, {"out": out})


# --- the order in which values are dropped ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _State:
    """A plan: what is saved, and the time of what is recomputed beyond the first plan."""

    saved: frozenset[Node]
    saved_bytes: int
    extra_s: float


@dataclass(slots=True)
class _Order:
    """The greedy order. `rerun`: what the backward recomputes so far; `readers`: node -> candidates that run it."""

    graph: _Graph
    saved: set[Node] = field(init=False)
    rerun: set[Node] = field(init=False)
    chains: dict[Node, set[Node]] = field(init=False, default_factory=dict)
    readers: dict[Node, set[Node]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.saved = set(self.graph.partition.saved)
        self.rerun = self.graph.recomputed(frozenset(self.saved))

    def states(self) -> list[_State]:
        """Return all plans, from the one that saves the most."""
        found, spent = [self._state(0)], 0
        queue: list[tuple[float, int, Node]] = []
        for node in sorted(self.saved, key=self.graph.place.__getitem__):
            self._offer(queue, node)
        while queue:
            price, _, node = heapq.heappop(queue)
            if node not in self.chains or price != self._price(node):
                continue  # dropped, or offered again at another price since
            chain = self.chains.pop(node)
            self.saved.discard(node)
            self.rerun |= chain
            spent += sum(self.graph.picoseconds.get(one, 0) for one in chain)
            found.append(self._state(spent))
            changed = {other for one in chain for other in self.readers.get(one, ())}
            for other in sorted(changed - {node}, key=self.graph.place.__getitem__):
                if other in self.chains:
                    self._offer(queue, other)
        return found

    def _state(self, picoseconds: int) -> _State:
        saved = frozenset(self.saved)
        return _State(saved, self.graph.bytes_of(saved), 1e-12 * picoseconds)

    def _offer(self, queue: list[tuple[float, int, Node]], node: Node) -> None:
        """Put a saved value into the queue with what it would cost to recompute it now, if it can be."""
        if node.op == "placeholder" or not self.graph.bytes[self.graph.root[node]] or node in self.graph.results:
            return
        if compat.aot.is_saved_by_mark(node):
            return
        chain = self._chain(node)
        if chain is None:
            self.chains.pop(node, None)
            return
        self.chains[node] = chain
        for one in chain:
            self.readers.setdefault(one, set()).add(node)
            for source in one.all_input_nodes:  # a saved source may be dropped: then the chain grows
                if source in self.saved:
                    self.readers.setdefault(source, set()).add(node)
        heapq.heappush(queue, (self._price(node), self.graph.place[node], node))

    def _price(self, node: Node) -> float:
        # integers: sums of floats depend on the order of a set, which differs between ranks
        picoseconds = sum(self.graph.picoseconds.get(one, 0) for one in self.chains[node])
        return picoseconds / self.graph.bytes[self.graph.root[node]]

    def _chain(self, node: Node) -> set[Node] | None:
        """Return what would be recomputed in addition if a value was not saved; None if that is impossible."""
        found, waiting = {node}, [node]
        while waiting:
            one = waiting.pop()
            # marked to be saved: a copy of an input that the forward changes, for example
            if not self.graph.partition.may_rerun(one) or compat.aot.is_saved_by_mark(one):
                return None
            for source in one.all_input_nodes:
                if source.op == "placeholder" or source in self.saved or source in self.rerun or source in found:
                    continue
                found.add(source)
                waiting.append(source)
        return found
