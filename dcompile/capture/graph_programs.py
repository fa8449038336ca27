"""The programs of one captured graph, and the code that runs around them in forward and backward.

Around a program stand the conversions that its graph needs: device meshes and process groups, which pass through
unread, are taken out; absent gradients become None or zeros; batches of gradients run operator by operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync
from dcompile.capture.aliasing.input_memory import return_input_views, with_bases_as_traced
from dcompile.capture.aliasing.output_views import OutputRequest, plan_outputs
from dcompile.capture.capture_digest import own_collectives
from dcompile.capture.captured_graph import Boxed, CapturedGraph
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.joint_graph import donated_positions, insert_outputs, saved_positions, take_sync_token
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
from dcompile.capture.services import GradientBuckets
from dcompile.capture.train_step.deferred_backward import WHOLE, WITH_UPDATES
from dcompile.capture.train_step.optimizer_step import FORWARD
from dcompile.capture.train_step.step_graph import forward_and_backward
from dcompile.collectives.contract import Executable, Foreseen, ParamInfo, Request
from dcompile.device_traits import traits_of
from dcompile.errors import DcompileError
from dcompile.machine_model import GroupSize
from dcompile.passes import OutputStep
from dcompile.results.unshare_gradients import UnshareGradients

NEGATIVE_GRADIENTS = "gradient marked as negative, copied"
"""Name of the receipt's count over all backwards of gradients with the negative bit: `y.backward(torch._neg_view(x))`.
"""
BATCHED_GRADIENTS = "backward of batched gradients"
BATCHED_NOTE = (
    "a backward of batched gradients (is_grads_batched, vectorize) ran operator by operator, without our kernels"
)
SEVERAL, SHARDED = "the model is several graphs", "parameters are sharded, or DTensors"
FIRST_BACKWARD = "the first backward of a graph runs at once, and tells which gradients exist"
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
        self.late: GraphBackward | None = None
        """The backward, if it can run with an update."""
        self._recorded: tuple[Any] | None = None
        """The token of a forward that runs later than its call."""

    def build(self, gm: Any, kind: Any, name: str = "", foreseen: Foreseen | None = None, **more: Any) -> Executable:
        """Compile a graph to a program of a kind. `more`: parts of the request. `foreseen`: see `Compiler`."""
        name = name or kind
        self.graph.note_own_collectives(name, gm)
        request = self.request(gm, kind, name, **more)
        self.graph.executables[name] = self.model.services.compiler.compile_graph(gm, request, foreseen)
        return self.graph.executables[name]

    def request(self, gm: Any, kind: Any, name: str = "", **more: Any) -> Request:
        """Return what the compiler is told about a graph besides its operations."""
        if self.graph.sharded or (self.sync.scatters and kind == "backward"):
            shards = describe_shards(self.graph.infos, gm, kind, self.graph.sharded, self.graph.grads)
            more = shards | {"reductions": self.adapter.reductions} | more
        empty = {position for position, _ in more.get("gathers", ())}  # virtual parameters, without memory
        donated = tuple(p for p in donated_positions(gm) if p not in empty) if kind == "backward" else ()
        if self.model.settings.config.triton_cudagraphs and not traits_of(self.graph.device.type).is_host:
            donated = ()  # only a call can check for other references to a saved tensor; a replay cannot
        found, is_whole = self.adapter.communicators(), name == WHOLE  # whose inputs are the forward's
        return Request(
            name=f"{name or kind}{self.graph.number}",
            kind=kind,
            donated=donated,
            saved=() if kind != "backward" or is_whole else tuple(p for p in saved_positions(gm) if p not in empty),
            **describe_machine(self.model, gm, self.graph.device, found, self._copied(found)),
            **more,
        )

    def _foreseen(self) -> tuple[Any, Request] | None:
        """Return the backward to plan while the forward's kernels compile; None if ranks must agree on it first."""
        backward, self.graph.backward_graph = self.graph.backward_graph, None
        if backward is None or self.adapter.carries_sync or self.adapter.communicators():
            return None
        backward = without_opaque_objects(backward)
        likely = without(
            backward, unlikely(backward) if self.graph.facts.may_have_absent_grads else (), self._exchanged
        )
        return likely, self.request(likely, "backward", **self.reduces())

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
        traced = None if self.model.step is None else compat.aot.lazy_graph_module(gm, _copied(gm))
        return_input_views(gm, opaque.views(compat.aot_metadata.looks_at_inputs()))
        inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
        self._numbers = tuple(n for n, node in inputs if not isinstance(node.meta.get("val"), torch.Tensor))
        views, constant = compat.aot_metadata.take_views(), compat.aot_metadata.constant_results()
        if traced is not None:
            self.graph.late_forward = GraphForward(self, traced, shown, opaque)
        request = OutputRequest(shown, opaque.result_places(views), opaque.result_places(constant))
        steps = plan_outputs(self._output_steps, gm, request, "forward")
        self._return_visible(gm, shown)
        run = self.build(gm, "forward", foreseen=self._foreseen, results=shown)
        model = self.model
        gathering, alone = with_bases_as_traced(gm, self.gathering(run)), (self.graph.number,)

        def forward(args: list[Any]) -> list[Any]:
            if model.step is not None:
                model.step.settle(FORWARD)
            newest, token = model.newest, None
            if self._recorded is not None:
                (token,) = self._recorded
            elif position is not None or model.calls or newest is None or newest.graphs != alone:
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
        places = given if self.graph.facts.may_have_absent_grads else ()
        numbers = dict(self.graph.grads)
        self.graph.unsure = tuple(sorted({numbers[place] for place in unsure(gm, numbers)}))
        alone = position is None and not places and not self.adapter.synchronizes
        settled: Boxed | None = None
        is_batch, apart = compat.aot.batch_test(), UnshareGradients()
        outputs = AbsentOutputs(gm, self.sync, self.graph.grads, self.graph.unsure, self._numbers)

        def run(args: list[Any]) -> list[Any]:
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
            results = apart.of(memory, self._run_backward(kind, state, args, sync, gone, strategy))
            if alone:  # later calls skip the tests above, whose results do not change any more
                settled = apart.around(memory, self.graph.executables[kind])
            outputs.fill(results, gone, zeros)
            return results

        step = self.model.step
        if step is None:
            return opaque.around(run)
        late, count = GraphBackward(self, gm, opaque, position, run), len(gm.graph.output_node().args[0])
        self.late = late

        def backward(args: list[Any]) -> list[Any]:
            return [None] * count if step.defer(late, args) else run(args)

        return opaque.around(backward)

    def syncs(self, token: int) -> int:
        """Return whether and how a backward reduces gradients, by its forward's token (see `Invocation.token`)."""
        if self.sync.sharded is not None:  # its token is a number of a module
            return 0
        return (abs(token) or 1) if token > 0 or self.adapter.prepared else 0

    def reduces_all(self, token: int) -> bool:
        """Does a backward reduce gradients now, over all ranks, for the module that the programs were compiled for?"""
        return self.sync.reduces_all(token) if self.sync.sharded is not None else self.syncs(token) == 1

    def _batched(self, gm: Any, args: list[Any]) -> list[Any]:
        """Run a backward of batched gradients; these are for the caller only, and none is reduced."""
        self.graph.notes += [] if BATCHED_NOTE in self.graph.notes else [BATCHED_NOTE]
        self.graph.fallbacks[BATCHED_GRADIENTS] += 1
        return run_batched(gm, args, bool(self.graph.sharded))

    @contextlib.contextmanager
    def running_later(self, token: Any) -> Iterator[None]:
        """Run a forward in this context whose call has been recorded already, and had this token."""
        self._recorded = (token,)
        try:
            yield
        finally:
            self._recorded = None

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
        if (
            state is not None
            and state.buckets is not None
            and state.covers_all_params != self.adapter.covers_all_params
        ):
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
        executable = self.build(gm, "backward", **self.reduces())
        state = BackwardState(lacks)
        if self._has_buckets():
            state = BackwardState(lacks, self.adapter.covers_all_params, self.sync.make_buckets(executable.buckets))
        self.state = state
        self.model.compile_seconds += time.perf_counter() - began
        return state

    def _build_whole_backward(self, gm: Any, state: BackwardState) -> BackwardState:
        """Compile the backward that takes every gradient; its buckets exchange what those of the first one do.

        Another rank may run the first one meanwhile. How a gradient is computed, and so named, may differ.
        """
        first = self.graph.executables["backward"]
        whole = self.build(gm, "backward", WHOLE_BACKWARD, **self.reduces())
        if state.buckets is not None and whole.buckets:  # there are none if DDP itself reduces by now
            same = [b.exchanged for b in whole.buckets] == [b.exchanged for b in first.buckets]
            assert same, "places in buckets follow from parameters alone"
            self.state = state = dataclasses.replace(state, whole_buckets=self.sync.make_buckets(whole.buckets))
        return state

    def reduces(self) -> dict[str, Any]:
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
        self, kind: str, state: BackwardState, args: list[Any], sync: int, gone: Collection[int], strategy: GradientSync
    ) -> list[Any]:
        """Run a backward program. `gone`: positions of results that are None in this call."""
        buckets = state.whole_buckets if kind == WHOLE_BACKWARD and state.whole_buckets is not None else state.buckets
        return strategy.run_backward(BackwardCall(self.graph, self.graph.executables[kind], buckets, args, sync, gone))


