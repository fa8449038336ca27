"""Gradient synchronization of DDP: in backward programs, as gradients arrive, after the backward, or by DDP itself.

Gradients are reduced as autograd adds them to `.grad` where no program computes all gradients of a bucket. That happens
if a model is captured in several graphs, uses parameters outside of them, or runs eagerly. With
`find_unused_parameters=True`, ranks may then run different graphs, and use different parameters. All still reduce the
same buckets in the same order: those of a program that has every gradient. So a rank with one graph matches a rank
with several. A bucket's all-reduce starts once its last gradient is there, while other graphs still compute.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.adapters.ddp_reducer import outside_use, tensors_in
from dcompile.capture.adapters.grad_field import MergedGradients, differs, is_contiguous
from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync, make_token
from dcompile.capture.call_state import GraphView, Invocation, Variant
from dcompile.capture.capture_digest import compare_surroundings, plan_of
from dcompile.capture.services import GradientBuckets
from dcompile.errors import DcompileError
from dcompile.ir.buffers import Bucket

GRADIENTS = "gradients of a model"
"""Subject of the comparison between ranks of who reduces gradients: dcompile or DDP."""
ARRIVING = 2
"""Token (`Invocation.token`) of calls whose gradients are reduced as autograd adds them to `.grad`."""
EAGER = "a forward ran without any compiled graph"


@dataclass(eq=False)
class SynchronizedBackward:
    """State of one backward that reduces gradients."""

    after_backward: bool
    """Whether gradients are reduced after the backward, not in its programs."""
    began_ns: int = field(default_factory=time.time_ns)
    """When its first program began; since the epoch."""
    buckets: list[GradientBuckets] = field(default_factory=list)
    """Buckets of each program, in the order in which the programs ran."""
    numbers: list[frozenset[int]] = field(default_factory=list)
    """If `after_backward`: the parameters with gradients in each entry of `buckets`."""
    used: set[int] = field(default_factory=set)
    """Parameters that the programs use and that the loss needs, also those of which autograd gives no gradient."""
    merged: MergedGradients = field(default_factory=MergedGradients)
    """If not `after_backward`: what the programs have reduced."""


class DdpSync(GradientSync):
    """Strategy of DDP. Ranks decide in the first backward that reduces who reduces gradients.

    Each forward saves a token that tells its backward whether to reduce.
    """

    def __init__(self, adapter: DdpAdapter) -> None:
        super().__init__(adapter)
        self._adapter = adapter
        self._tokens = make_token(False), make_token(True)
        self._synced: dict[int, SynchronizedBackward] = {}
        self._arrivals = GradientArrivals(adapter, self._buckets_of_all, self._finish_sync)
        self._uses_outside: dict[tuple[int, ...], tuple[str, ...]] = {}
        """Graphs of a call -> its uses of parameters outside of them; only where gradients are reduced as they arrive.
        """
        self._compared = False
        """Whether ranks have compared their captured graphs, and who reduces gradients."""

    # --- forward ---

    def begin_call(self, call: Invocation) -> None:
        """Record whether the call is under no_sync; where ranks may differ, the call gets its own token."""
        if not call.inside_ddp:
            return
        adapter = self._adapter
        adapter.before_forward()
        call.sync = adapter.wants_sync()
        if adapter.uneven:  # the token may change to ARRIVING at the end of the call
            call.token = make_token(call.sync)
        elif call.sync:
            call.token = self._tokens[1]
        if call.sync and torch.is_grad_enabled() and self._asks_others():
            if not self.replicas:
                self.replicas = [self.model.services.watch_replicas(adapter.group, adapter.replicated)]
            self.replicas[0].on_call()

    def token(self, call: Invocation | None) -> torch.Tensor | None:
        """Return the call's token; without one, the token of a backward that does not reduce."""
        return self._tokens[0] if call is None or call.token is None else call.token

    def compares_captures(self) -> bool:
        """Compare until the first backward that reduces; a rank may call the model alone any number of times before."""
        return not (self._compared or self._adapter.uneven)

    # --- after a call ---

    def objections_to(self, key: tuple[int, ...], result: Any) -> tuple[str, ...]:
        """Return uses of parameters outside the graphs; none if such gradients can be reduced as they arrive."""
        found = tuple(outside_use(result, self._adapter.name_of))
        if not self._adapter.varies or not _with_gradients(result):
            return found
        self._uses_outside[key] = found
        return ()

    def after_call(self, variant: Variant, call: Invocation, result: Any) -> None:
        """Reduce gradients as they arrive, or leave them to DDP, if the call uses parameters outside one graph."""
        adapter = self._adapter
        if not call.inside_ddp or not torch.is_grad_enabled() or adapter.state == "stock":
            return
        hooked = tuple(adapter.hooked()) if adapter.uneven else ()
        if adapter.varies:
            self._choose_way(variant, call, result, hooked)
        elif adapter.eligible and (reasons := (*variant.objections, *hooked)):
            adapter.restore("; ".join(reasons), call.inside_ddp)

    def _choose_way(self, variant: Variant, call: Invocation, result: Any, hooked: tuple[str, ...]) -> None:
        """Decide, where ranks may use different parameters, if this call's gradients are reduced as they arrive."""
        outside = self._uses_outside.get(variant.graphs, ())
        scattered = self._arrivals.scatter(call.graphs, alone=not outside)
        if not variant.training or not (scattered or hooked):
            return
        several = (SEVERAL,) if len(call.graphs) > 1 else ()
        if reasons := (*several, *outside):
            self._adapter.note_arriving(reasons)
        self._let_arrive(call, result)

    def no_graph_ran(self, call: Invocation, result: Any) -> None:
        """Reduce gradients as they arrive, fall back to DDP, or let it queue the reduction that was held back."""
        adapter = self._adapter
        if not call.inside_ddp or not torch.is_grad_enabled():
            return
        if not adapter.eligible:
            adapter.let_go_of_static_graph()
        elif adapter.varies and _with_gradients(result):
            adapter.note_arriving((EAGER,))
            self._let_arrive(call, result)
        else:
            adapter.restore(EAGER, call.inside_ddp)

    def _let_arrive(self, call: Invocation, result: Any) -> None:
        """Mark a call so that its backward reduces the same buckets as a rank that runs one graph."""
        if call.token is not None:
            # .data: graphs have saved the token, and its version must not change
            call.token.data.fill_(ARRIVING if call.sync else -ARRIVING)
        for tensor in _with_gradients(result):
            compat.autograd.on_gradient(tensor, functools.partial(self._has_reached_result, call.sync))

    def _has_reached_result(self, sync: bool) -> None:
        """Start reducing gradients as they arrive, inside a backward that has not reached parameters yet."""
        adapter = self._adapter
        if not (sync or adapter.prepared) or not adapter.accumulates(adapter.refs):
            return
        if adapter.state == "undecided":
            self._decide()
        if adapter.eligible:
            self._arrivals.begin()

    def _buckets_of_all(self) -> tuple[tuple[Bucket, ...], GradientBuckets]:
        """Return the buckets of a program that has no gradient itself. All ranks agree on them, or raise."""
        infos, rule = self._adapter.exchanged(()), self._adapter.bucket_rule()
        assert rule is not None, "what was taken over has buckets"
        layout = self.model.services.all_idle(infos, rule)
        self.model.agree_on(plan_of(layout, infos))
        return layout, self.make_buckets(layout)

    # --- backward ---

    def before_backward(self, graph: GraphView, sync: bool) -> bool:
        """Decide who reduces gradients, and compare captures, in the first backward that every rank runs.

        `sync`: whether every rank runs this backward if it accumulates gradients. One rank may run others alone.
        """
        adapter = self._adapter
        reduces = sync and (adapter.state == "undecided" or not self._compared) and graph.accumulates()
        # where ranks decide together, a rank may run alone backwards that reduce nothing
        if adapter.state == "undecided" and (reduces or not (adapter.uneven and self._asks_others())):
            self._decide()
        if reduces and not self._compared:
            self._compare_before_reducing(graph)
        return adapter.state != "undecided"

    def _decide(self) -> None:
        adapter, objections = self._adapter, self.model.objections()
        if not adapter.uneven:
            adapter.decide(objections)
            # other parameters stay watched: their gradients come from outside the module, and are reduced on their own
            done = {number for graph in self.model.graphs for _, number in graph.grads}
            adapter.unwatch(done if adapter.eligible else [*adapter.refs])
            return
        if not self._asks_others():
            adapter.decide(objections)
            return
        self._compared = True  # ranks may have run different graphs: if one falls back to DDP, all do
        compare_surroundings(self.model)
        objections += [] if adapter.varies else adapter.hooked()
        mine = "; ".join(dict.fromkeys([*adapter.standing_objections(), *objections]))
        objection = self.model.services.any_rank_objection(adapter.group, GRADIENTS, mine)
        several = any(len(variant.graphs) > 1 for variant in self.model.variants.values())
        adapter.decide(objections if mine or not objection else [objection], several and adapter.is_static)

    def _asks_others(self) -> bool:
        return self.model.settings.config.distributed != "stock" and not self._adapter.may_be_alone

    def _compare_before_reducing(self, graph: GraphView) -> None:
        """Check, in the first backward that every rank runs, that all captured the same and agree on who reduces.

        Ranks that leave reduction to DDP would otherwise wait in different collectives than the others.
        """
        self._compared = True
        adapter = self._adapter
        if self._asks_others():
            self.model.compare_captures(self.model.graphs_of_call(graph))
            who = "dcompile reduces them" if adapter.state == "taken" else f"DDP does: {'; '.join(adapter.reasons)}"
            self.model.services.agree(adapter.group, GRADIENTS, [who])
        for other in self.model.graphs:
            other.captured = []

    def run_backward(self, call: BackwardCall) -> list[Any]:
        """Reduce in the program, as gradients arrive, after the backward, or not at all."""
        adapter, arrivals, graph, buckets = self._adapter, self._arrivals, call.graph, call.buckets
        accumulates = bool(graph.grads) and adapter.state != "stock" and graph.accumulates()
        sync, reduces = call.sync if adapter.eligible else 0, False
        if accumulates and sync and (sync == ARRIVING or buckets is None or arrivals.is_running()):
            if graph.has_own_collectives("backward"):
                graph.agree("backward")
            arrivals.begin()
        elif accumulates and sync and buckets is not None:
            graph.agree("backward")
            reduces = self._begin_sync(buckets, graph, call.absent())
        elif accumulates:
            adapter.unreduced.update(number for place, number in graph.grads if place not in call.gone)
        if buckets is None:
            return call.run(call.args)
        results = call.run(call.args, buckets=buckets, sync=reduces)
        if reduces:
            merged = self._synced[compat.autograd.backward_task()].merged
            merged.add(buckets.last_run(), results, graph.grads)
        return results

    def reduces_in_program(self, graph: GraphView) -> bool:
        """Reduce in the program, unless gradients of its calls are reduced as they arrive."""
        return not self._arrivals.has(graph.number)

    def arriving(self, graphs: Iterable[int]) -> tuple[Bucket, ...]:
        """Return the buckets of all parameters if the call's gradients are reduced as they arrive."""
        return self._arrivals.layout(graphs) if self._adapter.eligible else ()

    def _begin_sync(self, buckets: GradientBuckets, graph: GraphView, absent: Collection[int]) -> bool:
        """Prepare a graph's backward that reduces gradients, and the check at the end of the whole backward.

        Returns whether the program reduces. It does not if a parameter has a hook, which must get this rank's gradient.
        Then all buckets of the graph's gradients are reduced after the backward. Their order is that of other ranks'
        programs, since these ranks may have no hooks. `absent`: parameters without a gradient in this call.
        """
        adapter, task = self._adapter, compat.autograd.backward_task()
        first = task not in self._synced
        if first:
            hooked = [] if adapter.uneven else adapter.hooked()
            self._synced[task] = SynchronizedBackward(after_backward=bool(hooked))
            if hooked:
                adapter.note_behind(hooked)
            compat.autograd.at_end_of_backward(lambda: self._end_sync(self._synced.pop(task)))
        synced = self._synced[task]
        buckets.begin(adapter.unreduced if first and adapter.covers_all_params else (), task, first, absent)
        synced.buckets.append(buckets)
        if not adapter.uneven:
            # autograd runs AccumulateGrad also for parameters of which the backward returns None
            synced.used.update(number for number in graph.params.values() if number not in absent)
        if synced.after_backward:
            synced.numbers.append(adapter.accumulating(number for _, number in graph.grads if number not in absent))
        return not synced.after_backward

    def _end_sync(self, synced: SynchronizedBackward) -> None:
        if synced.after_backward:
            done: set[int] = set()
            for buckets, numbers in zip(synced.buckets, synced.numbers, strict=True):
                buckets.reduce_behind(numbers, done)
                done |= numbers
        self._finish_sync(synced.buckets, None if synced.after_backward else synced.merged)
        self._adapter.log.record(synced.began_ns, synced.buckets)
        self._adapter.has_synced(synced.used)

    def _finish_sync(self, reduced: list[GradientBuckets], merged: MergedGradients | None = None) -> None:
        adapter = self._adapter
        if not adapter.eligible:
            return
        if adapter.varies:
            adapter.used.record(reduced)
        for buckets in reduced:
            others = (other.reduced() for other in reduced if other is not buckets)
            buckets.settle_idle(frozenset().union(*others))
        sources: dict[int, GradientBuckets | None] = {}
        addresses: dict[int, int] = {}
        for buckets in reduced:
            found = buckets.reduced()
            sources |= {number: None if number in sources else buckets for number in found}
            addresses |= found
        if merged is not None:
            handed_on = frozenset[int]().union(*(buckets.handed_on() for buckets in reduced))
            elsewhere = dict(merged.outside(functools.partial(differs, adapter.refs), but=handed_on))
        else:  # each .grad was reduced as a whole
            elsewhere = {
                number: source.reduced_gradient(number)
                for number, source in sources.items()
                if source is not None
                and differs(adapter.refs, number, addresses[number])
                and is_contiguous(adapter.refs, number)
            }
        adapter.reduce_rest(elsewhere, sources.keys(), self.model.services.average)
        for buckets in reduced:
            buckets.forget()

    def why_updates_apart(self, graph: GraphView) -> str:
        """Updates need every gradient of the model, reduced in this one program."""
        adapter = self._adapter
        if adapter.state == "undecided" or "backward" not in graph.executables:
            return "ranks compare plans in the first backward"
        if adapter.state == "stock":
            return "DDP itself reduces gradients"
        if adapter.uneven or adapter.varies or adapter.covers_all_params or graph.unsure:
            return "ranks may use different parameters"
        own = {number for _, number in graph.grads}
        every = own == adapter.refs.keys() or own == adapter.trainable()
        if adapter.hooked() or not self.reduces_in_program(graph) or not every:
            return "gradients are reduced outside of this program"
        return ""

    def accumulates(self, numbers: Iterable[int]) -> bool:
        """Does this backward add to .grad of any of these? torch.autograd.grad does not; DDP then reduces nothing."""
        return self._adapter.accumulates(numbers)

    def awaited(self, grads: Iterable[tuple[int, int]], unsure: Collection[int]) -> frozenset[int]:
        """Return gradients that must exist: all for DDP's reducer, unless it accepts unused parameters.

        If dcompile reduces, gradients of `unsure` parameters may be absent: buckets contain which ranks have them.
        """
        adapter = self._adapter
        if adapter.covers_all_params or (adapter.uneven and not adapter.eligible):
            return frozenset()
        return frozenset(place for place, number in grads if not adapter.eligible or number not in unsure)

    # --- parameters ---

    def make_buckets(self, buckets: tuple[Bucket, ...]) -> GradientBuckets:
        """Make the buckets of a program, in memory that all graphs of the model share."""
        adapter = self._adapter
        return self.model.services.make_buckets(buckets, adapter.refs, adapter.group, self.model.shared_buckets)

    def forget_buckets(self) -> None:
        """Drop the bucket layout of gradients that are reduced as they arrive."""
        self._arrivals.forget()

    def watch_parameters(self, compiled: Callable[..., Any], params: Mapping[int, int]) -> Callable[..., Any]:
        """Return `compiled` so that gradients go to the parameter objects that the module has now."""
        adapter = self._adapter
        if not params:
            return compiled
        slots, refs = list(params.items()), adapter.refs

        def checked(*args: Any) -> Any:
            for position, number in slots:
                if refs[number]() is not args[position]:
                    adapter.rebind(number, args[position])
            return compiled(*args)

        return checked


