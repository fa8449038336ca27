"""State of one compiled model: its settings, adapter, graphs and variants. The receipt is made from it."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.adapters.plain import WATCHED, PlainAdapter, new_subject
from dcompile.capture.call_state import GraphView, Invocation, Variant
from dcompile.capture.capture_digest import compare_captures
from dcompile.capture.memory_budget import MemoryBudget
from dcompile.capture.passes.dynamo.replaced_layers import group_loop, sync_batch_norm
from dcompile.capture.services import Peers, Services, ShardedParameters
from dcompile.capture.train_step.optimizer_step import OptimizerStep
from dcompile.collectives.contract import SharedBuckets
from dcompile.config import Config
from dcompile.errors import OptionError
from dcompile.logs import doing


@dataclass(frozen=True)
class Settings:
    """Arguments of one compile call."""

    config: Config
    fullgraph: bool = False
    dynamic: bool | None = None
    guard_filter_fn: Callable[..., Any] | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of torch.compile that only Dynamo reads; see `compat.dynamo.limits`."""

    def __post_init__(self) -> None:
        if self.dynamic is False and self.config.size_classes:
            raise OptionError("dcompile: size_classes is about sizes that vary; leave it out, or dynamic=False")


def settings_inside(settings: Settings) -> Settings:
    """Return settings for a module inside, without those about shapes of the outer module's arguments."""
    shapes = compat.sizes.NAMES
    return replace(settings, limits={name: value for name, value in settings.limits.items() if name not in shapes})


SIZES = (
    "Batch sizes can be the cause: with activation_memory_budget below 1, each rank needs the same; and under FSDP, "
    "each rank needs rows."
)
"""Why plans of collectives may differ between ranks that run the same code."""