class GraphBackward:
    """A graph's backward for `train_step.OptimizerStep`, which may run it later, and with an update.

    The first one runs at once: ranks compare plans in it, and it tells which gradients are absent.
    """

    name = WITH_UPDATES

    def __init__(
        self, programs: GraphPrograms, gm: Any, opaque: OpaqueObjects, position: int | None, run: Boxed
    ) -> None:
        self._whole, self.run, self._programs, self._token = gm, run, programs, position
        graph = self._graph = programs.graph
        found = ((opaque.result_place(place), graph.leaves.get(index)) for place, index in graph.facts.gradients)
        given = {place: leaf for place, leaf in found if leaf is not None}
        self.leaves = list(given.items())
        self.numbers = dict(graph.grads)
        sharded, infos = graph.sync.sharded, graph.infos
        self.owners = [
            ref if sharded is None or place not in self.numbers else sharded.owner(self.numbers[place])
            for place, ref in self.leaves
        ]
        shards = {place: info for place, number in graph.grads if (info := infos[number].shard) is not None}
        self.dtypes = {place: getattr(torch, info.reduce_dtype) for place, info in shards.items()}
        results = gm.graph.output_node().args[0]
        nodes = [place for place, node in enumerate(results) if isinstance(node, torch.fx.Node)]
        self._tangents, self._is_batch = tangents(gm), compat.aot.batch_test()
        self._reason = ""
        if any(place not in given for place in nodes):
            self._reason = "inputs of the model have gradients"
        elif any(results[place].meta["val"].layout is not torch.strided for place in nodes):
            self._reason = "gradients are sparse"
        elif any(True for _ in own_collectives(gm)):
            self._reason = "the model's own collectives run in the backward"
        self._lacks: frozenset[int] | None = None
        self._kept: list[int] = []
        """Positions of the program's inputs among the arguments without the token."""
        self._buckets: dict[Executable, GradientBuckets] = {}
        self._separate = UnshareGradients()

    @property
    def gm(self) -> Any:
        """The graph without gradients that are absent."""
        assert self._lacks is not None, "no backward has run"
        return without(self._whole, self._lacks, {place for place, _ in self._graph.grads})

    @property
    def ranks(self) -> str:
        """Name of the process group over which parameters are sharded; empty if they are not."""
        return self._graph.sync.ranks_of_norm()

    def begin_waiting(self) -> None:
        """Do what a backward that runs does first."""
        self._graph.sync.begin_waiting()

    def reducing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which it reduces gradients, whatever was set since it was to run."""
        return self._graph.sync.reducing()

    @property
    def has_token(self) -> bool:
        """Whether its forward saves whether it reduces gradients."""
        return self._token is not None

    def reduces_all(self, token: int) -> bool:
        """Does it reduce gradients, with this token?"""
        return self._programs.reduces_all(token)

    def why_alone(self) -> str:
        """Return why it always runs at once; empty if it can wait."""
        reason = self._reason or self._graph.sync.why_updates_apart(self._graph)
        return reason or (FIRST_BACKWARD if self._programs.state is None else "")

    def waits(self, args: Sequence[Any]) -> bool:
        """Can the backward wait? It has run before, with these gradients; no micro-batch under no_sync can."""
        if self._token is not None and not self._programs.reduces_all(int(args[self._token])):
            return False
        if not self._knows_absent():
            return False
        assert self._lacks is not None, "known by now"
        shift = len(args) if self._token is None else self._token
        for place in self._tangents:
            tangent = args[place + (place >= shift)]
            if tangent is None:
                if place not in self._lacks:
                    return False
            elif place in self._lacks or tangent.is_neg() or self._is_batch(tangent):
                return False
        return not self._reason

    def _knows_absent(self) -> bool:
        """Has a first backward told which gradients are absent?"""
        state = self._programs.state
        if state is not None and self._lacks is None:
            self._lacks = state.lacks
            count = len(self._whole.graph.find_nodes(op="placeholder"))
            self._kept = [n for n in range(count) if n not in self._lacks]
            if absent_results(self._whole, self._lacks):
                self._reason = "a gradient of a parameter is absent"
        return state is not None

    def why_not_whole(self) -> str:
        """Return why it cannot run in one program with its forward; empty if it can."""
        if not self._knows_absent():
            return FIRST_BACKWARD
        if self._graph.sync.sharded is not None or self._graph.sync.scatters:
            return SHARDED
        return self.why_alone() or ("" if self.loss is not None else "backwards do not begin at one loss alone")

    @functools.cached_property
    def loss(self) -> int | None:
        """Position of the forward's result that backwards begin at, a number; None for another kind.

        It is asked for once a backward has run.
        """
        nodes = self.gm.graph.find_nodes(op="placeholder")
        begins = [node for node in nodes if compat.aot_metadata.is_tangent(node)]
        if len(begins) != 1 or begins[0] is not nodes[-1] or begins[0].meta["val"].ndim:
            return None
        return compat.aot_metadata.result_index(begins[0])

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """Return the program's inputs, without the token and absent gradients."""
        given = [*args] if self._token is None else [*args[: self._token], *args[self._token + 1 :]]
        return [given[place] for place in self._kept]

    def take(self, args: list[Any]) -> tuple[int, list[Any]]:
        """Return the token (0 without one) and the program's inputs, without absent gradients; empty the arguments."""
        token, inputs = 0 if self._token is None else int(args[self._token]), self.inputs(args)
        args.clear()
        return token, inputs

    def build(self, gm: Any, name: str) -> Executable:
        """Compile a graph that begins with the backward."""
        programs = self._programs
        with self._graph.model.peers.busy("compiling"):
            made = programs.build(gm, "backward", name, **programs.reduces())
        if self.numbers and not self.dtypes:
            first = self._graph.executables["backward"].buckets
            assert [b.exchanged for b in made.buckets] == [b.exchanged for b in first], "places follow from parameters"
            self._buckets[made] = self._graph.sync.make_buckets(made.buckets)
        return made

    def build_apart(self, gm: Any, name: str) -> Executable:
        """Compile a graph of updates alone, or of a norm."""
        with self._graph.model.peers.busy("compiling"):
            return self._programs.build(gm, "inference", name, gathers=())

    def run_joined(self, program: Executable, token: int, inputs: list[Any]) -> list[Any]:
        """Run a program of `build`."""
        sync = 0 if self._token is None else self._programs.syncs(token)
        strategy = self._graph.sync.by_token(token)
        call = BackwardCall(self._graph, program, self._buckets.get(program), inputs, sync, ())
        return self._separate.of(id(program), strategy.run_backward(call))