def _with_gradients(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result from which a backward may start."""
    return [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]


SEVERAL = "the model was captured in several graphs"
"""Reason in the receipt for reducing a call's gradients as they arrive."""
Layout = tuple[Bucket, ...]


class ArrivingGradients:
    """The buckets of one backward, and the gradients that each still lacks."""

    def __init__(
        self,
        layout: Layout,
        buckets: GradientBuckets,
        params: Mapping[int, Callable[[], Any]],
        unreduced: set[int],
        waits: bool,
    ) -> None:
        """Start a backward. `layout`: the buckets in the order of reduction.

        `unreduced`: parameters with gradients that are not reduced yet, earlier backwards' included. `waits`: whether
        all buckets are reduced at the end of the backward, since hooks may change gradients.
        """
        self._buckets, self._unreduced = buckets, unreduced
        self._order = [bucket.name for bucket in layout]
        self._place = {number: at for at, bucket in enumerate(layout) for number, _ in bucket.places}
        self._missing = [
            {-1} if waits else {number for number, _ in bucket.places if _will_come(params[number]())}
            for bucket in layout
        ]
        self._memory: dict[str, Any] = {}
        buckets.begin(unreduced)

    def arrived(self, number: int, name: str) -> None:
        """Record that autograd has added a gradient to parameter `number`; start the buckets that are now complete.

        `name` is the parameter's name in errors. Raises DcompileError if its bucket has started already.
        """
        place = self._place.get(number)
        if place is None:
            return
        if self._order[place] in self._memory:
            raise DcompileError(
                f"dcompile: parameter {name} got a gradient when its bucket was on its way to other ranks. Stock DDP "
                "refuses this, too: a reentrant checkpoint (use_reentrant=True) under find_unused_parameters=True. Use "
                "use_reentrant=False, or find_unused_parameters=False"
            )
        self._missing[place].discard(number)
        while len(self._memory) < len(self._order) and not self._missing[len(self._memory)]:
            self._start(self._order[len(self._memory)])  # in the same order on all ranks

    def _start(self, name: str) -> None:
        self._memory[name] = memory = self._buckets.acquire(name)
        self._buckets.mark_used(self._unreduced)
        self._buckets.start(name, memory)

    def finish(self) -> None:
        """At the end of the backward: start the remaining buckets, and wait for all."""
        for name in self._order[len(self._memory) :]:
            self._start(name)
        for name, memory in self._memory.items():
            self._buckets.wait(name, memory)


def _will_come(parameter: Any) -> bool:
    return parameter is not None and compat.autograd.will_accumulate(parameter)


class GradientArrivals:
    """Bookkeeping of one DDP model: whose gradients are reduced as they arrive, and the backward in progress."""

    def __init__(
        self,
        adapter: DdpAdapter,
        make: Callable[[], tuple[Layout, GradientBuckets]],
        finish: Callable[[list[GradientBuckets]], None],
    ) -> None:
        """`make` returns the buckets of a program without a gradient, on which all ranks agree.

        `finish` passes reduced buckets on as `.grad`.
        """
        self._adapter, self._make, self._finish = adapter, make, finish
        self._made: tuple[Layout, GradientBuckets] | None = None
        self._scattered: set[int] = set()
        """Graphs of calls whose gradients no single program computes: their programs write none into buckets."""
        self._running: dict[int, ArrivingGradients] = {}
        """Autograd's number of a backward -> its gradients."""

    def forget(self) -> None:
        """Drop the buckets, since other parameters have places in them now."""
        self._made = None

    def scatter(self, graphs: Collection[int], alone: bool) -> bool:
        """Record the graphs of a call; return whether its gradients are reduced as they arrive.

        `alone`: no parameter was used outside these graphs.
        """
        if len(graphs) > 1 or not alone:
            self._scattered.update(graphs)
        return not self._scattered.isdisjoint(graphs)

    def has(self, graph: int) -> bool:
        """Does a graph's program leave its gradients to autograd?"""
        return graph in self._scattered

    def layout(self, graphs: Iterable[int]) -> Layout:
        """Return the buckets into which gradients of a call of these graphs are copied as they arrive, if they are."""
        return () if self._made is None or self._scattered.isdisjoint(graphs) else self._made[0]

    def is_running(self) -> bool:
        """Are the gradients of the backward that runs now reduced as they arrive?"""
        return compat.autograd.backward_task() in self._running

    def begin(self) -> None:
        """Inside a backward, before its first gradient: reduce each bucket from now on once it is complete."""
        adapter, task = self._adapter, compat.autograd.backward_task()
        if task in self._running:
            return
        if hooked := adapter.hooked():
            adapter.note_behind(hooked)
        self._made = self._made or self._make()
        adapter.watch()
        running = ArrivingGradients(*self._made, adapter.refs, adapter.unreduced, waits=bool(hooked))
        self._running, adapter.arrived = {task: running}, running.arrived  # a backward that has raised is forgotten
        compat.autograd.at_end_of_backward(lambda: self._end(task))

    def _end(self, task: int) -> None:
        running, self._adapter.arrived = self._running.pop(task, None), None
        if running is None or self._made is None or not self._adapter.eligible:
            return
        running.finish()
        self._adapter.has_synced()
        self._finish([self._made[1]])
