"""Gradient synchronization of sharded parameters: programs gather them, and backwards reduce gradients to shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync, make_token
from dcompile.capture.call_state import GraphView, Invocation
from dcompile.capture.services import NoReplicas, ShardedParameters
from dcompile.collectives.contract import Executable, Phase


class ShardedSync(GradientSync):
    """Strategy of sharded parameters. Every rank makes every call.

    If several graphs have gradients of a unit, the last of their backwards reduces them.
    """

    def __init__(self, adapter: ShardedAdapter) -> None:
        super().__init__(adapter)
        self._adapter = adapter
        self._flushing: set[tuple[int, int]] = set()
        self._saves_memory = ""
        self._tokens: dict[GradientSync, torch.Tensor] = {self: make_token(0)}
        """Strategy of each module that runs these programs -> token of its calls: its place in `_strategies`."""
        self._strategies: list[GradientSync] = [self]

    @property
    def sharded(self) -> ShardedAdapter:
        """The adapter of sharded parameters."""
        return self._adapter

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        """Return the model's shards and a monitor of eager regions; (None, None) if FSDP keeps its hooks."""
        adapter = self._adapter
        if not adapter.eligible:
            return None, None
        shards = self.model.services.make_shards(adapter.units, adapter.groups)
        if (order := adapter.order()) is not None:
            shards.join(*order)
        return shards, EagerRegionMonitor(adapter)

    def lend_to(self, other: GradientSync) -> None:
        """Let an equal module run these programs; ranks meet here for its shards, as where one is compiled."""
        assert isinstance(other, ShardedSync) and other.shards is not None, "equal modules are sharded alike"
        if other in self._tokens:
            return
        self._tokens[other] = make_token(len(self._strategies))
        self._strategies.append(other)
        if self._saves_memory:
            other.save_memory(self._saves_memory)
        for name in other.adapter.communicators():
            other.shards.copied(name)

    def by_token(self, token: int) -> GradientSync:
        return self._strategies[token]

    def save_memory(self, reason: str) -> None:
        self._saves_memory = reason
        super().save_memory(reason)

    def why_updates_apart(self, graph: GraphView) -> str:
        """Updates need every gradient of the model, reduced in this one program."""
        adapter = self._adapter
        if "backward" not in graph.executables:
            return "ranks compare plans in the first backward"
        if (reason := adapter.why_updates_apart()) or self.shards is None:
            return reason or "FSDP itself reduces gradients"
        if graph.unsure:
            return "ranks may use different parameters"
        if graph.later or {number for _, number in graph.grads} != adapter.trained():
            return "gradients are reduced outside of this program"
        if any(self.shards.copied(name)[0] for name in adapter.communicators()):
            return "other ranks copy shards from this one's memory"
        return ""

    def ranks_of_norm(self) -> str:
        return self._adapter.ranks_of_norm()

    def reduces_all(self, token: int) -> bool:
        everywhere = all(group.wants() == "all" for group in self._adapter.groups.values())
        return everywhere and self.by_token(token) is self

    def begin_waiting(self) -> None:
        self._adapter.show_sharded()

    def reducing(self) -> contextlib.AbstractContextManager[None]:
        return self._adapter.reducing()

    def token(self, call: Invocation | None) -> torch.Tensor | None:
        return self._tokens[self if call is None else call.strategy] if self.adapter.carries_sync else None

    def begin_call(self, call: Invocation) -> None:
        """Let ranks that hold the same shards compare them."""
        if not torch.is_grad_enabled() or self.shards is None:
            return
        if not self.replicas:
            groups = {name: entry.replica_group() for name, entry in self._adapter.groups.items()}
            self.replicas = [NoReplicas()] + [
                self.model.services.watch_replicas(group, functools.partial(self._adapter.replicated, name))
                for name, group in groups.items()
                if group is not None
            ]
        for replicas in self.replicas:
            replicas.on_call()

    def on_forward(self, call: Invocation, graph: GraphView) -> None:
        """Record which units a graph has gradients of that earlier graphs of the call have, too.

        Backwards run in reverse order, so the first graph's backward reduces them. This depends only on the graphs of
        calls so far, whose plans are the same on every rank.
        """
        shards = self.shards
        if shards is None or not graph.training:
            return
        if not call.units:
            shards.forget_parts()
        units = self._units_of(graph)
        graph.later |= units & call.units
        call.units |= units

    def wrap_forward(self, graph: GraphView, run: Executable, kind: str) -> Callable[[list[Any]], list[Any]]:
        """Return a program that gets its shard source in each call."""
        if not graph.gathers or not run.buckets:
            return super().wrap_forward(graph, run, kind)
        phase: Phase = "forward" if kind == "forward" else "inference"
        visible, kept = graph.visible

        def gathering(args: list[Any]) -> list[Any]:
            strategy = graph.strategy()
            graph.agree(kind, strategy)
            results = run(args, buckets=strategy.shards.source(run.buckets, phase))
            if visible:
                strategy.sharded.take_gathered({number: results[place].detach() for place, number in visible})
                del results[kept:]
            return results

        return gathering

    def check_result(self, result: Any) -> None:
        """Raise FallBackToStock if a parameter itself is returned: Dynamo returns such a result without the graph."""
        self._adapter.refuse_in_result(result)

    def run_backward(self, call: BackwardCall) -> list[Any]:
        """Run a program that reduces to shards; after the whole backward, reduce what earlier ones left."""
        graph, shards = call.graph, self.shards
        self._adapter.show_sharded()
        if not call.run.buckets:
            return super().run_backward(call)
        assert shards is not None, "only sharded parameters are reduced to shards"
        accumulates = self.accumulates(number for _, number in graph.grads)
        graph.agree("backward", self)
        if accumulates:
            shards.take(self._adapter.gradients_of_wrapper())
            self._flush_after_backward(shards)
            shards.may_lack(self._adapter.units_of(graph.unsure))
        absent = set[int]()
        if call.gone:
            present = (number for place, number in graph.grads if place not in call.gone)
            absent = self._units_of(graph) - self._adapter.units_of(present)
        asked = () if accumulates else self._asked_for(call)
        wanted = self._adapter.units_of(number for _, number in asked)
        source = shards.source(call.run.buckets, "backward", accumulates, graph.later, absent, wanted)
        results = call.run(call.args, buckets=source)
        for place, number in asked if source is not None and source.wanted else ():  # not where programs are only built
            results[place] = self._adapter.part_of_unit(number, source.wanted)
        return results

    def _asked_for(self, call: BackwardCall) -> list[tuple[int, int]]:
        """Return (position, parameter number) of the gradients that the caller of the backward gets, unreduced."""
        found = (entry for entry in call.graph.grads if entry[0] not in call.gone)
        return [entry for entry in found if compat.autograd.is_result(self._adapter.virtual(entry[1]))]

    def _units_of(self, graph: GraphView) -> set[int]:
        """Return the units of sharded parameters for which a graph's backward computes gradients."""
        return self._adapter.units_of(number for _, number in graph.grads)

    def _flush_after_backward(self, shards: Any) -> None:
        """At the end of a backward that accumulates gradients, reduce those that earlier backwards left."""
        task = compat.autograd.backward_task(), id(shards)
        if task not in self._flushing:
            self._flushing.add(task)

            def flush() -> None:
                self._flushing.discard(task)
                shards.flush(self._adapter.gradients_outside())

            compat.autograd.at_end_of_backward(flush)

    def accumulates(self, numbers: Iterable[int]) -> bool:
        """Does this backward add to the gradient of any of these virtual parameters?"""
        return any(compat.autograd.will_accumulate(self._adapter.virtual(number)) for number in numbers)