class GraphForward:
    """A graph's forward for `train_step.WaitingForwards`, which may run it later, with its backward and an update."""

    def __init__(self, programs: GraphPrograms, gm: Any, results: int, opaque: OpaqueObjects) -> None:
        """Note a forward's graph as it was traced. `results`: number of its results."""
        self._programs, self._count = programs, results
        self.returned: int | None = None
        self.objection = compat.aot_metadata.why_wrapped()
        learning = compat.aot_metadata.learning_results()
        self._changed = compat.aot_metadata.changed_in_graph()
        self._gm = gm
        self._known: dict[Any, WholeStep] = {}
        inputs = gm.graph.find_nodes(op="placeholder")
        shown = gm.graph.output_node().args[0][:results]
        if opaque.inputs:
            self.objection = "the graph has DTensors"
        elif programs.graph.may_be_partial:
            self.objection = SEVERAL
        elif any(True for _ in own_collectives(gm)):
            self.objection = "the model's own collectives run in the forward"
        elif not all(isinstance(node.meta.get("val"), torch.Tensor) for node in (*inputs, *shown)):
            self.objection = "sizes are symbols, or a result is no tensor"
        elif programs.graph.facts.without_gradients:
            self.objection = "a result is a view without a gradient"
        self.results = [] if self.objection else [(node.meta["val"], n in learning) for n, node in enumerate(shown)]
        """A fake tensor like each result, and whether that requires a gradient."""

    @property
    def loss(self) -> int:
        """Position of the one result that backwards begin at."""
        late = self._programs.late
        assert late is not None and late.loss is not None, "asked where it can wait"
        return late.loss

    def why_not_waiting(self, args: Sequence[Any]) -> str:
        """Return why it runs at once with these arguments; empty if it can wait."""
        programs, model = self._programs, self._programs.model
        late = programs.late
        if self.objection or late is None:
            return self.objection or FIRST_BACKWARD
        if (programs.graph.number,) not in model.variants:
            return SEVERAL
        if torch.is_anomaly_enabled() or compat.dispatch_watch.saved_tensor_hooks() is not None:
            return "what a forward saves is watched"
        return late.why_not_whole()

    def begin(self) -> torch.Tensor | None:
        """Record that the forward runs in the current call; return its token."""
        return self._programs.model.record_forward(self._programs.graph)

    def run(self, compiled: Callable[..., Sequence[Any]], args: Sequence[Any], token: Any) -> list[Any]:
        """Run the forward by itself, as it would have run in the call that `begin` has recorded."""
        with self._programs.running_later(token):
            return [*compiled(*args)]

    def whole(self, kept: tuple[int, ...], share: float, token: Any) -> WholeStep:
        """Return the forward with its backward as one graph; see `train_step.LateForward`."""
        late = self._programs.late
        assert late is not None, "asked where it can wait"
        number = 0 if token is None else int(token)
        key = late, kept, share, number
        if key not in self._known:
            self._known[key] = WholeStep(late, self._gm, self._count, kept, share, number, self._changed)
        return self._known[key]


