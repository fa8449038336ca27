"""The programs of one Dynamo graph, and the code that runs around them in forward and backward."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from dcompile import compat
from dcompile.capture import batched_backward
from dcompile.capture.absent_outputs import AbsentOutputs
from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.agreement.capture_digest import CAPTURES, by_group, own_collectives, plan_of
from dcompile.capture.aliasing.input_memory import return_input_views, with_bases_as_traced
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.joint_graph import (
    PartitionResult,
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
from dcompile.capture.services import GradientBuckets, Line
from dcompile.capture.trace_cache.graph_trace import GraphTrace
from dcompile.collectives.contract import Executable, Foreseen, Request
from dcompile.device_traits import HOST, traits_of
from dcompile.passes import OutputStep
from dcompile.results.unshare_gradients import UnshareGradients

Boxed = Callable[[list[Any]], list[Any]]
NEGATIVE_GRADIENTS = "gradient marked as negative, copied"
"""Name of the receipt's count over all backwards of gradients with the negative bit: `y.backward(torch._neg_view(x))`.
"""
LENT = "the programs of an equal module"
"""What ranks compare in place of a graph where they capture none."""
WHOLE_BACKWARD = "whole_backward"
"""Name of the backward program that takes every gradient, if the first one lacks some."""


class GraphPrograms:
    """Forward and backward programs, or the inference program, of one Dynamo graph."""

    def __init__(self, model: CompiledModel, example_inputs: Sequence[Any]) -> None:
        self.model = model
        self.number = len(model.graphs)
        self.training = False
        self.executables: dict[str, Executable] = {}
        self.buckets: GradientBuckets | None = None
        """Those of the first backward program."""
        self._whole_buckets: GradientBuckets | None = None
        """Those of the backward that takes every gradient: the same places, but other gradients are scaled early."""
        self.adapter, self.sync = model.adapter, model.sync
        self.infos = self.adapter.param_infos()
        """The parameters in the setting for which the graph is captured: its backward may be compiled in another."""
        # Dynamo passes the parameters themselves
        self.params: dict[int, int] = {}
        """Position among the graph's inputs -> the parameter's number."""
        for position, value in enumerate(example_inputs):
            number = self.adapter.number_of(value) if isinstance(value, torch.nn.Parameter) else None
            if number is not None:
                self.params[position] = number
        self.grads: tuple[tuple[int, int], ...] = ()
        """(position among the backward's outputs, parameter number)."""
        devices = {value.device for value in example_inputs if isinstance(value, torch.Tensor)}
        self.device = min(
            devices, key=lambda device: (traits_of(device.type).is_host, str(device)), default=torch.device(HOST)
        )
        """The device on which the graph runs: a GPU if any input is on one."""
        self.notes: list[str] = []
        """Lines for the receipt about changes to the graph."""
        self.fallbacks: Counter[str] = Counter()
        """Reason -> count of runs without dcompile's kernels that are due to the way the graph is called."""
        self._own: dict[str, list[tuple[str, str]]] = {}
        """Name of a program -> (process group, line) of what the model itself calls: SyncBatchNorm, tensor parallelism.
        """
        self._agreed: set[tuple[str, GradientSync]] = set()
        """Kinds of programs whose collectives were compared between ranks, and for which module."""
        self.later: set[int] = set()
        """Units for which earlier graphs of a call compute gradients, too: their backward, a later one, reduces all."""
        self._sharded: dict[str, int] = {}
        """Name of a placeholder -> number of its sharded parameter."""
        self.visible: tuple[tuple[tuple[int, int], ...], int] = ((), 0)
        """See `CapturedGraph.visible`."""
        self._goes_on = False
        """Whether other code of a call may follow, so that this one's results may all lack gradients."""
        self.captured: list[Line] = []
        """Lines of the graph that ranks compare before its first collective; empty if there is nothing to compare."""
        self._may_lack = False
        """Whether the backward may get None for gradients of unused results."""
        self._shapes_kept: tuple[int, ...] = ()
        """Results of symbolic sizes, whose shapes a backward needs if their gradients are absent."""
        self._own_results: tuple[int, ...] = ()
        self._learning: frozenset[int] = frozenset()
        """Positions of results that have gradients in AOTAutograd."""
        self._every: bool | None = None
        """Whether the compiled backward's buckets have places for all parameters; None before it is compiled."""
        self._lacks: frozenset[int] | None = None
        """Positions of gradients that are no inputs of the compiled backward; None before it is compiled."""
        self.unsure: tuple[int, ...] = ()
        """Parameters whose gradients may be absent from a backward."""
        self._numbers: tuple[int, ...] = ()
        """Positions of the forward's inputs that are numbers."""
        self.changed: frozenset[int] | None = None
        """Positions of the inputs that the graph writes to, as far as that is known."""
        self.trace: GraphTrace | None = None
        """Where the graph's trace came from, once it is compiled."""
        self._before: tuple[int, Counter[str]] = (0, Counter())
        """How many notes, and which fallbacks, there were before it was traced."""
        self._cut = PartitionResult(())
        self._parted: Any = None
        """The partition's backward, until the forward is compiled."""
        model.graphs.append(self)

    def _build(
        self, gm: Any, kind: Any, whole: bool = False, foreseen: Foreseen | None = None, **more: Any
    ) -> Executable:
        name = WHOLE_BACKWARD if whole else kind
        self._own[name] = list(own_collectives(gm))
        request = self._request(gm, kind, whole, **more)
        self.executables[name] = self.model.services.compiler.compile_graph(gm, request, foreseen)
        return self.executables[name]

    def _request(self, gm: Any, kind: Any, whole: bool = False, **more: Any) -> Request:
        if self._sharded or (self.sync.scatters and kind == "backward"):
            shards = describe_shards(self.infos, gm, kind, self._sharded, self.grads)
            more = shards | {"reductions": self.adapter.reductions} | more
        empty = {position for position, _ in more.get("gathers", ())}  # virtual parameters, without memory
        donated = tuple(p for p in donated_positions(gm) if p not in empty) if kind == "backward" else ()
        if self.model.settings.config.triton_cudagraphs and not traits_of(self.device.type).is_host:
            donated = ()  # only a call can check for other references to a saved tensor; a replay cannot
        found = self.adapter.communicators()
        return Request(
            name=f"{WHOLE_BACKWARD if whole else kind}{self.number}",
            kind=kind,
            donated=donated,
            saved=tuple(p for p in saved_positions(gm) if p not in empty) if kind == "backward" else (),
            **describe_machine(self.model, gm, self.device, found, self._copied(found)),
            **more,
        )

    def _foreseen(self) -> tuple[Any, Request] | None:
        """Return the backward to plan while the forward's kernels compile; None if ranks must agree on it first."""
        backward, self._parted = self._parted, None
        if backward is None or self.adapter.carries_sync or self.adapter.communicators():
            return None
        backward = without_opaque_objects(backward)
        likely = without(backward, unlikely(backward) if self._may_lack else (), self._exchanged)
        return likely, self._request(likely, "backward", **self._reduces())

    def _gathering(self, run: Executable) -> Boxed:
        """Return a forward or inference program with its shard source."""
        return self.sync.wrap_forward(self, run, "forward" if self.training else "inference")

    @property
    def gathers(self) -> bool:
        """Whether programs gather sharded parameters."""
        return bool(self._sharded)

    def has_own_collectives(self, kind: str) -> bool:
        """Does a program have collectives that the model itself calls?"""
        return bool(self._own[kind])

    def _copied(self, names: Iterable[str]) -> set[str]:
        """Return the groups whose gathers are copies from other ranks' memory; note why others use collectives."""
        shards = self.sync.shards
        if shards is None or self.sync.scatters:
            return set()
        found = {name: shards.copied(name) for name in names}
        reasons = dict.fromkeys(reason for _, reason in found.values() if reason)
        self.notes += [f"shards are gathered by collectives, not copied: {reason}" for reason in reasons]
        return {name for name, (copies, _) in found.items() if copies}

    def _inference(self, gm: Any) -> Boxed:
        opaque = remove_opaque_objects(gm)
        return_input_views(gm, opaque.views(compat.aot_metadata.looks_at_inputs()))
        steps = plan_outputs(self._output_steps, gm, OutputRequest(len(gm.graph.output_node().args[0])), "inference")
        run, model = self._build(gm, "inference", results=len(gm.graph.output_node().args[0])), self.model
        gathering, alone = with_bases_as_traced(gm, self._gathering(run)), (self.number,)
        forward_level = compat.autograd.forward_level()

        def inference(args: list[Any]) -> list[Any]:
            if forward_level() >= 0:
                compat.autograd.refuse_tangents(args)
            newest = model.newest
            if model.calls or newest is None or newest.graphs != alone:  # otherwise nothing changes: saves 2 us
                model.record_forward(self)
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
        numbers = {node: self._sharded.get(node.name) for node in gm.graph.find_nodes(op="placeholder")}
        found = {node: n for node, n in numbers.items() if n is not None and self._stays_visible(n)}
        more = [node for node in found if node not in outputs[shown:]]
        insert_outputs(gm, len(outputs), more)
        places = {node: at for at, node in enumerate([*outputs, *more]) if at >= shown}
        self.visible = tuple((places[node], number) for node, number in found.items()), len(outputs)

    def _stays_visible(self, number: int) -> bool:
        shard = self.infos[number].shard
        return (
            shard is not None
            and not shard.reshard
            and self.sync.sharded is not None
            and self.sync.sharded.stays_visible(number)
        )

    @property
    def _output_steps(self) -> Sequence[OutputStep]:
        return self.model.services.compiler.graph_passes().outputs

    def _forward(self, gm: Any) -> Boxed:
        opaque = remove_opaque_objects(gm)
        position, shown = take_sync_token(gm), opaque.result_place(self._cut.results)
        return_input_views(gm, opaque.views(compat.aot_metadata.looks_at_inputs()))
        inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
        self._numbers = tuple(n for n, node in inputs if not isinstance(node.meta.get("val"), torch.Tensor))
        views, constant = compat.aot_metadata.take_views(), compat.aot_metadata.constant_results()
        request = OutputRequest(shown, opaque.result_places(views), opaque.result_places(constant))
        steps = plan_outputs(self._output_steps, gm, request, "forward")
        self._return_visible(gm, shown)
        run = self._build(gm, "forward", foreseen=self._foreseen, results=shown)
        model = self.model
        gathering, alone = with_bases_as_traced(gm, self._gathering(run)), (self.number,)

        def forward(args: list[Any]) -> list[Any]:
            newest = model.newest
            if position is not None or model.calls or newest is None or newest.graphs != alone:
                token = model.record_forward(self)
            results = list(gathering(args))
            for step, plan in steps:
                step(results, plan)
            if position is not None:
                results.insert(position, token)
            return results

        return opaque.around(forward)

    def _backward(self, gm: Any) -> Boxed:
        """Return the backward, compiled at its first call: only then is it known whether it reduces gradients."""
        opaque = remove_opaque_objects(gm)
        self.grads = tuple((opaque.result_place(place), number) for place, number in self.grads)
        position = take_sync_token(gm)
        given = tangents(gm)
        places = given if self._may_lack else ()
        numbers = dict(self.grads)
        self.unsure = tuple(sorted({numbers[place] for place in unsure(gm, numbers)}))
        alone = position is None and not places and not self.adapter.synchronizes
        settled: Boxed | None = None
        is_batch, apart = compat.aot.batch_test(), UnshareGradients()
        outputs = AbsentOutputs(gm, self.sync, self.grads, self.unsure, self._numbers)

        def backward(args: list[Any]) -> list[Any]:
            nonlocal settled
            token = 0 if position is None else int(args.pop(position))
            sync, strategy = 0 if position is None else self._syncs(token), self.sync.by_token(token)
            for place in given:
                if args[place] is not None:
                    if is_batch(args[place]):
                        return self._batched(gm, args)
                    if args[place].is_neg():  # kernels read memory
                        args[place] = args[place].resolve_neg()
                        self.fallbacks[NEGATIVE_GRADIENTS] += 1
            if settled is not None:
                return settled(args)
            self.model.before_backward(self, bool(sync))
            absent = frozenset(place for place in places if args[place] is None)
            if absent and len(absent) == len(given) and not self.grads:
                return outputs.without_any(absent)
            kind = self._backward_for(gm, absent)
            lacks = self._lacks if self._lacks is not None and kind == "backward" else frozenset[int]()
            for place in absent - lacks:
                args[place] = zeros_for(gm, place)
            take_out(args, lacks)
            gone, zeros = outputs.of(absent) if absent else ((), ())
            results = apart.of((kind, sync, self._every), self._run_backward(kind, args, sync, gone, strategy))
            if alone:  # later calls skip the tests above, whose results do not change any more
                settled = apart.around((kind, sync, self._every), self.executables[kind])
            outputs.fill(results, gone, zeros)
            return results

        return opaque.around(backward)

    def _syncs(self, token: int) -> int:
        """Return whether and how a backward reduces gradients, by its forward's token (see `Invocation.token`)."""
        if self.sync.sharded is not None:  # its token is a number of a module
            return 0
        return (abs(token) or 1) if token > 0 or self.adapter.prepared else 0

    def _batched(self, gm: Any, args: list[Any]) -> list[Any]:
        """Run a backward of batched gradients; these are for the caller only, and none is reduced."""
        self.notes += [] if batched_backward.NOTE in self.notes else [batched_backward.NOTE]
        self.fallbacks[batched_backward.COUNTED] += 1
        return batched_backward.run_batched(gm, args, bool(self._sharded))

    @property
    def _exchanged(self) -> frozenset[int]:
        """Positions of the backward's results that ranks reduce."""
        return frozenset(place for place, _ in self.grads)

    def _backward_for(self, gm: Any, absent: frozenset[int]) -> str:
        """Return the name of the program to run if these gradients are absent; compile it if need be.

        The first program lacks the gradients that are absent in the first backward, and most models need no other. If
        one of them is present later, a program that takes all gradients serves this and every such call.
        """
        if self.buckets is not None and self._every != self.adapter.every:
            # compiled before ranks decided, for a backward that did not reduce
            self._lacks = self.buckets = self._whole_buckets = None
            self.executables.pop(WHOLE_BACKWARD, None)
        if self._lacks is None:
            lacks = fixed_size_tangents(gm, absent) if len(absent) < len(tangents(gm)) else frozenset[int]()
            with self.model.peers.busy("compiling"):
                self._build_backward(without(gm, lacks, self._exchanged))
            self._lacks = lacks
        if self._lacks <= absent:
            return "backward"
        if WHOLE_BACKWARD not in self.executables:
            began = time.perf_counter()
            with self.model.peers.busy("compiling"):
                self._build_whole_backward(gm)
            self.model.compile_seconds += time.perf_counter() - began
        return WHOLE_BACKWARD

    def _build_backward(self, gm: Any) -> None:
        began = time.perf_counter()
        adapter = self.adapter
        executable = self._build(gm, "backward", **self._reduces())
        if self._has_buckets():
            self._every, self.buckets = adapter.every, self.sync.make_buckets(executable.buckets)
        self.model.compile_seconds += time.perf_counter() - began

    def _build_whole_backward(self, gm: Any) -> None:
        """Compile the backward that takes every gradient; its buckets exchange what those of the first one do.

        Another rank may run the first one meanwhile. How a gradient is computed, and so named, may differ.
        """
        first = self.executables["backward"]
        whole = self._build(gm, "backward", whole=True, **self._reduces())
        if self.buckets is not None and whole.buckets:  # there are none if DDP itself reduces by now
            same = [b.exchanged for b in whole.buckets] == [b.exchanged for b in first.buckets]
            assert same, "places in buckets follow from parameters alone"
            self._whole_buckets = self.sync.make_buckets(whole.buckets)

    def _reduces(self) -> dict[str, Any]:
        """Return the parts of a request about buckets, if the backward's program reduces DDP's gradients."""
        rule = self.adapter.bucket_rule()
        if rule is None or not self._has_buckets():
            return {}
        params = self.adapter.exchanged({number for _, number in self.grads})
        return {"grads": self.grads, "params": params, "rule": dataclasses.replace(rule, unsure=self.unsure)}

    def _has_buckets(self) -> bool:
        """Does the backward's program write gradients into buckets and reduce them?"""
        reduces = self.sync.reduces_in_program(self)
        return bool(self.grads) and reduces and self.adapter.bucket_rule() is not None

    def _run_backward(
        self, kind: str, args: list[Any], sync: int, gone: Collection[int], strategy: GradientSync
    ) -> list[Any]:
        """Run a backward program. `gone`: positions of results that are None in this call."""
        whole = self._whole_buckets if kind == WHOLE_BACKWARD else None
        buckets = self.buckets if whole is None else whole
        return strategy.run_backward(BackwardCall(self, self.executables[kind], buckets, args, sync, gone))

    def accumulates(self) -> bool:
        """Inside its backward: does that add to any parameter's .grad? torch.autograd.grad does not."""
        return self.sync.accumulates(number for _, number in self.grads)

    def strategy(self) -> GradientSync:
        """Return the gradient synchronization of the module whose call runs the forward: this one, or an equal one."""
        stack = self.model.calls.get(threading.get_ident())
        return stack[-1].strategy if stack else self.sync

    def agree(self, kind: str, strategy: GradientSync | None = None) -> None:
        """Check before a program's first collective that every rank is about to run the same ones."""
        strategy = self.sync if strategy is None else strategy
        if (kind, strategy) in self._agreed:
            return
        self._agreed.add((kind, strategy))
        if strategy is not self.sync:
            self._agree_on_lending(strategy)
        elif self.captured and self.adapter.compares_in_forward:  # DDP's are compared before a backward
            self.model.compare_captures([self])
        strategy.model.agree_on(self.plan(kind, strategy.adapter))
        strategy.model.agree_on_own(by_group(self._own[kind]))

    def _agree_on_lending(self, strategy: GradientSync) -> None:
        """Check that every rank runs this program for an equal module: one that captures it compares its graph now."""
        if torch.is_grad_enabled() and not strategy.compared:
            strategy.compared, adapter = True, strategy.adapter
            self.model.services.agree(adapter.group, CAPTURES, [LENT], adapter.way_to_differ)

    def plan(self, kind: str = "backward", adapter: PlainAdapter | None = None) -> list[str]:
        """Return the collectives of a program, one line each, equal on every rank that runs the same program."""
        infos = (self.adapter if adapter is None else adapter).param_infos()
        buckets = plan_of(self.executables[kind].buckets, infos)
        return buckets + [line for _, line in self._own[kind]]


def mark_boxed(function: Any) -> Boxed:
    """Mark a function that takes one list and empties it."""
    function._boxed_call = True
    boxed: Boxed = function
    return boxed
