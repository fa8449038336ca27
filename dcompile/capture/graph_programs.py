"""The programs of one captured graph, and the code that runs around them in forward and backward."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.capture import batched_backward
from dcompile.capture.absent_outputs import AbsentOutputs
from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync
from dcompile.capture.aliasing.input_memory import return_input_views, with_bases_as_traced
from dcompile.capture.captured_graph import Boxed, CapturedGraph
from dcompile.capture.joint_graph import (
    donated_positions,
    insert_outputs,
    saved_positions,
    take_sync_token,
)
from dcompile.capture.opaque_objects import remove_opaque_objects, without_opaque_objects
from dcompile.capture.output_steps import OutputRequest, plan_outputs
from dcompile.capture.passes.joint.absent_gradients import (
    fixed_size_tangents,
    take_out,
    tangents,
    unlikely,
    unsure,
    without,
    zeros_for,
)
from dcompile.capture.program_request import describe_machine, describe_shards
from dcompile.capture.services import GradientBuckets
from dcompile.collectives.contract import Executable, Foreseen, Request
from dcompile.device_traits import traits_of
from dcompile.passes import OutputStep
from dcompile.results.unshare_gradients import UnshareGradients

NEGATIVE_GRADIENTS = "gradient marked as negative, copied"
"""Name of the receipt's count over all backwards of gradients with the negative bit: `y.backward(torch._neg_view(x))`.
"""
WHOLE_BACKWARD = "whole_backward"
"""Name of the backward program that takes every gradient, if the first one lacks some."""


@dataclass(frozen=True, slots=True)
class BackwardState:
    """The backward programs of a graph, once the first is compiled."""

    lacks: frozenset[int]
    """Positions of gradients that are no inputs of the first program."""
    covers_all_params: bool | None = None
    """Whether its buckets have places for all parameters; None if it has no buckets."""
    buckets: GradientBuckets | None = None
    """Those of the first program."""
    whole_buckets: GradientBuckets | None = None
    """Those of the program that takes every gradient: the same places, but other gradients are scaled early."""


class GraphPrograms:
    """Forward and backward programs, or the inference program, of one captured graph, compiled to run here."""

    def __init__(self, graph: CapturedGraph) -> None:
        self.graph = graph
        self.model, self.adapter, self.sync = graph.model, graph.adapter, graph.sync
        self._numbers: tuple[int, ...] = ()
        """Positions of the forward's inputs that are numbers."""
        self.state: BackwardState | None = None

    def build(
        self, gm: Any, kind: Any, whole: bool = False, foreseen: Foreseen | None = None, **more: Any
    ) -> Executable:
        """Compile a graph to a program of a kind. `more`: parts of the request. `foreseen`: see `Compiler`."""
        name = WHOLE_BACKWARD if whole else kind
        self.graph.note_own_collectives(name, gm)
        request = self.request(gm, kind, whole, **more)
        self.graph.executables[name] = self.model.services.compiler.compile_graph(gm, request, foreseen)
        return self.graph.executables[name]

    def request(self, gm: Any, kind: Any, whole: bool = False, **more: Any) -> Request:
        """Return what the compiler is told about a graph besides its operations."""
        if self.graph.sharded or (self.sync.scatters and kind == "backward"):
            shards = describe_shards(self.graph.infos, gm, kind, self.graph.sharded, self.graph.grads)
            more = shards | {"reductions": self.adapter.reductions} | more
        empty = {position for position, _ in more.get("gathers", ())}  # virtual parameters, without memory
        donated = tuple(p for p in donated_positions(gm) if p not in empty) if kind == "backward" else ()
        if self.model.settings.config.triton_cudagraphs and not traits_of(self.graph.device.type).is_host:
            donated = ()  # only a call can check for other references to a saved tensor; a replay cannot
        found = self.adapter.communicators()
        return Request(
            name=f"{WHOLE_BACKWARD if whole else kind}{self.graph.number}",
            kind=kind,
            donated=donated,
            saved=tuple(p for p in saved_positions(gm) if p not in empty) if kind == "backward" else (),
            **describe_machine(self.model, gm, self.graph.device, found, self._copied(found)),
            **more,
        )

    def _foreseen(self) -> tuple[Any, Request] | None:
        """Return the backward to plan while the forward's kernels compile; None if ranks must agree on it first."""
        backward, self.graph.backward_graph = self.graph.backward_graph, None
        if backward is None or self.adapter.carries_sync or self.adapter.communicators():
            return None
        backward = without_opaque_objects(backward)
        likely = without(backward, unlikely(backward) if self.graph.facts.may_lack else (), self._exchanged)
        return likely, self.request(likely, "backward", **self._reduces())

    def gathering(self, run: Executable) -> Boxed:
        """Return a forward or inference program with its shard source."""
        return self.sync.wrap_forward(self.graph, run, "forward" if self.graph.training else "inference")

    def _copied(self, names: Iterable[str]) -> set[str]:
        """Return the groups whose gathers are copies from other ranks' memory; note why others use collectives."""
        shards = self.sync.shards
        if shards is None or self.sync.scatters:
            return set()
        found = {name: shards.copied(name) for name in names}
        reasons = dict.fromkeys(reason for _, reason in found.values() if reason)
        self.graph.notes += [f"shards are gathered by collectives, not copied: {reason}" for reason in reasons]
        return {name for name, (copies, _) in found.items() if copies}

    def inference(self, gm: Any) -> Boxed:
        """Compile a graph that needs no gradient."""
        opaque = remove_opaque_objects(gm)
        return_input_views(gm, opaque.views(compat.aot_metadata.looks_at_inputs()))
        steps = plan_outputs(self._output_steps, gm, OutputRequest(len(gm.graph.output_node().args[0])), "inference")
        run, model = self.build(gm, "inference", results=len(gm.graph.output_node().args[0])), self.model
        gathering, alone = with_bases_as_traced(gm, self.gathering(run)), (self.graph.number,)
        forward_level = compat.autograd.forward_level()

        def inference(args: list[Any]) -> list[Any]:
            if forward_level() >= 0:
                compat.autograd.refuse_tangents(args)
            newest = model.newest
            if model.calls or newest is None or newest.graphs != alone:  # otherwise nothing changes: saves 2 us
                model.record_forward(self.graph)
            results = gathering(args)
            for step, plan in steps:
                step(results, plan)
            return results

        if opaque.inputs:
            return opaque.around(inference)
        asks = gathering is not run or steps
        return compat.lean_wrappers.marked_direct(inference, None if asks else getattr(run, "direct", None))

    def _return_visible(self, gm: Any, shown: int) -> None:
        """Make the forward return parameters that modules show after it, also where the backward reads none of them."""
        outputs = list(gm.graph.output_node().args[0])
        numbers = {node: self.graph.sharded.get(node.name) for node in gm.graph.find_nodes(op="placeholder")}
        found = {node: n for node, n in numbers.items() if n is not None and self._stays_visible(n)}
        more = [node for node in found if node not in outputs[shown:]]
        insert_outputs(gm, len(outputs), more)
        places = {node: at for at, node in enumerate([*outputs, *more]) if at >= shown}
        self.graph.visible = tuple((places[node], number) for node, number in found.items()), len(outputs)

    def _stays_visible(self, number: int) -> bool:
        shard = self.graph.infos[number].shard
        return (
            shard is not None
            and not shard.reshard
            and self.sync.sharded is not None
            and self.sync.sharded.stays_visible(number)
        )

    @property
    def _output_steps(self) -> Sequence[OutputStep]:
        return self.model.services.compiler.graph_passes().outputs

    def forward(self, gm: Any) -> Boxed:
        """Compile the forward of a training graph."""
        opaque = remove_opaque_objects(gm)
        position, shown = take_sync_token(gm), opaque.result_place(self.graph.facts.results)
        return_input_views(gm, opaque.views(compat.aot_metadata.looks_at_inputs()))
        inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
        self._numbers = tuple(n for n, node in inputs if not isinstance(node.meta.get("val"), torch.Tensor))
        views, constant = compat.aot_metadata.take_views(), compat.aot_metadata.constant_results()
        request = OutputRequest(shown, opaque.result_places(views), opaque.result_places(constant))
        steps = plan_outputs(self._output_steps, gm, request, "forward")
        self._return_visible(gm, shown)
        run = self.build(gm, "forward", foreseen=self._foreseen, results=shown)
        model = self.model
        gathering, alone = with_bases_as_traced(gm, self.gathering(run)), (self.graph.number,)

        def forward(args: list[Any]) -> list[Any]:
            newest = model.newest
            if position is not None or model.calls or newest is None or newest.graphs != alone:
                token = model.record_forward(self.graph)
            results = list(gathering(args))
            for step, plan in steps:
                step(results, plan)
            if position is not None:
                results.insert(position, token)
            return results

        return opaque.around(forward)

    def backward(self, gm: Any) -> Boxed:
        """Return the backward, compiled at its first call: only then is it known whether it reduces gradients."""
        opaque = remove_opaque_objects(gm)
        self.graph.grads = tuple((opaque.result_place(place), number) for place, number in self.graph.grads)
        position = take_sync_token(gm)
        given = tangents(gm)
        places = given if self.graph.facts.may_lack else ()
        numbers = dict(self.graph.grads)
        self.graph.unsure = tuple(sorted({numbers[place] for place in unsure(gm, numbers)}))
        alone = position is None and not places and not self.adapter.synchronizes
        settled: Boxed | None = None
        is_batch, apart = compat.aot.batch_test(), UnshareGradients()
        outputs = AbsentOutputs(gm, self.sync, self.graph.grads, self.graph.unsure, self._numbers)

        def backward(args: list[Any]) -> list[Any]:
            nonlocal settled
            token = 0 if position is None else int(args.pop(position))
            sync, strategy = 0 if position is None else self.syncs(token), self.sync.by_token(token)
            for place in given:
                if args[place] is not None:
                    if is_batch(args[place]):
                        return self._batched(gm, args)
                    if args[place].is_neg():  # kernels read memory
                        args[place] = args[place].resolve_neg()
                        self.graph.fallbacks[NEGATIVE_GRADIENTS] += 1
            if settled is not None:
                return settled(args)
            self.model.before_backward(self.graph, bool(sync))
            absent = frozenset(place for place in places if args[place] is None)
            if absent and len(absent) == len(given) and not self.graph.grads:
                return outputs.without_any(absent)
            kind, state = self._backward_for(gm, absent)
            lacks = state.lacks if kind == "backward" else frozenset[int]()
            memory = kind, sync, state.covers_all_params
            for place in absent - lacks:
                args[place] = zeros_for(gm, place)
            take_out(args, lacks)
            gone, zeros = outputs.of(absent) if absent else ((), ())
            results = apart.of(memory, self._run_backward(kind, args, sync, gone, strategy))
            if alone:  # later calls skip the tests above, whose results do not change any more
                settled = apart.around(memory, self.graph.executables[kind])
            outputs.fill(results, gone, zeros)
            return results

        return opaque.around(backward)

    def syncs(self, token: int) -> int:
        """Return whether and how a backward reduces gradients, by its forward's token (see `Invocation.token`)."""
        if self.sync.sharded is not None:  # its token is a number of a module
            return 0
        return (abs(token) or 1) if token > 0 or self.adapter.prepared else 0

    def _batched(self, gm: Any, args: list[Any]) -> list[Any]:
        """Run a backward of batched gradients; these are for the caller only, and none is reduced."""
        self.graph.notes += [] if batched_backward.NOTE in self.graph.notes else [batched_backward.NOTE]
        self.graph.fallbacks[batched_backward.COUNTED] += 1
        return batched_backward.run_batched(gm, args, bool(self.graph.sharded))

    @property
    def _exchanged(self) -> frozenset[int]:
        """Positions of the backward's results that ranks reduce."""
        return frozenset(place for place, _ in self.graph.grads)

    def _backward_for(self, gm: Any, absent: frozenset[int]) -> tuple[str, BackwardState]:
        """Return the name of the program to run if these gradients are absent, compiled if need be, and the state.

        The first program lacks the gradients that are absent in the first backward, and most models need no other. If
        one of them is present later, a program that takes all gradients serves this and every such call.
        """
        state = self.state
        if state is not None and state.buckets is not None and state.covers_all_params != self.adapter.every:
            # compiled before ranks decided, for a backward that did not reduce
            self.graph.executables.pop(WHOLE_BACKWARD, None)
            state = None
        if state is None:
            lacks = fixed_size_tangents(gm, absent) if len(absent) < len(tangents(gm)) else frozenset[int]()
            with self.model.peers.busy("compiling"):
                state = self.build_backward(without(gm, lacks, self._exchanged), lacks)
        if state.lacks <= absent:
            return "backward", state
        if WHOLE_BACKWARD not in self.graph.executables:
            began = time.perf_counter()
            with self.model.peers.busy("compiling"):
                state = self._build_whole_backward(gm, state)
            self.model.compile_seconds += time.perf_counter() - began
        return WHOLE_BACKWARD, state

    def build_backward(self, gm: Any, lacks: frozenset[int] = frozenset()) -> BackwardState:
        """Compile the backward without the gradients at positions `lacks`, which `gm` does not take."""
        began = time.perf_counter()
        executable = self.build(gm, "backward", **self._reduces())
        state = BackwardState(lacks)
        if self._has_buckets():
            state = BackwardState(lacks, self.adapter.every, self.sync.make_buckets(executable.buckets))
        self.state = state
        self.model.compile_seconds += time.perf_counter() - began
        return state

    def _build_whole_backward(self, gm: Any, state: BackwardState) -> BackwardState:
        """Compile the backward that takes every gradient; its buckets exchange what those of the first one do.

        Another rank may run the first one meanwhile. How a gradient is computed, and so named, may differ.
        """
        first = self.graph.executables["backward"]
        whole = self.build(gm, "backward", whole=True, **self._reduces())
        if state.buckets is not None and whole.buckets:  # there are none if DDP itself reduces by now
            same = [b.exchanged for b in whole.buckets] == [b.exchanged for b in first.buckets]
            assert same, "places in buckets follow from parameters alone"
            self.state = state = dataclasses.replace(state, whole_buckets=self.sync.make_buckets(whole.buckets))
        return state

    def _reduces(self) -> dict[str, Any]:
        """Return the parts of a request about buckets, if the backward's program reduces DDP's gradients."""
        rule = self.adapter.bucket_rule()
        if rule is None or not self._has_buckets():
            return {}
        params = self.adapter.exchanged({number for _, number in self.graph.grads})
        rule = dataclasses.replace(rule, unsure=self.graph.unsure)
        return {"grads": self.graph.grads, "params": params, "rule": rule}

    def _has_buckets(self) -> bool:
        """Does the backward's program write gradients into buckets and reduce them?"""
        reduces = self.sync.reduces_in_program(self.graph)
        return bool(self.graph.grads) and reduces and self.adapter.bucket_rule() is not None

    def _run_backward(
        self, kind: str, args: list[Any], sync: int, gone: Collection[int], strategy: GradientSync
    ) -> list[Any]:
        """Run a backward program. `gone`: positions of results that are None in this call."""
        state = self.state
        assert state is not None, "a backward runs after it was compiled"
        buckets = state.whole_buckets if kind == WHOLE_BACKWARD and state.whole_buckets is not None else state.buckets
        return strategy.run_backward(BackwardCall(self.graph, self.graph.executables[kind], buckets, args, sync, gone))
