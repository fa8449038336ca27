"""Gradient synchronization of ZeRO: backward programs reduce gradients, and the optimizer gets them as from DeepSpeed.

The engine calls one function at the end of each backward, however the backward was started. dcompile replaces that
function. The replacement also reduces gradients from outside the compiled graphs, and passes gradients to the
optimizer.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.grad_field import MergedGradients, differs
from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync
from dcompile.capture.adapters.sharded_sync import ShardedSync
from dcompile.capture.adapters.zero import (
    Zero3Adapter,
    ZeroAdapter,
    ZeroPartitionAdapter,
    ZeroReplicatedAdapter,
    ZeroStockAdapter,
    hidden,
    reasons_against,
)
from dcompile.capture.call_state import Invocation
from dcompile.capture.services import GradientBuckets, ShardedParameters
from dcompile.errors import DcompileError
from dcompile.ir.buffers import Bucket

OUTSIDE = "gradients from outside the compiled graphs are reduced at the end of the backward"


def sync_for(engine: Any, zero: str, stock: bool) -> GradientSync:
    """Return the strategy of a DeepSpeed engine's model, by the options `zero` and `distributed`."""
    stage = compat.deepspeed.stage_of(engine)
    if reasons := reasons_against(engine, zero, stock):
        if stage == 3 and hasattr(engine.optimizer, "parameter_offload"):
            compat.zero.hide_hooks(engine, hidden)
        return GradientSync(ZeroStockAdapter(stage, reasons))
    if stage == 0:
        return ZeroReplicatedSync(ZeroReplicatedAdapter(engine))
    if stage == 3:
        return Zero3Sync(Zero3Adapter(engine))
    return ZeroPartitionSync(ZeroPartitionAdapter(engine, stage))


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a bound method for the engine that does not keep the compiled model alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is None:
            raise DcompileError(
                "dcompile: the compiled model of this DeepSpeed engine is gone; compile the engine again"
            )
        found()

    return call


def _refuse_coalescing(engine: Any) -> None:
    if compat.deepspeed.is_coalescing(engine):
        raise DcompileError(
            "dcompile: engine.coalesce_grad_reduction() has DeepSpeed reduce gradients itself; compile the engine with "
            "options={'zero': 'off'}, or leave it out: gradients are reduced during the backward anyway"
        )


# --- stage 0 ----------------------------------------------------------------------------------------------------------


class ZeroReplicatedSync(GradientSync):
    """Strategy of stage 0: the backward that ends a step all-reduces buckets, to which it adds what `.grad` holds."""

    def __init__(self, adapter: ZeroReplicatedAdapter) -> None:
        super().__init__(adapter)
        self._adapter = adapter
        self._reduced: list[GradientBuckets] = []
        """Buckets of each program of the backward in progress, in the order in which the programs ran."""
        self._absent: dict[int, GradientBuckets] = {}
        """Parameter without a gradient in such a program, as this rank's losses do not depend on it -> its buckets."""
        self._merged: dict[int, MergedGradients] = {}
        """Number of each backward of this step -> what its programs have reduced."""

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        compat.deepspeed.take_reduction(self._adapter.engine, _weakly(self._end_backward))
        return None, None

    def run_backward(self, call: BackwardCall) -> list[Any]:
        """Run a program that reduces, or does not: DeepSpeed decides in the backward."""
        graph, buckets = call.graph, call.buckets
        if buckets is None:
            return super().run_backward(call)
        reduces = compat.deepspeed.reduces(self._adapter.engine) and graph.accumulates()
        if reduces:
            graph.agree("backward")
            absent = call.absent()
            buckets.begin((), compat.autograd.backward_task(), not self._reduced, absent)
            self._reduced.append(buckets)
            self._absent.update(dict.fromkeys(absent, buckets))
        results = call.run(call.args, buckets=buckets, sync=reduces)
        if reduces:
            merged = self._merged.setdefault(compat.autograd.backward_task(), MergedGradients())
            merged.add(buckets.last_run(), results, graph.grads)
        return results

    def accumulates(self, numbers: Iterable[int]) -> bool:
        found = (self._adapter.refs[number]() for number in numbers)
        return any(parameter is not None and compat.autograd.will_accumulate(parameter) for parameter in found)

    def make_buckets(self, buckets: tuple[Bucket, ...]) -> GradientBuckets:
        adapter = self._adapter
        return self.model.services.make_buckets(buckets, adapter.refs, adapter.group, self.model.shared_buckets)

    def _end_backward(self) -> None:
        """Where DeepSpeed would reduce: average what no program has reduced, and fill missing gradients."""
        adapter = self._adapter
        reduced, self._reduced = self._reduced, []
        absent, self._absent = self._absent, {}
        merged, self._merged = self._merged, {}
        if not compat.deepspeed.reduces(adapter.engine):
            return
        known = {number for buckets in reduced for number in buckets.reduced()}
        rest: dict[int, torch.Tensor] = {}
        for number, reference in adapter.refs.items():
            parameter: Any = reference()
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is None and number in absent:  # other ranks may have one
                parameter.grad = absent[number].reduced_gradient(number)
            elif parameter.grad is None:  # as DeepSpeed, so that an optimizer applies weight decay
                parameter.grad = torch.zeros_like(parameter)
            elif number not in known:
                rest[number] = parameter.grad
        if len(merged) == 1:  # of several backwards, the programs of later ones have added what .grad held
            (found,) = merged.values()
            outside = dict(found.outside(functools.partial(differs, adapter.refs), but=absent))
            for number, gradient in sorted(outside.items()):
                parameter = adapter.refs[number]()
                rest[number] = parameter.grad - gradient
                parameter.grad = gradient + rest[number]
        self._average(rest, known)
        for buckets in reduced:
            buckets.forget()

    def _average(self, rest: dict[int, torch.Tensor], known: Collection[int]) -> None:
        """Average these gradients over the ranks; of `known` parameters they are only a part of `.grad`."""
        if not rest:
            return
        adapter = self._adapter
        adapter.note(f"{OUTSIDE}: {', '.join(adapter.name_of(number) for number in rest)}")
        before = {number: rest[number].clone() for number in rest if number in known}
        self.model.services.average(adapter.group, list(rest.values()), "")
        for number, own in before.items():
            parameter: Any = adapter.refs[number]()
            parameter.grad += rest[number] - own