class CompiledModel:
    """State of one compile call. It keeps neither the module nor its parameters alive: cached code may outlive them."""

    def __init__(self, settings: Settings, services: Services) -> None:
        self.settings = settings
        self.services = services
        self.name = ""
        """Name of the module's class or of the function, for people."""
        self.is_function = False
        self.thing: Callable[[], Any] = compat.groups.weak(None)
        """Weak reference to the module or function."""
        self.adapter: PlainAdapter = PlainAdapter()
        self._own_compared: dict[str, set[tuple[str, ...]]] = {}
        """Name of a process group -> plans, already compared by its ranks, of collectives that the model itself calls.
        """
        self.sync = GradientSync(self.adapter)
        self.sync.model = self
        self.peers: Peers = services.connect_peers(None)
        self.graphs: list[GraphView] = []
        self.variants: dict[tuple[int, ...], Variant] = {}
        self.newest: Variant | None = None
        self.eager_calls = 0
        """Number of calls that ran no compiled graph."""
        self.graph_breaks = 0
        self.breaks: list[tuple[str, list[Any]]] = []
        """(reason, user's frames) of each graph break, including those that end dcompile's own outermost frame."""
        self._left_alone = False
        """Whether Dynamo has left dcompile's own outermost frame to eager, with a reason or without."""
        self.compile_seconds = 0.0
        self.calls: dict[int, list[Invocation]] = {}
        """Number of a thread -> its calls in progress, the innermost last."""
        self.inside: list[CompiledModel] = []
        """Modules inside that DDP or FSDP synchronizes and a call has reached: each is compiled by itself."""
        self.shared_buckets = SharedBuckets()
        given = settings.config.memory_budget
        self.budget = MemoryBudget(self, given) if given else None
        """The memory budget, if the user gave one."""
        self.is_replanned = False
        """Whether the next call captures all graphs again, for another memory plan."""
        self.step: OptimizerStep | None = None
        """The optimizer whose updates run in the backward's programs, if the user has named it."""
        self.while_capturing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Context around Dynamo's work on each frame."""
        self._refusal: str | None = None
        self.warned: set[str] = set()
        """Warnings about its training that were logged."""
        self._reported: set[bool | None] = set()
        """Kinds of reported steps: training or not; None for the report that nothing was compiled."""
        self.frames: Callable[[], Any] = lambda: None
        """Weak reference to the compiled code that calls may enter by themselves."""
        self._released: tuple[weakref.ref[GraphView], ...] = ()
        self._owes_report = False

    def leave_optimizer(self) -> bool:
        """Let another model, or nobody, join the optimizer's updates; return whether this one did."""
        step, self.step = self.step, None
        if step is not None:
            step.leave()
        return step is not None

    def adopt(self, sync: GradientSync) -> None:
        """Use another strategy and its adapter, and drop all graphs: they have no token for it."""
        self.adapter, self.sync, sync.model = sync.adapter, sync, self
        self.peers = self.services.connect_peers(self.adapter.group)
        self.graphs, self.variants, self.newest = [], {}, None
        self._refusal, self.shared_buckets = None, SharedBuckets()
        sync.shards, sync.eager_regions = sync.take_over()
        self._reported, self._owes_report = set(), False

    @property
    def shards(self) -> ShardedParameters | None:
        """Sharded parameters that programs gather."""
        return self.sync.shards

    @property
    def eager_regions(self) -> EagerRegionMonitor | None:
        """Monitor of the eager regions between these programs."""
        return self.sync.eager_regions

    def has_moved(self) -> bool:
        """Is another process group to reduce gradients from now on? DDP has its own reducer back then.

        The next adapter starts from its initial state, on all of the new group's ranks.
        """
        if not self.adapter.has_moved():
            return False
        self.adapter.leave("it has another process group")
        return True

    def is_outdated(self) -> bool:
        """Must all graphs be captured again for the same adapter, since the set of reduced gradients has changed?"""
        if not self.adapter.has_new_parameters():
            return False
        self.sync.forget_buckets()
        return bool(self.graphs)

    def plan_again(self) -> None:
        """Drop all graphs; the next call captures them for another memory plan."""
        self.sync.forget_buckets()
        self.graphs, self.variants, self.newest = [], {}, None
        self.is_replanned = True
        if (frames := self.frames()) is not None:
            frames.drop()

    # --- forward ---

    @contextlib.contextmanager
    def compiling(self, code: Any, entry: Any, late_sizes: bool) -> Iterator[None]:
        """Set up and measure Dynamo's work on the frame of one code object; `entry` is dcompile's own outermost one.

        With `late_sizes`, operations with data-dependent result sizes are captured.
        """
        breaks, began = compat.dynamo.graph_break_count(), time.perf_counter()
        known = len(compat.dynamo.graph_breaks())
        try:
            grouping = group_loop if self.settings.config.own_kernels else None
            classes = bool(self.settings.config.size_classes)
            settings = compat.dynamo.tracing_settings(
                True if classes else self.settings.dynamic,
                sync_batch_norm,
                code is entry,
                grouping,
                late_sizes,
                sizes_alone=classes,
                layers_once=self.settings.config.layers_once,
                certain_branches=not self.settings.config.fallback_random,  # eager draws a number in front of each
            )
            resting = contextlib.nullcontext() if self.eager_regions is None else self.eager_regions.resting()
            busy, one = self.peers.busy("capturing"), self._guard_on_module_identity(code is entry)
            hiding = contextlib.nullcontext() if self.step is None else self.step.hiding()
            told = doing(self.settings.config, f"tracing {self.name}")
            with self.while_capturing(), resting, told, busy, settings, one, hiding, without_collecting():
                yield
        finally:
            self.compile_seconds += time.perf_counter() - began
            self.breaks += compat.dynamo.graph_breaks(known)
            # a break inside the model also ends dcompile's outermost frame, where it is found first: count it once
            if code is not entry:
                self.graph_breaks += max(compat.dynamo.graph_break_count() - breaks, 0)

    def _guard_on_module_identity(self, outermost: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that guards on the identity of synchronized parameters.

        A graph reduces gradients of certain parameters, so the graphs of a frame that several layers run must serve one
        layer each.
        """
        adapter = self.adapter
        if outermost or not adapter.synchronizes:
            return contextlib.nullcontext()
        return compat.guards.guard_tensor_identity(lambda value: adapter.number_of(value) is not None)

    def refuse(self, reason: str) -> None:
        """Record why a graph that is being compiled cannot run with virtual parameters; `compiled` then raises."""
        self._refusal = self._refusal or reason

    def compiled(self, code: Any, entry: Any, whole: bool) -> None:
        """Handle a compiled frame, `whole` or with a graph break. Raises FallBackToStock, before the frame runs.

        It raises if a graph cannot run with virtual parameters, or the adapter allows no eager regions. If the
        outermost frame is whole, it contains all of the model; other frames are torch's own.
        """
        self._left_alone |= code is entry and not whole
        if self.eager_regions is None:
            return
        if self._refusal is not None:
            self.eager_regions.refuse(self._refusal)
        if code is entry and not whole:
            self.eager_regions.start()

    def begin(self, inside_ddp: bool, strategy: GradientSync | None = None) -> Invocation:
        """Start a call. `strategy`: that of an equal module, which runs this model's programs."""
        self.peers.enter()
        call = Invocation(inside_ddp, strategy=self.sync if strategy is None else strategy)
        call.strategy.begin_call(call)
        self.calls.setdefault(threading.get_ident(), []).append(call)
        return call

    def end(self, call: Invocation) -> None:
        """End a call that has returned or raised."""
        stack = self.calls[threading.get_ident()]
        stack.remove(call)
        if not stack:
            del self.calls[threading.get_ident()]

    def is_running(self) -> bool:
        """Is this thread inside a call of the model?"""
        return threading.get_ident() in self.calls

    def compares_captures(self) -> bool:
        """May ranks have to compare a graph that is captured now?

        A rank may call a DDP model alone any number of times before the first backward that reduces. Only that backward
        determines which graphs are compared. With sharded parameters, all ranks make every call, and the graphs of the
        first training call are compared.
        """
        adapter, stack = self.adapter, self.calls.get(threading.get_ident())
        if adapter.group is None or self.settings.config.distributed == "stock" or not stack:
            return False
        return self.sync.compares_captures()

    def compare_captures(self, graphs: Iterable[GraphView]) -> None:
        """Check that every rank has captured the same for these graphs: all ranks call this, and raise together."""
        graphs = list(graphs)
        compare_captures(self, [graph.captured for graph in graphs])
        for graph in graphs:
            graph.captured = []

    def record_forward(self, graph: GraphView) -> torch.Tensor | None:
        """Record that a graph's forward runs in the current call; return the token for its backward.

        It is None if the adapter has no tokens.
        """
        stack = self.calls.get(threading.get_ident())
        if not stack:  # calls bypass the entry (plain backend, whole frame): each graph is a call of its own
            key = (graph.number,)
            known = self.variants.get(key)
            if known is None:
                known = self.variants.setdefault(key, Variant(key, graph.training))
            self.newest = known
            return self.sync.token(None)
        call = stack[-1]
        call.graphs.append(graph.number)
        call.strategy.on_forward(call, graph)
        return self.sync.token(call)

    def give_back(self, adapter: ShardedAdapter, reason: str) -> None:
        """Fall back to FSDP's own hooks, on every rank; if ranks disagree, all raise."""
        for number, group in enumerate(adapter.process_groups()):
            subject = f"use of FSDP's own hooks, group {number}"
            self.services.agree(group, subject, ["falls back to stock FSDP for parameters and gradients"])
        if self.shards is not None:
            self.shards.give_back()
        adapter.restore(reason)
        self.adopt(self.sync.renewed())

    def ran_eagerly(self) -> None:
        """Count a call that ran eagerly because the adapter requires it; report the first."""
        self.eager_calls += 1
        if self.newest is None:
            self.newest = Variant((), training=torch.is_grad_enabled())
            self._report(training=torch.is_grad_enabled())

    def after_call(self, call: Invocation, result: Any) -> None:
        """Record which graphs a call ran; for a new combination, check its result and uses outside the graphs."""
        key = tuple(call.graphs)
        variant = self.variants.get(key)
        if variant is None:
            call.strategy.check_result(result)
            variant = self.variants[key] = self._examine(key, result)
        if key:
            call.strategy.after_call(variant, call, result)
        self.newest = variant if key or self.newest is None else self.newest
        if not key:
            self._no_graph_ran(call, result)
        elif not variant.training and False not in self._reported:
            self._report(training=False)
        if self._owes_report:
            self._owes_report = False
            self.report()

    def _examine(self, key: tuple[int, ...], result: Any) -> Variant:
        training = torch.is_grad_enabled() and any(self.graphs[number].training for number in key)
        return Variant(key, training, self.sync.objections_to(key, result) if training else ())

    def _no_graph_ran(self, call: Invocation, result: Any) -> None:
        self.eager_calls += 1
        if compat.dynamo.is_watched():
            self.adapter.eager_reason = WATCHED
        self.sync.no_graph_ran(call, result)
        nothing = not self.graphs and not self.inside
        if (self.breaks or self._left_alone) and nothing and None not in self._reported:
            self._reported.add(None)
            self.services.first_step(self)

    def agree_on(self, plan: list[str]) -> None:
        """Check before a program's first collective that every rank is about to run the same ones.

        Each plan is compared once, since a rank may recompile alone (another batch size).
        """
        adapter = self.adapter
        subject = adapter.subject_of(tuple(plan))
        if subject is not None:
            for number, group in enumerate(adapter.process_groups()):
                self.services.agree(group, f"{subject}.{number}" if number else subject, plan, causes=SIZES)

    def agree_on_own(self, plans: Mapping[str, list[str]]) -> None:
        """Compare the collectives that the model itself calls, in each of their process groups.

        Groups of the adapter are skipped: `agree_on` compares there.
        """
        known = [id(group) for group in self.adapter.process_groups()]
        for name, plan in plans.items():
            group = compat.groups.group_by_name(name)
            if group is None or id(group) in known:
                continue
            subject = new_subject(self._own_compared.setdefault(name, set()), tuple(plan), "model collectives")
            if subject is not None:
                self.services.agree(group, subject, plan)

    # --- backward ---

    def objections(self) -> list[str]:
        """Return all reasons found so far against reducing gradients in the compiled graphs."""
        found = [reason for variant in self.variants.values() for reason in variant.objections]
        if self.settings.config.numerics == "bitwise":
            times = Counter(number for graph in self.graphs for number in {number for _, number in graph.grads})
            if any(count > 1 for count in times.values()):
                found.append("several graphs have parts of a gradient, and numerics='bitwise' adds no parts")
        return found

    def before_backward(self, graph: GraphView, sync: bool) -> None:
        """Prepare, inside a backward, for a graph's backward program, before it is compiled and before it runs.

        `sync`: whether every rank runs this backward if it accumulates gradients. One rank may run others alone.
        """
        if self.sync.before_backward(graph, sync) and True not in self._reported:
            self._reported.add(True)
            if compat.autograd.backward_task() < 0:  # the user has called a grad_fn, outside of any backward
                self._owes_report = True
            else:
                compat.autograd.at_end_of_backward(self._backward_is_through)

    def _backward_is_through(self) -> None:
        """Report the first step; if the backward is inside a call (a compiled training step), report when that ends."""
        if self.newest is None or self.is_running():  # none: the engine's threads do not see the caller's calls
            self._owes_report = True
        else:
            self.report()

    def graphs_of_call(self, graph: GraphView) -> list[GraphView]:
        """Return the graphs of the call that a graph's backward belongs to: one in progress, or the newest."""
        running = [tuple(call.graphs) for stack in list(self.calls.values()) for call in reversed(stack)]
        known = [variant.graphs for variant in (self.newest, *reversed(self.variants.values())) if variant is not None]
        found = next((graphs for graphs in (*running, *known) if graph.number in graphs), (graph.number,))
        return [self.graphs[number] for number in found]

    def release(self) -> None:
        """Keep graphs only by weak references, as nothing calls the model any more; pending backwards hold theirs.

        Graphs that no backward holds are gone, and then nothing is reported any more.
        """
        self._released = tuple(weakref.ref(graph) for graph in self.graphs)
        self.graphs[:] = [weakref.proxy(graph) for graph in self.graphs]

    # --- reports ---

    def _report(self, training: bool) -> None:
        self._reported.add(training)
        self.report()

    def add_inside(self, part: CompiledModel) -> None:
        """Add a module that a call reaches and that is compiled by itself; receipt and profile then include it."""
        if all(known is not part for known in self.inside):
            self.inside.append(part)

    def report(self) -> None:
        """Report a first step. With modules inside, their own reports cover this model."""
        if not self.inside and all(graph() is not None for graph in self._released):
            self.services.first_step(self)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Disable the cyclic garbage collector in this context, since it traverses the many objects of graphs repeatedly.

    For 32 Llama layers, that took 0.7 of 2.4 s of compiling a backward, and a seventh of torch's tracing
    (benchmarks/compile_time.py, llama_32). Objects outside of cycles are freed as usual.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