def _copied(gm: Any) -> Any:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {})).meta = dict(gm.graph.output_node().meta)
    return graph


class WholeStep:
    """A graph's forward and backward, which run with an update as one program; a `train_step.LateBackward`."""

    name = WHOLE

    def __init__(
        self,
        late: GraphBackward,
        forward: Any,
        results: int,
        kept: tuple[int, ...],
        share: float,
        token: int,
        changed: tuple[int, ...],
    ) -> None:
        self._late, self._forward, self._token, self._changed = late, forward, token, changed
        self._form = results, kept, share
        self.leaves, self.numbers, self.owners, self.dtypes = late.leaves, late.numbers, late.owners, late.dtypes
        self.ranks = late.ranks
        self.begin_waiting, self.reducing = late.begin_waiting, late.reducing

    @property
    def gm(self) -> Any:
        """The graph of forward and backward."""
        return forward_and_backward(self._forward, self._late.gm, *self._form)

    def why_alone(self) -> str:
        """Return why it always runs at once; empty if it can wait."""
        return self._late.why_not_whole()

    def waits(self, args: Sequence[Any]) -> bool:
        """Can it wait? A micro-batch under no_sync cannot."""
        return not self._late.has_token or self._late.reduces_all(self._token)

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """Return the program's inputs."""
        return [*args]

    def take(self, args: list[Any]) -> tuple[int, list[Any]]:
        """Return the token and the program's inputs; empty the arguments."""
        inputs = [*args]
        args.clear()
        return self._token, inputs

    def build(self, gm: Any, name: str) -> Executable:
        """Compile a graph that begins with the forward."""
        return self._late.build(gm, name)

    def build_apart(self, gm: Any, name: str) -> Executable:
        """Compile a graph of updates alone, or of a norm."""
        return self._late.build_apart(gm, name)

    def run(self, args: list[Any]) -> list[Any]:
        """Refuse to run by itself: forward and backward then run one after the other."""
        raise AssertionError("a whole step runs with its update")

    def run_joined(self, program: Executable, token: int, inputs: list[Any]) -> list[Any]:
        """Run a program of `build`."""
        changed = [inputs[place] for place in self._changed]
        with compat.autograd.without_autocast()():  # the forward was traced below it
            results = self._late.run_joined(program, token, inputs)
        if changed:
            torch.autograd.graph.increment_version(changed)
        return results