# --- stages 1 to 3 ----------------------------------------------------------------------------------------------------


class ZeroSync(ShardedSync):
    """Base class of the strategies of stages 1 to 3: the end of a backward."""

    _zero: ZeroAdapter

    def __init__(self, adapter: ZeroAdapter) -> None:
        super().__init__(adapter)
        self._zero = adapter

    def run_backward(self, call: BackwardCall) -> list[Any]:
        if self._zero.eligible:
            _refuse_coalescing(self._zero.engine)
        return super().run_backward(call)

    def _take_engine(self) -> None:
        engine = self._zero.engine
        compat.zero.silence(engine)
        compat.deepspeed.take_reduction(engine, _weakly(self._end_backward))

    def _reduce_rest(self) -> None:
        """Reduce gradients of earlier backwards that this one did not reach, and those from outside the graphs."""
        shards = self.shards
        assert shards is not None, "what is taken over has shards"
        shards.flush()
        found = {number: p.grad for number, p in self._zero.trainable() if p.grad is not None}
        if not found:
            return
        infos = self._zero.param_infos()
        self._zero.note(f"{OUTSIDE}: {', '.join(infos[number].fqn for number in sorted(found))}")
        shards.reduce_behind(self._zero.unit_gradients(found))
        for _, parameter in self._zero.trainable():
            parameter.grad = None

    def _end_backward(self) -> None:
        """Finish a backward, where DeepSpeed would reduce gradients."""
        raise NotImplementedError


class ZeroPartitionSync(ZeroSync):
    """Strategy of stages 1 and 2: forwards use whole parameters, backwards reduce to this rank's part of each group."""

    def __init__(self, adapter: ZeroPartitionAdapter) -> None:
        super().__init__(adapter)
        self._partition = adapter

    @property
    def sharded(self) -> ShardedAdapter | None:  # type: ignore[override]
        """None: parameters are not sharded."""
        return None

    @property
    def scatters(self) -> bool:
        return True

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        self._take_engine()
        return self.model.services.make_shards(self._zero.units, self._zero.groups), None

    def check_result(self, result: Any) -> None:
        """Accept a returned parameter: its gradients from outside the graphs are reduced after the backward."""

    def _end_backward(self) -> None:
        engine = self._zero.engine
        if not compat.deepspeed.reduces(engine):
            return
        self._reduce_rest()
        if compat.deepspeed.ends_step(engine):
            self._partition.hand_over()


class Zero3Sync(ZeroSync):
    """Strategy of stage 3: programs gather parameters, and reduce gradients to shards."""

    def __init__(self, adapter: Zero3Adapter) -> None:
        super().__init__(adapter)
        self._shards = adapter

    def take_over(self) -> tuple[ShardedParameters | None, EagerRegionMonitor | None]:
        if self._zero.eligible:
            self._take_engine()
        return super().take_over()

    def begin_call(self, call: Invocation) -> None:
        super().begin_call(call)
        if self._zero.eligible and torch.is_grad_enabled() and compat.zero.begins_step(self._zero.engine):
            self._shards.begin_step()

    def _end_backward(self) -> None:
        self._reduce_rest()
        compat.zero.end_backward(self._zero.engine)
