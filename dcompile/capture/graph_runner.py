"""The programs of one Dynamo graph, and what runs around them in forward and backward."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.capture import batched_backward
from dcompile.capture.adapters.gradient_sync import BackwardCall
from dcompile.capture.agreement.collective_plan import plan_of
from dcompile.capture.aliasing.input_views import return_input_views
from dcompile.capture.aliasing.unshare_gradients import UnshareGradients
from dcompile.capture.aliasing.view_bases import with_bases_as_traced
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.joint_graph import PartitionResult, donated_positions, saved_positions, take_sync_token
from dcompile.capture.opaque_objects import remove_opaque_objects, without_opaque_objects
from dcompile.capture.output_steps import OutputRequest, plan_outputs
from dcompile.capture.passes.joint.absent_gradients import (
    absent_results,
    fixed_size_tangents,
    take_out,
    tangents,
    unlikely,
    unsure,
    without,
    zeros_for,
    zeros_of,
)
from dcompile.capture.services import GradientBuckets, Line
from dcompile.capture.trace_cache.graph_trace import GraphTrace
from dcompile.collectives.contract import Executable, Foreseen, ParamInfo, Request
from dcompile.device_traits import HOST, traits_of
from dcompile.ir.functional_collectives import NAMESPACE, is_wait
from dcompile.machine_model import GroupSize
from dcompile.passes import OutputStep

Boxed = Callable[[list[Any]], list[Any]]
NEGATIVE_GRADIENTS = "gradient marked as negative, copied"
"""What the receipt counts, of all backwards so far: `y.backward(torch._neg_view(x))`."""
WHOLE_BACKWARD = "whole_backward"
"""The program of a backward that takes every gradient, where the first one could do without some."""


class GraphPrograms:
    """Forward and backward, or inference program of one Dynamo graph."""

    def __init__(self, model: CompiledModel, example_inputs: Sequence[Any]) -> None:
        self.model = model
        self.number = len(model.graphs)
        self.training = False
        self.executables: dict[str, Executable] = {}
        self.buckets: GradientBuckets | None = None
        self.adapter, self.sync = model.adapter, model.sync
        self.shards = model.shards
        """What its sharded parameters are exchanged through, also after they were given back: for backwards to come."""
        # Dynamo hands over the parameters themselves
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
        """What the graph runs on: a GPU if any input is on one."""
        self.notes: list[str] = []
        """What was done to the graph before AOTAutograd saw it, for people."""
        self.fallbacks: Counter[str] = Counter()
        """What runs without kernels of ours because of how the graph is called, and how often."""
        self._own: dict[str, list[str]] = {}
        """Kind of a program -> collectives that the model itself calls (SyncBatchNorm, tensor parallelism)."""
        self._own_by_group: dict[str, dict[str, list[str]]] = {}
        """Kind of a program -> name of a process group -> those of them that run over it."""
        self._agreed: set[str] = set()
        """Kinds of programs whose collectives were compared between ranks."""
        self.later: set[int] = set()
        """Units whose gradients an earlier graph of a call has a share in: its backward, the later one, reduces all."""
        self._sharded: dict[str, int] = {}
        """Name of a placeholder -> number of the sharded parameter that it stands for."""
        self._goes_on = False
        """Whether other graphs of a call may come behind, so that none of this one's results has a gradient."""
        self.captured: list[Line] = []
        """What ranks compare of the graph before its first collective; empty once they have, or need not."""
        self._may_lack = False
        """Whether the backward may be left without gradients of results that nothing was computed with."""
        self._shapes_kept: tuple[int, ...] = ()
        """Results of symbolic sizes, whose shapes a backward asks for where it gets no gradient of them."""
        self._own_results: tuple[int, ...] = ()
        self._learning: frozenset[int] = frozenset()
        """Results that AOTAutograd gives a gradient."""
        self._every: bool | None = None
        """Whether the backward's program has places for all parameters, once it is compiled."""
        self._lacks: frozenset[int] | None = None
        """Positions of the gradients that the backward's program does without, once it is compiled."""
        self._follows: dict[frozenset[int], tuple[int, ...]] = {}
        """Absent gradients -> positions of the backward's results that are absent, too."""
        self.unsure: tuple[int, ...] = ()
        """Parameters that a backward may have no gradient of."""
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
        """The backward as partitioning left it, until the forward is compiled."""
        model.graphs.append(self)

    def _build(
        self, gm: Any, kind: Any, whole: bool = False, foreseen: Foreseen | None = None, **more: Any
    ) -> Executable:
        own = list(own_collectives(gm))
        self._own[WHOLE_BACKWARD if whole else kind] = [line for _, line in own]
        self._own_by_group[WHOLE_BACKWARD if whole else kind] = _by_group(own)
        request = self._request(gm, kind, whole, **more)
        executable = self.model.services.compiler.compile_graph(gm, request, foreseen)
        self.executables[WHOLE_BACKWARD if whole else kind] = executable
        return executable

    def _request(self, gm: Any, kind: Any, whole: bool = False, **more: Any) -> Request:
        if self._sharded or (self.sync.scatters and kind == "backward"):
            more = self._shards(gm, kind) | more
        empty = {position for position, _ in more.get("gathers", ())}  # they stand for what is gathered, without memory
        donated = tuple(p for p in donated_positions(gm) if p not in empty) if kind == "backward" else ()
        if self.model.settings.config.triton_cudagraphs and not traits_of(self.device.type).is_host:
            donated = ()  # only a call sees whether anybody else has a saved tensor, and a replay is none
        return Request(
            name=f"{WHOLE_BACKWARD if whole else kind}{self.number}",
            kind=kind,
            donated=donated,
            saved=tuple(p for p in saved_positions(gm) if p not in empty) if kind == "backward" else (),
            **self._machine(gm),
            **more,
        )

    def _foreseen(self) -> tuple[Any, Request] | None:
        """The backward that most likely follows: it is planned while the forward's kernels are compiled.

        Not where ranks have to agree on it first.
        """
        backward, self._parted = self._parted, None
        if backward is None or self.adapter.carries_sync or self.adapter.communicators():
            return None
        backward = without_opaque_objects(backward)
        likely = without(backward, unlikely(backward) if self._may_lack else (), self._exchanged)
        return likely, self._request(likely, "backward", **self._reduces())

    def _shards(self, gm: Any, kind: str) -> dict[str, Any]:
        """What a program has to gather and to reduce."""
        infos = self.adapter.param_infos()
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        held = [(position, self._sharded[name]) for position, name in enumerate(names) if name in self._sharded]
        # what the forward has kept arrives in the backward as it was gathered
        gathers = tuple(entry for entry in held if kind != "backward" or _reshards(infos[entry[1]]))
        grads = self.grads if kind == "backward" else ()
        used = sorted({number for _, number in (*gathers, *grads)})
        params = tuple(infos[number] for number in used)
        return {"gathers": gathers, "grads": grads, "params": params, "reductions": self.adapter.reductions}

    def _gathering(self, run: Executable) -> Boxed:
        """A forward or inference program, with what it gathers through."""
        return self.sync.wrap_forward(self, run, "forward" if self.training else "inference")

    @property
    def gathers(self) -> bool:
        """Whether programs gather sharded parameters."""
        return bool(self._sharded)

    def has_own_collectives(self, kind: str) -> bool:
        """Whether a program has collectives that the model itself calls."""
        return bool(self._own[kind])

    def _machine(self, gm: Any) -> dict[str, Any]:
        """What the cost model is told: of the adapter's groups, and of those that the graph's own collectives name."""
        found, replicas = self.adapter.communicators(), self.adapter.replicas()
        lanes: dict[int, str] = {}
        for name, group in found.items():
            lanes.setdefault(id(group), name)
        copied = self._copied(found)
        own = {
            name: group
            for named, name in compat.groups.named_groups(gm).items()
            if (group := compat.groups.group_by_name(named)) is not None
        }
        for name, group in own.items():
            lanes.setdefault(id(group), name)
        config = self.model.settings.config
        return {
            "figures": self.model.services.figures(self.device, next(iter(found.values()), None)),
            "groups": tuple(
                (name, GroupSize(dist.get_world_size(group), lanes[id(group)], replicas.get(name, 1), name in copied))
                for name, group in (found | own).items()
            ),
            "early_bytes": None if config.overlap_mb < 0 else config.overlap_mb << 20,
        }

    def _copied(self, names: Iterable[str]) -> set[str]:
        """Groups whose gathers are copies from the other ranks' memory; a note says why others' are not."""
        if self.shards is None or self.sync.scatters:
            return set()
        found = {name: self.shards.copied(name) for name in names}
        reasons = dict.fromkeys(reason for _, reason in found.values() if reason)
        self.notes += [f"shards are gathered by collectives, not copied: {reason}" for reason in reasons]
        return {name for name, (copies, _) in found.items() if copies}

    def _inference(self, gm: Any) -> Boxed:
        opaque = remove_opaque_objects(gm)
        return_input_views(gm, opaque.views(compat.aot.looks_at_inputs()))
        steps = plan_outputs(self._output_steps, gm, OutputRequest(len(gm.graph.output_node().args[0])), "inference")
        run, model = self._build(gm, "inference", results=len(gm.graph.output_node().args[0])), self.model
        gathering, alone = with_bases_as_traced(gm, self._gathering(run)), (self.number,)

        def inference(args: list[Any]) -> list[Any]:
            newest = model.newest
            if model.calls or newest is None or newest.graphs != alone:  # else that is what would be noted: 2 us less
                model.record_forward(self)
            results = gathering(args)
            for step, plan in steps:
                step(results, plan)
            return results

        if opaque.inputs:
            return opaque.around(inference)
        asks = gathering is not run or steps
        return compat.lean_wrappers.marked_direct(inference, None if asks else getattr(run, "direct", None))

    @property
    def _output_steps(self) -> Sequence[OutputStep]:
        return self.model.services.compiler.graph_passes().outputs

    def _forward(self, gm: Any) -> Boxed:
        opaque = remove_opaque_objects(gm)
        position, shown = take_sync_token(gm), opaque.result_place(self._cut.results)
        return_input_views(gm, opaque.views(compat.aot.looks_at_inputs()))
        inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
        self._numbers = tuple(n for n, node in inputs if not isinstance(node.meta.get("val"), torch.Tensor))
        views, constant = compat.aot.take_views(), compat.aot.constant_results()
        request = OutputRequest(shown, opaque.result_places(views), opaque.result_places(constant))
        steps = plan_outputs(self._output_steps, gm, request, "forward")
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
        """The backward, compiled at its first call: only then is it known whether it is to reduce gradients."""
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

        def backward(args: list[Any]) -> list[Any]:
            nonlocal settled
            sync = 0 if position is None else self._syncs(int(args.pop(position)))
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
                return self._nothing(gm, absent)
            kind = self._backward_for(gm, absent)
            lacks = self._lacks if self._lacks is not None and kind == "backward" else frozenset[int]()
            for place in absent - lacks:
                args[place] = zeros_for(gm, place)
            take_out(args, lacks)
            gone, zeros = self._what_follows(gm, absent) if absent else ((), ())
            results = apart.of((kind, sync, self._every), self._run_backward(kind, args, sync, gone))
            if alone:  # all that is asked above has been answered for good
                settled = apart.around((kind, sync, self._every), self.executables[kind])
            for place in zeros:
                known = results[place] is not None
                results[place] = torch.zeros_like(results[place]) if known else zeros_of(gm, place)
            for place in gone:
                results[place] = None
            return results

        return opaque.around(backward)

    def _syncs(self, token: int) -> int:
        """Whether, and how, a backward is to reduce gradients, by what its forward has left (`Invocation.token`)."""
        return (abs(token) or 1) if token > 0 or self.adapter.prepared else 0

    def _batched(self, gm: Any, args: list[Any]) -> list[Any]:
        """A backward of several gradients at once, which are for the caller alone: none is reduced."""
        self.notes += [] if batched_backward.NOTE in self.notes else [batched_backward.NOTE]
        self.fallbacks[batched_backward.COUNTED] += 1
        return batched_backward.run_batched(gm, args, bool(self._sharded))

    def _what_follows(self, gm: Any, absent: frozenset[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Positions of results that are absent because what they follow from is; and of those to be zeros all the same.

        The latter are gradients of leaves with hooks. What DDP's own reducer waits for is in neither.
        """
        if absent not in self._follows:
            self._follows[absent] = absent_results(gm, absent)
        follows = self._follows[absent]
        hooked = compat.aot.hooked_leaves() if follows else frozenset[int]()
        if not hooked and not self.grads:
            return follows, ()
        expected, gone, zeros = self.sync.awaited(self.grads, self.unsure), list[int](), list[int]()
        for place in follows:
            # eager calls no hook where there is no gradient; the edge is there now, and a hook would get None
            stays = hooked and place - sum(number < place for number in self._numbers) in hooked
            if stays and place not in self._exchanged:  # what is exchanged are zeros already
                zeros.append(place)
            elif not stays and place not in expected:
                gone.append(place)
        return gone, zeros

    def _nothing(self, gm: Any, absent: frozenset[int]) -> list[Any]:
        """The results of a backward that no gradient has come to: none either."""
        _, zeros = self._what_follows(gm, absent)
        results: list[Any] = [None] * len(gm.graph.output_node().args[0])
        for place in zeros:
            results[place] = zeros_of(gm, place)
        return results

    @property
    def _exchanged(self) -> frozenset[int]:
        """Positions of the backward's results that ranks exchange."""
        return frozenset(place for place, _ in self.grads)

    def _backward_for(self, gm: Any, absent: frozenset[int]) -> str:
        """Which program to run where these gradients are absent.

        The first backward's absent ones are left out of its program, and most models never see others. Where one of
        them is there after all, a program that takes all serves this and every such call.
        """
        if self.buckets is not None and self._every != self.adapter.every:
            self._lacks = self.buckets = None  # compiled for a backward that reduced nothing, before ranks had decided
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
        """The backward that takes every gradient, of which the first one lacked some: its buckets are the same."""
        first = self.executables["backward"]
        whole = self._build(gm, "backward", whole=True, **self._reduces())
        if self.buckets is not None and whole.buckets:  # none, if DDP reduces by now
            same = {b.name: b for b in whole.buckets} == {b.name: b for b in first.buckets}
            assert same, "buckets follow from parameters alone"

    def _reduces(self) -> dict[str, Any]:
        """What a backward's program has to put into buckets, if DDP's gradients are reduced in it."""
        rule = self.adapter.bucket_rule()
        if rule is None or not self._has_buckets():
            return {}
        params = self.adapter.exchanged({number for _, number in self.grads})
        rule = dataclasses.replace(rule, unsure=self.unsure)
        return {"grads": self.grads, "params": params, "rule": rule}

    def _has_buckets(self) -> bool:
        """Whether the backward's program puts gradients into buckets and reduces them."""
        reduces = self.sync.reduces_in_program(self)
        return bool(self.grads) and reduces and self.adapter.bucket_rule() is not None

    def _run_backward(self, kind: str, args: list[Any], sync: int, gone: Collection[int]) -> list[Any]:
        """`gone`: positions of results that there are none of in this call."""
        return self.sync.run_backward(BackwardCall(self, self.executables[kind], self.buckets, args, sync, gone))

    def accumulates(self) -> bool:
        """Inside its backward: whether that adds to any parameter's .grad, which torch.autograd.grad does not."""
        return self.sync.accumulates(number for _, number in self.grads)

    def units(self) -> set[int]:
        """Of sharded parameters: those that a backward has gradients of."""
        return self.units_of(number for _, number in self.grads)

    def units_of(self, numbers: Iterable[int]) -> set[int]:
        infos = self.adapter.param_infos()
        return {shard.unit for number in numbers if (shard := infos[number].shard) is not None}

    def agree(self, kind: str) -> None:
        """Before a program's first collective: see that every rank is about to run the same ones."""
        if kind in self._agreed:
            return
        self._agreed.add(kind)
        if self.captured and self.adapter.compares_in_forward:  # DDP's are compared before a backward
            self.model.compare_captures([self])
        self.model.agree_on(self.plan(kind))
        self.model.agree_on_own(self._own_by_group[kind])

    def plan(self, kind: str = "backward") -> list[str]:
        """The collectives of a program, one line each, the same on every rank that runs the same program."""
        return plan_of(self.executables[kind].buckets, self.adapter.param_infos()) + self._own[kind]


def own_collectives(gm: Any) -> Iterator[tuple[str, str]]:
    """Collectives that are operations of a graph: the process group's name, and a line for each.

    Lines do not say how much is exchanged, as batches may differ.
    """
    for node in gm.graph.nodes:
        op = str(node.target)
        if node.op == "call_function" and op.startswith(NAMESPACE) and not is_wait(op):
            texts = [arg for arg in node.args if isinstance(arg, str)]
            if texts:  # else its group is an object, and lowering says so
                *how, group = texts
                yield group, f"{' '.join((op.split('.')[1], *how))} over {compat.groups.size_of(group)} ranks"


def _by_group(own: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group, line in own:
        found.setdefault(group, []).append(line)
    return found


def _reshards(info: ParamInfo) -> bool:
    return info.shard is not None and info.shard.reshard


def mark_boxed(function: Any) -> Boxed:
    """Mark a function that takes one list and empties it."""
    function._boxed_call = True
    boxed: Boxed = function
    return boxed
