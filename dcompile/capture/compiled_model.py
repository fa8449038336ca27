"""State of one compiled model: its settings, adapter, graphs and variants; what the receipt is made from."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.adapters.plain import PlainAdapter, new_subject
from dcompile.capture.agreement.capture_digest import compare_captures
from dcompile.capture.call_state import CapturedGraph, Invocation, Variant
from dcompile.capture.passes.dynamo.grouped_experts import group_loop
from dcompile.capture.passes.dynamo.sync_batch_norm import sync_batch_norm
from dcompile.capture.services import Peers, Services, ShardedParameters
from dcompile.config import Config
from dcompile.errors import OptionError
from dcompile.gc_pause import without_collecting


@dataclass(frozen=True)
class Settings:
    """What one compile call asked for."""

    config: Config
    fullgraph: bool = False
    dynamic: bool | None = None
    guard_filter_fn: Callable[..., Any] | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    """What else torch.compile was asked for that Dynamo alone looks at; see `compat.dynamo.limits`."""

    def __post_init__(self) -> None:
        if self.dynamic is False and self.config.size_classes:
            raise OptionError("dcompile: size_classes is about sizes that vary; leave it out, or dynamic=False")


class CompiledModel:
    """One compile call's state. It holds neither the module nor its parameters: cached code may outlive them."""

    def __init__(self, settings: Settings, services: Services) -> None:
        self.settings = settings
        self.services = services
        self.adapter: PlainAdapter = PlainAdapter()
        self._own_compared: dict[str, set[tuple[str, ...]]] = {}
        """Name of a process group -> plans of the model's own collectives that its ranks have compared."""
        self.sync = GradientSync(self.adapter)
        self.sync.model = self
        self.peers: Peers = services.meet(None)
        self.graphs: list[CapturedGraph] = []
        self.shards: ShardedParameters | None = None
        """Sharded parameters that programs gather."""
        self.between: EagerRegionMonitor | None = None
        """What looks after eager code between these programs."""
        self.variants: dict[tuple[int, ...], Variant] = {}
        self.newest: Variant | None = None
        self.eager_calls = 0
        """Calls of which no graph was compiled."""
        self.graph_breaks = 0
        self.breaks: list[tuple[str, list[Any]]] = []
        """What they are, with those that end our own outermost frame: the reason, and the user's frames."""
        self._left_alone = False
        """Whether Dynamo has left our own outermost frame to eager, with a reason or without."""
        self.compile_seconds = 0.0
        self.calls: dict[int, list[Invocation]] = {}
        """For each thread that is in some, by its number: the calls that it is in, the innermost last."""
        self.inside: list[CompiledModel] = []
        """Modules that a call reaches and DDP or FSDP keeps in step: each is compiled by itself."""
        self.pool: dict[Any, Any] = {}
        """Memory of gradient buckets, which the graphs share."""
        self._refusal: str | None = None
        self._reported: set[bool | None] = set()
        """Kinds of steps that were reported: training or not. None: that nothing was compiled."""
        self._owes_report = False

    def adopt(self, sync: GradientSync) -> None:
        """Start over under another adapter, that of `sync`: graphs captured so far carry no sync flag for it."""
        self.adapter, self.sync, sync.model = sync.adapter, sync, self
        self.peers = self.services.meet(self.adapter.group)
        self.graphs, self.variants, self.newest = [], {}, None
        self._refusal, self.pool = None, {}
        self.shards, self.between = sync.take_over()
        self._reported, self._owes_report = set(), False

    def has_moved(self) -> bool:
        """Whether gradients are to be reduced over other ranks from now on: DDP has its own reducer back for that.

        Whoever takes it over next starts as at first, and all of these ranks with it.
        """
        if not self.adapter.has_moved():
            return False
        self.adapter.leave("it has another process group")
        return True

    def is_outdated(self) -> bool:
        """Whether all graphs are to be captured anew, for the same adapter: what gradients are reduced has changed."""
        if not self.adapter.has_new_parameters():
            return False
        self.sync.forget_buckets()
        return bool(self.graphs)

    # --- forward ---

    @contextlib.contextmanager
    def compiling(self, code: Any, entry: Any, late_sizes: bool) -> Iterator[None]:
        """Around Dynamo's work on the frame of one code object; `entry` is our own outermost one.

        With `late_sizes`, operations whose results' sizes depend on values are captured.
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
            )
            looking = contextlib.nullcontext() if self.between is None else self.between.resting()
            busy, one = self.peers.busy("capturing"), self._guard_on_module_identity(code is entry)
            with looking, busy, settings, one, without_collecting():
                yield
        finally:
            self.compile_seconds += time.perf_counter() - began
            self.breaks += compat.dynamo.graph_breaks(known)
            # a break inside the model also ends our outermost frame, where it is found first: count it once
            if code is not entry:
                self.graph_breaks += max(compat.dynamo.graph_break_count() - breaks, 0)

    def _guard_on_module_identity(self, outermost: bool) -> contextlib.AbstractContextManager[None]:
        """Graphs know which parameters they reduce: those of a frame that several layers run serve one of them each."""
        adapter = self.adapter
        if outermost or not adapter.synchronizes:
            return contextlib.nullcontext()
        return compat.guards.guard_tensor_identity(lambda value: adapter.number_of(value) is not None)

    def refuse(self, reason: str) -> None:
        """A graph that is being compiled cannot run with virtual parameters: nothing of it will run."""
        self._refusal = self._refusal or reason

    def compiled(self, code: Any, entry: Any, whole: bool) -> None:
        """A frame was compiled, `whole` or with code that stays eager. Raises GivenBack before any of it runs.

        If the outermost frame is whole, all of the model is in it; what else comes by is torch's own.
        """
        self._left_alone |= code is entry and not whole
        if self.between is None:
            return
        if self._refusal is not None:
            self.between.refuse(self._refusal)
        if code is entry and not whole:
            self.between.start()

    def begin(self, inside_ddp: bool) -> Invocation:
        """A call starts."""
        self.peers.enter()
        call = Invocation(inside_ddp)
        self.sync.begin_call(call)
        self.calls.setdefault(threading.get_ident(), []).append(call)
        return call

    def end(self, call: Invocation) -> None:
        """A call is through, or has raised."""
        stack = self.calls[threading.get_ident()]
        stack.remove(call)
        if not stack:
            del self.calls[threading.get_ident()]

    def is_running(self) -> bool:
        """Whether this thread is in a call of the model already."""
        return threading.get_ident() in self.calls

    def compares_captures(self) -> bool:
        """Whether a graph that is captured now may be among those that ranks are to compare.

        A rank may call a DDP model as often as it likes, alone, before the first backward that reduces: which graphs
        are compared shows then. A call of sharded parameters is a call of every rank. Those of the first one for
        training are compared.
        """
        adapter, stack = self.adapter, self.calls.get(threading.get_ident())
        if adapter.group is None or self.settings.config.distributed == "stock" or not stack:
            return False
        return self.sync.compares_captures()

    def compare_captures(self, graphs: Iterable[CapturedGraph]) -> None:
        """See that every rank has captured the same for these graphs: all come, and all raise if they have not."""
        graphs = list(graphs)
        compare_captures(self, [graph.captured for graph in graphs])
        for graph in graphs:
            graph.captured = []

    def record_forward(self, graph: CapturedGraph) -> torch.Tensor | None:
        """Record that a graph's forward runs in the current call; whether its backward is to reduce, as a token.

        None where the adapter carries no such token.
        """
        stack = self.calls.get(threading.get_ident())
        if not stack:  # nobody calls through us (a plain backend, a whole frame): each graph is a call of its own
            key = (graph.number,)
            known = self.variants.get(key)
            if known is None:
                known = self.variants.setdefault(key, Variant(key, graph.training))
            self.newest = known
            return self.sync.token(None)
        call = stack[-1]
        call.graphs.append(graph.number)
        self.sync.on_forward(call, graph)
        return self.sync.token(call)

    def give_back(self, adapter: ShardedAdapter, reason: str) -> None:
        """FSDP's own hooks gather and reduce from here on: on every rank, or all raise."""
        for number, group in enumerate(adapter.process_groups()):
            subject = f"use of FSDP's own hooks, group {number}"
            self.services.agree(group, subject, ["parameters and gradients are given back to FSDP"])
        if self.shards is not None:
            self.shards.give_back()
        adapter.restore(reason)
        self.adopt(self.sync.renewed())

    def ran_eagerly(self) -> None:
        """A call went past us, as the adapter wants it."""
        self.eager_calls += 1
        if self.newest is None:
            self.newest = Variant((), training=torch.is_grad_enabled())
            self._report(training=torch.is_grad_enabled())

    def after_call(self, call: Invocation, result: Any) -> None:
        """After a call: note which graphs it ran; if they are new together, look for what they leave out."""
        key = tuple(call.graphs)
        variant = self.variants.get(key)
        if variant is None:
            self.sync.check_result(result)
            variant = self.variants[key] = self._examine(key, result)
        if key:
            self.sync.after_call(variant, call, result)
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
        self.sync.no_graph_ran(call, result)
        nothing = not self.graphs and not self.inside
        if (self.breaks or self._left_alone) and nothing and None not in self._reported:
            self._reported.add(None)
            self.services.first_step(self)

    def agree_on(self, plan: list[str]) -> None:
        """Before the first collective of a program: see that every rank is about to run the same ones.

        A plan that was compared before is not compared again: one rank may compile anew alone (another batch size).
        """
        adapter = self.adapter
        subject = adapter.subject_of(tuple(plan))
        if subject is not None:
            for number, group in enumerate(adapter.process_groups()):
                self.services.agree(group, f"{subject}.{number}" if number else subject, plan)

    def agree_on_own(self, plans: Mapping[str, list[str]]) -> None:
        """The same of the model's own collectives, over each process group that they name, if no plan is theirs too."""
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
        """Everything found so far that speaks against reducing gradients in the compiled graphs."""
        return [reason for variant in self.variants.values() for reason in variant.objections]

    def before_backward(self, graph: CapturedGraph, sync: bool) -> None:
        """Inside a backward, before a graph's backward program runs (and before it is compiled).

        `sync`: whether it is one that every rank runs, if it adds to gradients. Others may be one rank's alone.
        """
        if self.sync.before_backward(graph, sync) and True not in self._reported:
            self._reported.add(True)
            compat.tensors.at_end_of_backward(self._backward_is_through)

    def _backward_is_through(self) -> None:
        """Report the first step; of a backward inside a call (a compiled training step) when the call ends."""
        if self.newest is None or self.is_running():  # none: the engine's threads do not see the caller's calls
            self._owes_report = True
        else:
            self.report()

    def graphs_of_call(self, graph: CapturedGraph) -> list[CapturedGraph]:
        """Those that ran in the call that a graph's backward is of: one in progress, or the newest."""
        running = [tuple(call.graphs) for stack in list(self.calls.values()) for call in reversed(stack)]
        known = [variant.graphs for variant in (self.newest, *reversed(self.variants.values())) if variant is not None]
        found = next((graphs for graphs in (*running, *known) if graph.number in graphs), (graph.number,))
        return [self.graphs[number] for number in found]

    def release(self) -> None:
        """Nobody calls the model any more: keep its graphs no longer than backwards that are still to come do."""
        self.graphs[:] = [weakref.proxy(graph) for graph in self.graphs]

    # --- reports ---

    def _report(self, training: bool) -> None:
        self._reported.add(training)
        self.report()

    def add_inside(self, part: CompiledModel) -> None:
        """A call reaches a module that is compiled by itself: its receipt and profile belong to this one's."""
        if all(known is not part for known in self.inside):
            self.inside.append(part)

    def report(self) -> None:
        """Tell of a first step. With modules inside, the last of them to be through with theirs tells of all."""
        if not self.inside:
            self.services.first_step(self)