def describe_machine(
    model: CompiledModel, gm: Any, device: torch.device, found: Mapping[str, Any], copied: Set[str]
) -> dict[str, Any]:
    """Return the parts of a request for the cost model: the machine, and all groups of the graph's collectives.

    `found`: the adapter's groups, by name. `copied`: those whose gathers are copies from other ranks' memory.
    """
    replicas = model.adapter.replicas()
    own = {
        name: group
        for named, name in compat.groups.named_groups(gm).items()
        if (group := compat.groups.group_by_name(named)) is not None
    }
    lanes: dict[int, str] = {}
    for name, group in (*found.items(), *own.items()):
        lanes.setdefault(id(group), name)
    config = model.settings.config
    return {
        "figures": model.services.figures(device, next(iter(found.values()), None)),
        "groups": tuple(
            (name, GroupSize(dist.get_world_size(group), lanes[id(group)], replicas.get(name, 1), name in copied))
            for name, group in ({**found, **own}).items()
        ),
        "early_bytes": None if config.overlap_mb < 0 else config.overlap_mb << 20,
    }


def describe_shards(
    infos: Sequence[ParamInfo], gm: Any, kind: str, sharded: Mapping[str, int], grads: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return the parts of a request about sharded parameters: gathers, gradients, parameters.

    `infos`: all parameters, as they were when the graph was captured. `sharded`: name of a placeholder -> number of its
    parameter. `grads`: (output, parameter) of a backward's gradients.
    """
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    held = [(position, sharded[name]) for position, name in enumerate(names) if name in sharded]
    # parameters that the forward keeps gathered are saved for the backward
    gathers = tuple(entry for entry in held if kind != "backward" or _reshards(infos[entry[1]]))
    grads = tuple(grads) if kind == "backward" else ()
    used = sorted({number for _, number in (*gathers, *grads)})
    params = tuple(infos[number] for number in used)
    return {"gathers": gathers, "grads": grads, "params": params}


def _reshards(info: ParamInfo) -> bool:
    return info.shard is not None and info.shard.reshard


class AbsentOutputs:
    """Which results of one backward are absent, for each set of absent gradients.

    `grads`: (position among the results, parameter) of gradients that ranks reduce. `unsure`: parameters whose
    gradients may be absent. `numbers`: positions of the forward's inputs that are numbers, which are no leaves.
    """

    def __init__(
        self,
        gm: Any,
        sync: GradientSync,
        grads: tuple[tuple[int, int], ...],
        unsure: tuple[int, ...],
        numbers: tuple[int, ...],
    ) -> None:
        self._gm, self._sync, self._grads, self._unsure, self._numbers = gm, sync, grads, unsure, numbers
        self._reduced = frozenset(place for place, _ in grads)
        self._follows: dict[frozenset[int], tuple[int, ...]] = {}
        """Absent gradients -> positions of results that depend on them alone."""

    def of(self, absent: frozenset[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return (positions of results that become None, positions of results that become zeros) for absent gradients.

        Gradients that DDP's own reducer waits for are in neither.
        """
        if absent not in self._follows:
            self._follows[absent] = absent_results(self._gm, absent)
        follows = self._follows[absent]
        hooked = compat.aot.hooked_leaves() if follows else frozenset[int]()
        if not hooked and not self._grads:
            return follows, ()
        expected, gone, zeros = self._sync.awaited(self._grads, self._unsure), list[int](), list[int]()
        for place in follows:
            # eager calls no hook for an absent gradient; in a compiled graph the edge exists, and the hook gets None
            stays = hooked and place - sum(number < place for number in self._numbers) in hooked
            if stays and place not in self._reduced:  # gradients that ranks reduce are zeros already
                zeros.append(place)
            elif not stays and place not in expected:
                gone.append(place)
        return gone, zeros

    def fill(self, results: list[Any], gone: Collection[int], zeros: Collection[int]) -> None:
        """Put None and zeros in the places that `of` has found."""
        for place in zeros:
            known = results[place] is not None
            results[place] = torch.zeros_like(results[place]) if known else zeros_of(self._gm, place)
        for place in gone:
            results[place] = None

    def without_any(self, absent: frozenset[int]) -> list[Any]:
        """Return the results of a backward whose gradients are all absent."""
        _, zeros = self.of(absent)
        results: list[Any] = [None] * len(self._gm.graph.output_node().args[0])
        self.fill(results, (), zeros)
        return results


def run_batched(backward: Any, args: list[Any], sharded: bool) -> list[Any]:
    """Compute a backward's results with ATen for `autograd.grad(..., is_grads_batched=True)` and vectorized jacobians.

    Autograd then passes tensors of torch.func's `vmap`, which represent a batch and have no memory that a kernel could
    read. `args` is emptied, as by a program. Raises DcompileError if parameters are `sharded`.
    """
    if sharded:
        raise DcompileError(
            "dcompile: gradients of a batch (is_grads_batched=True, vectorize=True) through a model whose parameters "
            "FSDP shards; take the gradients one by one, or call the model before it is compiled"
        )
    given, places = list(args), tangents(backward)
    args.clear()
    for place in places:
        if given[place] is None:
            given[place] = zeros_for(backward, place)
    return list(torch.fx.Interpreter(backward).run(*given))


@dataclass(frozen=True)
class OpaqueObjects:
    """Device meshes and process groups that were removed from a graph's inputs and results.

    AOTAutograd splits a DTensor into its local tensor and its mesh, which passes through the graphs unread: it is an
    input, and a result for each result or gradient that becomes a DTensor.
    """

    inputs: tuple[int, ...] = ()
    """Positions of the inputs, ascending."""
    results: tuple[tuple[int, int], ...] = ()
    """(position of a result, index into `inputs` of its object), ascending."""

    def around(self, run: Boxed) -> Boxed:
        """Return `run` with these objects among its arguments and results."""
        if not self.inputs:
            return run
        inputs, places = self.inputs[::-1], tuple((at, len(self.inputs) - 1 - place) for at, place in self.results)

        def running(args: list[Any]) -> list[Any]:
            objects = [args.pop(position) for position in inputs]
            results = run(args)
            for at, place in places:
                results.insert(at, objects[place])
            return results

        return running

    def input_place(self, position: int) -> int:
        """Return the position of the whole graph's input among the remaining ones."""
        return position - sum(removed < position for removed in self.inputs)

    def result_place(self, position: int) -> int:
        """Return the position of the whole graph's result among the remaining ones."""
        return position - sum(removed < position for removed, _ in self.results)

    def result_places(self, positions: Collection[int]) -> tuple[int, ...]:
        """Return the positions of several results among the remaining ones, without removed ones."""
        removed = {at for at, _ in self.results}
        return tuple(self.result_place(position) for position in positions if position not in removed)

    def views(self, aliases: Mapping[int, int]) -> dict[int, int]:
        """Return position of a result -> of the input that it is a view of, both among the remaining ones."""
        removed = {at for at, _ in self.results}
        found = ((at, of) for at, of in aliases.items() if at not in removed)
        return {self.result_place(at): self.input_place(of) for at, of in found}


def remove_opaque_objects(gm: Any) -> OpaqueObjects:
    """Remove opaque inputs that the graph only returns, and remove them from its results.

    An object that an operation of the graph takes stays; lowering reports it as unsupported.
    """
    output = gm.graph.output_node()
    placeholders = enumerate(gm.graph.find_nodes(op="placeholder"))
    found = {
        node: position
        for position, node in placeholders
        if compat.tensors.is_opaque(node.meta.get("val")) and all(user is output for user in node.users)
    }
    if not found:
        return OpaqueObjects()
    places = {node: place for place, node in enumerate(found)}
    results = list(output.args[0])
    returned = [
        (at, places[node]) for at, node in enumerate(results) if isinstance(node, torch.fx.Node) and node in found
    ]
    removed = {at for at, _ in returned}
    output.args = (tuple(node for at, node in enumerate(results) if at not in removed),)
    if "desc" in output.meta:
        output.meta["desc"] = [desc for at, desc in enumerate(output.meta["desc"]) if at not in removed]
    for node in found:
        gm.graph.erase_node(node)
    gm.recompile()
    return OpaqueObjects(tuple(found.values()), tuple(returned))


def without_opaque_objects(gm: Any) -> Any:
    """Return a copy of a graph without opaque objects, or the graph itself if it has none."""
    if not any(compat.tensors.is_opaque(node.meta.get("val")) for node in gm.graph.find_nodes(op="placeholder")):
        return gm
    graph = torch.fx.Graph()
    copied = graph.output(graph.graph_copy(gm.graph, {}))
    copied.meta = dict(gm.graph.output_node().meta)
    copy = torch.fx.GraphModule(gm, graph)
    remove_opaque_objects(copy)
    return copy
