"""State of one compiled model: its settings, adapter, graphs and variants; what the receipt is made from."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import FallBackToStock, ShardedAdapter
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.agreement.capture_digest import compare_captures, compare_surroundings
from dcompile.capture.agreement.collective_plan import plan_of
from dcompile.capture.agreement.parameter_use import outside_use, tensors_in
from dcompile.capture.passes.dynamo.grouped_experts import group_loop
from dcompile.capture.passes.dynamo.sync_batch_norm import sync_batch_norm
from dcompile.capture.services import GradientBuckets, Line, Peers, Services, ShardedParameters
from dcompile.collectives.contract import Executable
from dcompile.config import Config
from dcompile.gc_pause import without_collecting

GRADIENTS = "gradients of a model"
"""What ranks disagree on if some leave reducing to DDP."""


@dataclass(frozen=True)
class Settings:
    """What one compile call asked for."""

    config: Config
    fullgraph: bool = False
    dynamic: bool | None = None
    guard_filter_fn: Callable[..., Any] | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    """What else torch.compile was asked for that Dynamo alone looks at; see `compat.dynamo.limits`."""


@dataclass(eq=False)
class Invocation:
    """One call of the compiled model."""

    inside_ddp: bool = False
    sync: bool = False
    token: torch.Tensor | None = None
    """What the graphs of this call leave for their backwards: 1 if these are to reduce gradients; 0 if only where that
    is asked for by hand; -1 if never, as it is done behind them. None: 0.
    """
    graphs: list[int] = field(default_factory=list)
    """Numbers of the graphs that ran in this call, in order."""
    units: set[int] = field(default_factory=set)
    """Of sharded parameters, those that graphs of this call have gradients of."""


@dataclass(eq=False)
class SynchronizedBackward:
    """One backward that reduces gradients."""

    behind: bool
    """Whether it does so when it is through, not in its programs."""
    buckets: list[GradientBuckets] = field(default_factory=list)
    """Of each program, in the order in which they ran."""
    numbers: list[frozenset[int]] = field(default_factory=list)
    """If `behind`: the parameters that each of them has a gradient of."""


@dataclass(frozen=True)
class Variant:
    """The graphs that one kind of call runs (another kind: other shapes, another branch, no_grad)."""

    graphs: tuple[int, ...]
    training: bool
    objections: tuple[str, ...] = ()
    """Parameters that this kind of call uses outside the compiled graphs, and the like."""


class CapturedGraph(Protocol):
    """A Dynamo graph with its programs (`graph_runner.GraphPrograms`), as the state of a model sees it."""

    number: int
    training: bool
    executables: dict[str, Executable]
    notes: list[str]
    fallbacks: Counter[str]
    captured: list[Line]
    later: set[int]

    def accumulates(self) -> bool:
        """Inside its backward: whether that adds to the `.grad` of any parameter."""

    def units(self) -> set[int]:
        """Units of sharded parameters that a backward has gradients of."""


class CompiledModel:
    """One compile call's state. It holds neither the module nor its parameters: cached code may outlive them."""

    def __init__(self, settings: Settings, toolbox: Services) -> None:
        self.settings = settings
        self.toolbox = toolbox
        self.adapter: PlainAdapter = PlainAdapter()
        self.peers: Peers = toolbox.meet(None)
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
        self._tokens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        """That a backward is not to reduce, and that it is, for adapters that are asked at each call."""
        self._synced: dict[int, SynchronizedBackward] = {}
        self._all_idle: GradientBuckets | None = None
        """What calls beside the compiled graphs reduce through."""
        self._flushing: set[tuple[int, int]] = set()
        self._behind: set[int] = set()
        """Backwards whose gradients are reduced at their end."""
        self.pool: dict[Any, Any] = {}
        """Memory of gradient buckets, which the graphs share."""
        self._refusal: str | None = None
        self._compared = False
        """Whether ranks have compared what they captured, and who reduces gradients."""
        self._reported: set[bool | None] = set()
        """Kinds of steps that were reported: training or not. None: that nothing was compiled."""
        self._owes_report = False

    def adopt(self, adapter: PlainAdapter) -> None:
        """Start over under another adapter: graphs captured so far carry no sync flag for it."""
        self.adapter = adapter
        if adapter.carries_sync:
            self._tokens = _token(reduces=False), _token(reduces=True)
        self.peers = self.toolbox.meet(adapter.group)
        self._compared = False
        self.graphs, self.variants, self.newest = [], {}, None
        self.shards, self.between, self._refusal, self._all_idle, self.pool = None, None, None, None, {}
        if isinstance(adapter, ShardedAdapter) and adapter.eligible:
            self.shards = self.toolbox.make_shards(adapter.units, adapter.groups)
            self.between = EagerRegionMonitor(adapter)
        self._reported, self._owes_report = set(), False

    def has_moved(self) -> bool:
        """Whether gradients are to be reduced over other ranks from now on: DDP has its own reducer back for that.

        Whoever takes it over next starts as at first, and all of these ranks with it.
        """
        adapter = self.adapter
        if not isinstance(adapter, DdpAdapter) or not adapter.has_moved():
            return False
        adapter.leave("it has another process group")
        return True

    def is_outdated(self) -> bool:
        """Whether all graphs are to be captured anew, for the same adapter: what gradients are reduced has changed."""
        if not isinstance(self.adapter, DdpAdapter) or not self.adapter.outdated():
            return False
        self._all_idle = None
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
            grouping = None if self.settings.config.kernels == "aten" else group_loop
            settings = compat.dynamo.tracing_settings(
                self.settings.dynamic, sync_batch_norm, code is entry, grouping, late_sizes
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
        if outermost or type(adapter) is PlainAdapter:
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
        adapter = self.adapter
        if inside_ddp and isinstance(adapter, DdpAdapter):
            adapter.before_forward()
            call.sync = adapter.wants_sync()
            if adapter.uneven:  # of its own, where it may turn out that another way is taken
                call.token = _token(call.sync)
            elif call.sync:
                call.token = self._tokens[1]
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
        are compared shows then. A call of sharded parameters is a call of every rank; those of the first one for
        training are compared.
        """
        adapter, stack = self.adapter, self.calls.get(threading.get_ident())
        if adapter.group is None or self.settings.config.distributed == "stock" or not stack:
            return False
        if isinstance(adapter, DdpAdapter):
            return not (self._compared or adapter.uneven)
        return torch.is_grad_enabled() and not any(v.training for v in self.variants.values())

    def compare_captures(self, graphs: Iterable[CapturedGraph]) -> None:
        """See that every rank has captured the same for these graphs: all come, and all raise if they have not."""
        graphs = list(graphs)
        compare_captures(self, [graph.captured for graph in graphs])
        for graph in graphs:
            graph.captured = []

    def ran(self, graph: CapturedGraph) -> torch.Tensor | None:
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
            return self._tokens[0]
        stack[-1].graphs.append(graph.number)
        if self.shards is not None and graph.training:
            self._shares(stack[-1], graph, self.shards)
        return stack[-1].token if stack[-1].token is not None else self._tokens[0]

    @staticmethod
    def _shares(call: Invocation, graph: CapturedGraph, shards: ShardedParameters) -> None:
        """A graph of a call with sharded parameters runs. What two have gradients of, the first one's backward reduces.

        It comes last. That follows from the graphs of calls so far, and their plans are the same on every rank.
        """
        if not call.units:
            shards.forget_parts()
        units = graph.units()
        graph.later |= units & call.units
        call.units |= units

    def give_back(self, adapter: ShardedAdapter, reason: str) -> None:
        """FSDP's own hooks gather and reduce from here on: on every rank, or all raise."""
        for number, group in enumerate(adapter.process_groups()):
            subject = f"use of FSDP's own hooks, group {number}"
            self.toolbox.agree(group, subject, ["parameters and gradients are given back to FSDP"])
        if self.shards is not None:
            self.shards.give_back()
        adapter.restore(reason)
        self.adopt(adapter)

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
            self._look_for_virtual(result)
            variant = self.variants[key] = self._examine(key, call, result)
        if key:
            self._act_on(variant, call, result)
        self.newest = variant if key or self.newest is None else self.newest
        if not key:
            self._no_graph_ran(call, result)
        elif not variant.training and False not in self._reported:
            self._report(training=False)
        if self._owes_report:
            self._owes_report = False
            self.toolbox.first_step(self)

    def _look_for_virtual(self, result: Any) -> None:
        """Raises GivenBack if a parameter itself is returned: Dynamo hands such a thing on past the graph."""
        adapter = self.adapter
        if not isinstance(adapter, ShardedAdapter) or not adapter.eligible:
            return
        numbers = (adapter.number_of(leaf) for leaf in compat.tensors.leaves(result))
        if names := sorted(adapter.param_infos()[number].fqn for number in numbers if number is not None):
            raise FallBackToStock(f"the model returns or changes a parameter in its forward: {', '.join(names)}")

    def _examine(self, key: tuple[int, ...], call: Invocation, result: Any) -> Variant:
        training = torch.is_grad_enabled() and any(self.graphs[number].training for number in key)
        adapter = self.adapter
        if not training or not isinstance(adapter, DdpAdapter):
            return Variant(key, training)
        objections = outside_use(result, adapter.name_of)
        if adapter.ddp.find_unused_parameters and len(key) > 1:
            objections.append("find_unused_parameters=True, and the model was captured in several graphs")
        return Variant(key, training, tuple(objections))

    def _act_on(self, variant: Variant, call: Invocation, result: Any) -> None:
        adapter = self.adapter
        if isinstance(adapter, DdpAdapter) and adapter.eligible and torch.is_grad_enabled():
            reasons = (*variant.objections, *(adapter.hooked() if adapter.uneven else ()))
            if reasons:
                self._fall_back_to_ddp(adapter, call, result, reasons)

    def _no_graph_ran(self, call: Invocation, result: Any) -> None:
        adapter = self.adapter
        self.eager_calls += 1
        if call.inside_ddp and isinstance(adapter, DdpAdapter) and torch.is_grad_enabled():
            if adapter.eligible:
                self._fall_back_to_ddp(adapter, call, result, ("a forward ran without any compiled graph",))
            else:
                adapter.let_go_of_static_graph()
        if (self.breaks or self._left_alone) and not self.graphs and None not in self._reported:
            self._reported.add(None)
            self.toolbox.first_step(self)

    def _fall_back_to_ddp(self, adapter: DdpAdapter, call: Invocation, result: Any, reasons: tuple[str, ...]) -> None:
        """A call uses parameters beside the compiled graphs, which do not know when all gradients are there.

        DDP reduces from here on. Where ranks may use different parameters, another one may well go on with compiled
        graphs: then this backward reduces what these would, behind its end.
        """
        tensors = [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]
        if not adapter.uneven or adapter.ddp.static_graph or not tensors:
            adapter.restore("; ".join(reasons), call.inside_ddp)
            return
        adapter.watch(reasons)
        if call.token is not None:
            call.token.data.fill_(-1)  # .data: the graphs have saved it, and nothing is to notice
        for tensor in tensors:
            compat.tensors.on_gradient(tensor, functools.partial(self._reduce_behind, call.sync))

    def _reduce_behind(self, sync: bool) -> None:
        """Inside a backward: when it is through, reduce every gradient."""
        if not sync and not self.adapter.prepared:
            return
        task = compat.tensors.backward_task()
        if task not in self._behind:
            self._behind.add(task)
            compat.tensors.at_end_of_backward(lambda: self._reduce_all(task))

    def _reduce_all(self, task: int) -> None:
        self._behind.discard(task)
        adapter = self.adapter
        if not isinstance(adapter, DdpAdapter) or not adapter.eligible:
            return
        adapter.has_synced()
        if not adapter.unreduced:
            return
        if self._all_idle is None:
            infos, rule = adapter.exchanged(()), adapter.bucket_rule()
            assert rule is not None, "what was taken over has buckets"
            buckets = self.toolbox.all_idle(infos, rule)
            self._all_idle = self.toolbox.make_buckets(buckets, adapter.refs, adapter.group, self.pool)
            self.agree_on(plan_of(buckets, infos))
        self._all_idle.begin(adapter.unreduced)
        self._all_idle.reduce_all()
        self._finish_sync([self._all_idle])

    def agree_on(self, plan: list[str]) -> None:
        """Before the first collective of a program: see that every rank is about to run the same ones.

        A plan that was compared before is not compared again: one rank may compile anew alone (another batch size).
        """
        adapter = self.adapter
        assert isinstance(adapter, DdpAdapter | ShardedAdapter), "only what was taken over has collectives"
        subject = adapter.subject_of(tuple(plan))
        if subject is not None:
            for number, group in enumerate(adapter.process_groups()):
                self.toolbox.agree(group, f"{subject}.{number}" if number else subject, plan)

    # --- backward ---

    def objections(self) -> list[str]:
        """Everything found so far that speaks against reducing gradients in the compiled graphs."""
        return [reason for variant in self.variants.values() for reason in variant.objections]

    def before_backward(self, graph: CapturedGraph, sync: bool) -> None:
        """Inside a backward, before a graph's backward program runs (and before it is compiled).

        `sync`: whether it is one that every rank runs, if it adds to gradients. Others may be one rank's alone.
        """
        adapter = self.adapter
        if isinstance(adapter, DdpAdapter):
            reduces = sync and (adapter.state == "undecided" or not self._compared) and graph.accumulates()
            # where ranks decide together, one may run backwards that reduce nothing alone
            if adapter.state == "undecided" and (reduces or not (adapter.uneven and self._asks_others(adapter))):
                self._decide(adapter)
            if reduces and not self._compared:
                self._compare_before_reducing(adapter, graph)
            if adapter.state == "undecided":
                return
        if True not in self._reported:
            self._reported.add(True)
            compat.tensors.at_end_of_backward(self._backward_is_through)

    def _backward_is_through(self) -> None:
        """Report the first step; of a backward inside a call (a compiled training step) when the call ends."""
        if self.newest is None or self.is_running():  # none: the engine's threads do not see the caller's calls
            self._owes_report = True
        else:
            self.toolbox.first_step(self)

    def _decide(self, adapter: DdpAdapter) -> None:
        objections = self.objections()
        if not self._asks_others(adapter) or not adapter.uneven:
            adapter.decide(objections)
            return
        self._compared = True  # ranks may have run other graphs: if one leaves it to DDP, all do
        compare_surroundings(self)
        objections += adapter.hooked()
        mine = "; ".join(dict.fromkeys([*adapter.standing_objections(), *objections]))
        said = self.toolbox.said_by_any(adapter.group, GRADIENTS, mine)
        several = any(len(variant.graphs) > 1 for variant in self.variants.values())
        adapter.decide(objections if mine or not said else [said], several)

    def _asks_others(self, adapter: DdpAdapter) -> bool:
        return self.settings.config.distributed != "stock" and not adapter.may_be_alone

    def _compare_before_reducing(self, adapter: DdpAdapter, graph: CapturedGraph) -> None:
        """The first backward that every rank runs: see that all have captured the same, and do the same with gradients.

        Ranks that leave it to DDP would wait in other collectives than those that do not.
        """
        self._compared = True
        if self._asks_others(adapter):
            self.compare_captures(self.graphs[number] for number in self._call_of(graph))
            who = "dcompile reduces them" if adapter.state == "taken" else f"DDP does: {'; '.join(adapter.reasons)}"
            self.toolbox.agree(adapter.group, GRADIENTS, [who])
        for other in self.graphs:
            other.captured = []

    def _call_of(self, graph: CapturedGraph) -> tuple[int, ...]:
        """Numbers of the graphs that ran in the call that a graph's backward is of: one in progress, or the newest."""
        running = [tuple(call.graphs) for stack in list(self.calls.values()) for call in reversed(stack)]
        known = [variant.graphs for variant in (self.newest, *reversed(self.variants.values())) if variant is not None]
        return next((graphs for graphs in (*running, *known) if graph.number in graphs), (graph.number,))

    def begin_sync(
        self, buckets: GradientBuckets, adapter: DdpAdapter, grads: Iterable[tuple[int, int]], absent: Collection[int]
    ) -> bool:
        """A graph's backward is going to reduce gradients: look at the whole backward's result when it is through.

        Returns whether its program is to do it. If a parameter has a hook, that is to get the gradient of this rank:
        then all buckets, of this graph with the gradients `grads`, are reduced behind the backward, in the order in
        which other ranks, which may have no hooks, reduce them in their programs. `absent`: parameters that it has no
        gradient of in this call.
        """
        task = compat.tensors.backward_task()
        first = task not in self._synced
        if first:
            hooked = [] if adapter.uneven else adapter.hooked()
            self._synced[task] = SynchronizedBackward(behind=bool(hooked))
            if hooked:
                adapter.note_behind(hooked)
            compat.tensors.at_end_of_backward(lambda: self._end_sync(self._synced.pop(task)))
        synced = self._synced[task]
        buckets.begin(adapter.unreduced if first and adapter.every else (), task, first, absent)
        synced.buckets.append(buckets)
        if synced.behind:
            synced.numbers.append(adapter.accumulating(number for _, number in grads if number not in absent))
        return not synced.behind

    def flush_after_backward(self, shards: ShardedParameters) -> None:
        """A backward adds to gradients of sharded parameters: when it is through, reduce what earlier ones left."""
        task = compat.tensors.backward_task(), id(shards)
        if task not in self._flushing:
            self._flushing.add(task)

            def flush() -> None:
                self._flushing.discard(task)
                shards.flush()

            compat.tensors.at_end_of_backward(flush)

    def _end_sync(self, synced: SynchronizedBackward) -> None:
        if isinstance(self.adapter, DdpAdapter):
            self.adapter.has_synced()
        if synced.behind:
            done: set[int] = set()
            for buckets, numbers in zip(synced.buckets, synced.numbers, strict=True):
                buckets.reduce_behind(numbers, done)
                done |= numbers
        self._finish_sync(synced.buckets)

    def _finish_sync(self, reduced: list[GradientBuckets]) -> None:
        adapter = self.adapter
        if not isinstance(adapter, DdpAdapter) or not adapter.eligible:
            return
        for buckets in reduced:
            others = (other.reduced() for other in reduced if other is not buckets)
            buckets.settle_idle(frozenset().union(*others))
        sources: dict[int, GradientBuckets | None] = {}
        addresses: dict[int, int] = {}
        for buckets in reduced:
            found = buckets.reduced()
            # a parameter of several graphs: autograd has added their reduced gradients up, nothing is missing
            sources |= {number: None if number in sources else buckets for number in found}
            addresses |= found
        elsewhere = {
            number: source.reduced_gradient(number)
            for number, source in sources.items()
            if source is not None and adapter.differs(number, addresses[number])
        }
        adapter.reduce_rest(elsewhere, sources.keys(), self.toolbox.average)
        for buckets in reduced:
            buckets.forget()

    def release(self) -> None:
        """Nobody calls the model any more: keep its graphs no longer than backwards that are still to come do."""
        self.graphs[:] = [weakref.proxy(graph) for graph in self.graphs]

    # --- reports ---

    def _report(self, training: bool) -> None:
        self._reported.add(training)
        self.toolbox.first_step(self)


def _token(reduces: bool) -> torch.Tensor:
    """Whether a backward is to reduce, for forwards to save: the call that it is made in may run in inference mode."""
    with torch.inference_mode(False):
        return torch.tensor(int(reduces), device="cpu")
