"""One graph that TorchDynamo captured: its facts, its passes, its trace by AOTAutograd, and its partition.

`graph_programs.py` compiles and runs the parts that come of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dcompile import compat
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.aliasing.output_views import results_without_gradients
from dcompile.capture.capture_digest import CAPTURES, by_group, captured_calls, own_collectives, plan_of
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.joint_graph import gradient_positions, offload_marked, partition_joint, returned_views
from dcompile.capture.memory_budget import MemoryBudget
from dcompile.capture.passes.dynamo.captured_nodes import multiplies
from dcompile.capture.passes.dynamo.higher_order_bodies import is_checkpointed
from dcompile.capture.passes.joint.absent_gradients import can_be_absent, shapes_of, tangents
from dcompile.capture.passes.joint.memory_plan import MemoryPlan
from dcompile.capture.passes.repeated_layers import (
    LayersDiffer,
    RepeatedLayers,
    check_inputs,
    repeated_layers,
    shorten,
    unfold,
)
from dcompile.capture.passes.run_passes import GraphRequest, run_passes
from dcompile.capture.services import Line, figures_by_type
from dcompile.capture.warm_start.size_symbols import SizeSymbols
from dcompile.capture.warm_start.trace_cache import GraphTrace, KeptTrace, TraceFacts, trace_key
from dcompile.collectives.contract import Executable
from dcompile.device_traits import HOST, traits_of
from dcompile.passes import GraphPass

Boxed = Callable[[list[Any]], list[Any]]
SAVED_ON_HOST = "save_on_cpu: programs copy what they save and nothing else holds, beside computation"
LENT = "the programs of an equal module"
"""What ranks compare in place of a graph where they capture none."""


class Programs(Protocol):
    """How the parts of a captured graph are compiled: to run, to be planned, or to be written to a file.

    Each method takes an FX graph of ATen operations and returns what AOTAutograd calls in its place.
    """

    def forward(self, gm: Any) -> Boxed:
        """Compile the forward of a training graph."""

    def backward(self, gm: Any) -> Boxed:
        """Compile a backward, or prepare to compile it at its first call."""

    def inference(self, gm: Any) -> Boxed:
        """Compile a graph that needs no gradient."""


@dataclass(frozen=True, slots=True)
class CaptureMode:
    """What captured graphs become."""

    programs: Callable[[CapturedGraph], Programs]
    planned_for: str | None = None
    """Type of the device that programs are compiled for, if graphs are captured on another."""
    needs_data: bool = True
    """Whether programs read memory, which fake tensors lack."""
    is_saved: bool = False
    """Whether the compiled graph is saved in a file, with AOTAutograd's record of it."""


class CapturedGraph:
    """A graph of a compiled model. Parts of it are frozen and replaced whole: `facts` and `results`.

    `example_inputs`: Dynamo's, real or fake. The graph is added to the model's graphs.
    """

    def __init__(self, model: CompiledModel, example_inputs: Sequence[Any], mode: CaptureMode) -> None:
        self.model, self.mode = model, mode
        self.number = len(model.graphs)
        self.adapter, self.sync = model.adapter, model.sync
        self.infos = self.adapter.param_infos()
        """The parameters in the setting for which the graph is captured: its backward may be compiled in another."""
        self.params: dict[int, int] = _parameter_numbers(self.adapter, example_inputs)
        """Position among the graph's inputs -> the parameter's number."""
        self.gathered = _gathered_positions(self.sync.sharded, example_inputs, self.params)
        """Those of them in whose place programs gather the parameter."""
        self.leaves = _leaves(example_inputs) if model.step is not None else {}
        """Position among the graph's inputs -> weak reference to the parameter, if its update may run in a program."""
        self.device = _device_of(example_inputs)
        """The device on which the graph runs: a GPU if any input is on one."""
        self.training = False
        self.facts = TraceFacts()
        """What tracing has found out, or what the cache knows of an earlier trace."""
        self.results = ResultFacts()
        self.may_be_partial = False
        """Whether other code of a call may follow, so that this one's results may all lack gradients."""
        self.changed: frozenset[int] | None = None
        """Positions of the inputs that the graph writes to, as far as that is known."""
        self.sharded: dict[str, int] = {}
        """Name of a placeholder -> number of its sharded parameter."""
        self.trace: GraphTrace | None = None
        """Where the graph's trace came from, once it is compiled."""
        self.grads: tuple[tuple[int, int], ...] = ()
        """(position among the backward's outputs, parameter number)."""
        self.budget: MemoryBudget | None = None
        """The model's memory budget, if this graph is planned for it."""
        self.unsure: tuple[int, ...] = ()
        """Parameters whose gradients may be absent from a backward."""
        self.later: set[int] = set()
        """Units for which earlier graphs of a call compute gradients, too: their backward, a later one, reduces all."""
        self.visible: tuple[tuple[tuple[int, int], ...], int] = ((), 0)
        """((position among the forward program's results, parameter number) of each parameter that the modules show
        after the call, number of the results that the graph itself has).
        """
        self.executables: dict[str, Executable] = {}
        """Name of a program -> the program."""
        self._own: dict[str, list[tuple[str, str]]] = {}
        """Name of a program -> (process group, line) of what the model itself calls: SyncBatchNorm, tensor parallelism.
        """
        self._agreed: set[tuple[str, GradientSync]] = set()
        """Kinds of programs whose collectives were compared between ranks, and for which module."""
        self.captured: list[Line] = []
        """Lines of the graph that ranks compare before its first collective; empty if there is nothing to compare."""
        self.notes: list[str] = []
        """Lines for the receipt about changes to the graph."""
        self.saves_on_host = saves_on_host(self.device)
        """Whether programs do what `save_on_cpu` around the call asks for, in place of its hooks."""
        self.fallbacks: Counter[str] = Counter()
        """Reason -> count of runs without dcompile's kernels that are due to the way the graph is called."""
        self.late_forward: Any = None
        """Its forward, if it can run in one program with backward and update (`graph_programs.GraphForward`)."""
        self.backward_graph: Any = None
        """The partition's backward, until the forward is compiled."""
        model.graphs.append(self)

    # --- compile ---

    def compile(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the graph, from the cached trace of an earlier start if there is one."""
        example_inputs = compat.dynamo.take_full_numbers(gm, example_inputs)
        self.examine(gm, example_inputs)
        self._prepare_budget(gm, example_inputs)
        store = self.model.services.compiler.traces() if self.mode.needs_data else None
        trace = self.trace = GraphTrace(store, lambda symbols: self._trace_key(gm, example_inputs, symbols))
        if trace.cached is not None:
            return self._replay(gm, trace.cached, example_inputs)
        compiled = self.trace_anew(gm, example_inputs)
        seen = results_without_gradients(gm, self.results.learning)
        self.facts = replace(self.facts, without_gradients=seen)
        trace.keep(lambda facts: replace(facts, without_gradients=seen))
        return compiled

    def examine(self, gm: Any, example_inputs: Sequence[Any]) -> None:
        """Record facts of the captured graph before passes change it."""
        is_part = not self.adapter.synchronizes and compat.ddp.reduces_any(example_inputs)
        if is_part:
            self.adapter.leave_to_others(
                "this is a part of a DistributedDataParallel module, whose own reducer averages gradients; "
                "compile the whole of it: dcompile.compile(ddp_module)"
            )
        if multiplies(gm):
            self.model.services.compiler.expect_products()
        if is_checkpointed(gm):
            self.sync.save_memory("activations are checkpointed")
        # DDP passes None to every result of its module that no loss uses, and so to a compiled part after them
        self.may_be_partial = self.number > 0 or compat.dynamo.goes_on(gm) or is_part
        if self.model.compares_captures():
            self.captured = captured_calls(self.model, gm, self.params)

    def _prepare_budget(self, gm: Any, example_inputs: Sequence[Any]) -> None:
        """Let ranks agree on what a step may allocate, if the graph is planned for a memory budget."""
        budget = self.model.budget
        trained = [at for at, value in enumerate(example_inputs) if _is_trained(value)]
        if budget is None or not torch.is_grad_enabled() or not trained or not self.mode.needs_data:
            return
        if self.may_be_partial:
            why = "other graphs of a call save values as well; it is for models of one graph"
        elif compat.sizes.size_symbols(gm) or not all(map(_has_fixed_size, example_inputs)):
            why = "sizes vary"
        else:
            group, sharded = self.adapter.group, self.sync.sharded is not None
            ranks = 1 if group is None else torch.distributed.get_world_size(group)
            nbytes = sum(_master_bytes(example_inputs[at]) // (ranks if at in self.gathered else 1) for at in trained)
            budget.agree(torch.device(self.device), nbytes, sharded, group)
            self.budget = budget
            return
        self.notes.append(f"memory_budget={budget.given} does not apply to graph {self.number}: {why}")

    def _saved_by_budget(self, joint: Any, gradients: int) -> Callable[..., Any] | None:
        """Return the function that chooses what the forward saves, if there is a memory budget."""
        if self.budget is None:
            return None
        shards = self.find_shards(joint)
        inputs, output = joint.graph.find_nodes(op="placeholder"), joint.graph.output_node().args[0]
        at = {number for number, node in enumerate(inputs) if node in shards}
        reduced = {output[gradients + place].name for place, index in self.facts.gradients if index in at}
        units = Counter[int]()
        for node in shards:
            shard = self.infos[self.sharded[node.name]].shard
            if shard is not None:
                units[shard.together] += node.meta["val"].numel()
        # one unit is gathered ahead, and the gradients of one are being reduced, in float32
        ahead = max(units.values(), default=0) * (2 + 4)

        def took(plan: MemoryPlan, note: str) -> None:
            self.facts = replace(self.facts, peaks=(plan.peak_bytes, plan.default_bytes))
            self.notes.append(note)

        return self.budget.chooser(
            torch.device(self.device),
            took,
            sharded=frozenset(node.name for node in shards),
            scattered=frozenset(reduced),
            gathered_ahead_bytes=ahead,
        )

    def _trace_key(self, gm: Any, example_inputs: Sequence[Any], symbols: SizeSymbols) -> str:
        """Return the trace's name in the cache, which follows from all that it depends on. Raises NotKeepable."""
        infos = self.infos if self.sync.sharded is not None else ()
        sharded = [(at, infos[number].shard) for at, number in sorted(self.params.items()) if infos]
        facts = (
            f"token {self.adapter.carries_sync} goes on {self.may_be_partial} on {self.mode.planned_for} {self.device}",
            f"figures {figures_by_type(torch.device(self.device).type)}",  # masks are skipped where they gain
            f"sharded {[(at, shard is not None and shard.reshard) for at, shard in sharded]}",
            f"memory {None if self.budget is None else self.budget.allowed_bytes}",
        )
        return trace_key(gm, example_inputs, self.model.settings.config, facts, symbols)

    def _replay(self, gm: Any, cached: KeptTrace, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the parts of a cached trace."""
        self.facts = cached.facts
        self.notes += cached.facts.notes
        self.fallbacks.update(cached.facts.fallbacks)
        inference = cached.forward if cached.backward is None else None
        callbacks = _ReplayCallbacks(self, self.mode.programs(self), len(example_inputs), cached)
        return _aot_compile(
            gm,
            example_inputs,
            callbacks,
            decompositions={},
            around=compat.aot_trace.replayed(cached.metadata, inference, example_inputs),
        )

    def trace_anew(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Rewrite a graph, let AOTAutograd trace it, and compile the parts."""
        before = len(self.notes), Counter(self.fallbacks)
        self._run_passes(self.model.services.compiler.graph_passes().dynamo, gm, "dynamo")
        layers = repeated_layers(gm) if self.model.settings.config.layers_once else None
        try:
            return self._trace(gm, layers, example_inputs, before)
        except LayersDiffer as reason:
            self.notes.append(f"layers that repeat are traced each by itself: {reason}")
            return self._trace(gm, None, example_inputs, before)

    def _trace(
        self, gm: Any, layers: RepeatedLayers | None, example_inputs: Sequence[Any], before: tuple[int, Counter[str]]
    ) -> Callable[..., Any]:
        callbacks = _TracingCallbacks(self, self.mode.programs(self), len(example_inputs), gm, layers, before)
        trains = torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in example_inputs)
        return _aot_compile(
            gm if layers is None else shorten(gm, layers),
            example_inputs,
            callbacks,
            decompositions=self.model.services.compiler.decompositions(trains),
            around=self._recording(),
            is_saved=self.mode.is_saved,
            eager_kernels=self.model.settings.config.numerics == "bitwise",
        )

    def _recording(self) -> AbstractContextManager[None]:
        """Return a context that records AOTAutograd's work if the trace will be cached."""
        return nullcontext() if self.trace is None or not self.trace.is_noted else self.trace.recording()

    def _run_passes(self, passes: Sequence[GraphPass], gm: Any, stage: str) -> None:
        config, name = self.model.settings.config, f"graph{self.number}"
        request = GraphRequest(config, name, self.mode.planned_for, self.find_shards, figures_by_type)
        report = run_passes(passes, gm, request, stage)
        self.notes += report.notes
        self.fallbacks.update(report.fallbacks)

    # --- what AOTAutograd calls ---

    def partition(self, joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> tuple[Any, Any]:
        """Rewrite a joint graph and cut it into forward and backward."""
        config, compiler = self.model.settings.config, self.model.services.compiler
        may_lack = can_be_absent(joint, alone=not self.may_be_partial)
        self._take_facts(TraceFacts(gradient_positions(joint, num_fwd_outputs), num_fwd_outputs, may_lack))
        self._run_passes(compiler.graph_passes().joint, joint, "joint")
        forward, backward = partition_joint(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            carries_sync=self.adapter.carries_sync,
            fusible=compiler.fusible(),
            memory_budget=config.activation_memory_budget,
            recompute_library_operands=config.recompute == "memory",
            choose_saved=self._saved_by_budget(joint, num_fwd_outputs),
            **keywords,
        )
        self._expect_peaks()
        self.notes += offload_marked(forward, backward, num_fwd_outputs, self.device.type if self.saves_on_host else "")
        self.notes += [SAVED_ON_HOST] if self.saves_on_host else []
        if may_lack:
            self.facts = replace(self.facts, shapes_kept=shapes_of(backward, tangents(backward)))
        self.backward_graph = backward
        return forward, backward

    def _expect_peaks(self) -> None:
        if self.budget is not None and self.facts.peaks is not None:
            self.budget.plans.append(self.facts.peaks)

    def take_parts(self, cached: KeptTrace) -> tuple[Any, Any]:
        """Return forward and backward of a cached trace, which were rewritten in an earlier start."""
        self._take_facts(cached.facts)
        self._expect_peaks()
        self.find_shards(cached.forward)
        self.backward_graph = cached.backward
        return cached.forward, cached.backward

    def _take_facts(self, facts: TraceFacts) -> None:
        self.training, self.facts = True, facts
        self.grads = tuple((out, self.params[index]) for out, index in facts.gradients if index in self.params)

    def note_graphs(self, forward: Any, backward: Any, before: tuple[int, Counter[str]]) -> None:
        """Record traced graphs for the cache, with notes and fallbacks of tracing: those since `before`."""
        if self.trace is not None:
            notes, fallbacks = before
            found = dict(self.fallbacks - fallbacks)
            self.trace.note_graphs(
                forward, backward, replace(self.facts, notes=tuple(self.notes[notes:]), fallbacks=found)
            )

    def compile_forward(self, programs: Programs, module: Any, inputs: int) -> Boxed:
        """Compile the forward of a training graph. `inputs`: number of the graph's inputs."""
        self.changed = compat.aot_metadata.changed_inputs(inputs)
        if self._needs_parameters():
            return mark_boxed(_never)
        self.results = ResultFacts(compat.aot_metadata.own_results(), compat.aot_metadata.learning_results())
        return mark_boxed(programs.forward(module))

    def compile_backward(self, programs: Programs, module: Any) -> Boxed:
        """Compile the backward, or prepare to compile it at its first call."""
        compat.aot_metadata.no_donation()
        runner, regions = programs.backward(module), self.model.eager_regions
        runner = mark_boxed(runner if regions is None else regions.undisturbed(runner))
        return mark_boxed(compat.dynamo.no_dynamo(runner, "a compiled backward"))

    def compile_inference(
        self, programs: Programs, module: Any, inputs: int, before: tuple[int, Counter[str]] | None
    ) -> Boxed:
        """Compile a graph that needs no gradient. `before`: see `note_graphs`; None if it was rewritten earlier."""
        self.find_shards(module)
        self.changed = compat.aot_metadata.changed_inputs(inputs)
        if self._needs_parameters():
            return mark_boxed(_never)
        if before is not None:
            self._run_passes(self.model.services.compiler.graph_passes().joint, module, "inference")
            self.note_graphs(module, None, before)
        self.results = replace(self.results, learning=compat.aot_metadata.learning_results())
        return mark_boxed(programs.inference(module))

    # --- sharded parameters ---

    @property
    def gathers(self) -> bool:
        """Whether programs gather sharded parameters."""
        return bool(self.sharded)

    def find_shards(self, module: Any) -> list[Any]:
        """Return the placeholders of sharded parameters, and record their names: forward and backward use the same."""
        if self.sync.sharded is None:
            return []
        inputs = [(node, compat.aot_metadata.input_index(node)) for node in module.graph.find_nodes(op="placeholder")]
        found = {node: self.params[index] for node, index in inputs if index in self.gathered}
        self.sharded = {node.name: number for node, number in found.items()}
        if any(str(user.target).startswith("aten.as_strided.") for node in found for user in node.users):
            self.model.refuse("a parameter is looked at by as_strided, which counts from where its own memory begins")
        results = self.facts.results if self.training else len(module.graph.output_node().args[0])
        if returned := returned_views(module, found, results):
            self._refuse_uses(found[node] for node in returned)
        return list(found)

    def _needs_parameters(self) -> bool:
        """Does the graph return a sharded parameter or write to it? Then it is refused.

        Gathered parameters do not outlive a program, so such a graph needs FSDP's own parameters.
        """
        used = compat.aot_metadata.not_only_read() & self.params.keys()
        if self.sync.sharded is None or not used:
            return False
        self._refuse_uses([self.params[position] for position in used])
        if self.trace is not None:
            self.trace.refuse("the graph is not run")
        return True

    def _refuse_uses(self, numbers: Iterable[int]) -> None:
        names = ", ".join(sorted(self.adapter.param_infos()[number].fqn for number in numbers))
        self.model.refuse(f"the model returns or changes a parameter in its forward: {names}")

    # --- what adapters ask ---

    def note_own_collectives(self, name: str, gm: Any) -> None:
        """Record the collectives that the model itself calls in a program."""
        self._own[name] = list(own_collectives(gm))

    def has_own_collectives(self, kind: str) -> bool:
        """Does a program have collectives that the model itself calls?"""
        return bool(self._own.get(kind))

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

    def accumulates(self) -> bool:
        """Inside its backward: does that add to any parameter's .grad? torch.autograd.grad does not."""
        return self.sync.accumulates(number for _, number in self.grads)

    def strategy(self) -> GradientSync:
        """Return the gradient synchronization of the module whose call runs the forward: this one, or an equal one."""
        stack = self.model.calls.get(threading.get_ident())
        return stack[-1].strategy if stack else self.sync


def saves_on_host(device: torch.device) -> bool:
    """Whether programs on this device offload what they save, for `save_on_cpu`. On a CPU it asks for no copies."""
    return compat.hooks.saves_on_cpu() and not traits_of(device.type).is_host


def _parameter_numbers(adapter: PlainAdapter, inputs: Sequence[Any]) -> dict[int, int]:
    """Return position of an input -> number of the parameter that it is; Dynamo passes the parameters themselves."""
    numbers = (adapter.number_of(value) if isinstance(value, torch.nn.Parameter) else None for value in inputs)
    return {position: number for position, number in enumerate(numbers) if number is not None}


def _gathered_positions(
    adapter: ShardedAdapter | None, inputs: Sequence[Any], params: Mapping[int, int]
) -> frozenset[int]:
    if adapter is None:
        return frozenset()
    return frozenset(at for at, number in params.items() if inputs[at] is adapter.arriving(number))


def _leaves(inputs: Sequence[Any]) -> dict[int, Callable[[], Any]]:
    trained = ((at, x) for at, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter) and x.requires_grad)
    return {position: weakref.ref(value) for position, value in trained}


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.requires_grad


def _has_fixed_size(value: Any) -> bool:
    return not isinstance(value, torch.SymInt) and (not isinstance(value, torch.Tensor) or compat.sizes.is_fixed(value))


def _master_bytes(parameter: torch.Tensor) -> int:
    """Bytes of a parameter as the optimizer has it: virtual parameters have the dtype in which they are gathered."""
    return parameter.numel() * 4


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    return min(devices, key=lambda device: (traits_of(device.type).is_host, str(device)), default=torch.device(HOST))


@dataclass(frozen=True, slots=True)
class ResultFacts:
    """Facts about a graph's results, as AOTAutograd returns them to the caller."""

    own: tuple[int, ...] = ()
    """Positions of results that AOTAutograd's own autograd function returns."""
    learning: frozenset[int] = frozenset()
    """Positions of results that have gradients in AOTAutograd."""


def _aot_compile(
    gm: Any, example_inputs: Sequence[Any], callbacks: _TracingCallbacks | _ReplayCallbacks, **keywords: Any
) -> Callable[..., Any]:
    compiled: Callable[..., Any] = compat.aot.aot_compile(
        gm,
        example_inputs=example_inputs,
        forward=callbacks.forward,
        backward=callbacks.backward,
        inference=callbacks.inference,
        partition=callbacks.partition,
        **keywords,
    )
    return compiled


@dataclass(frozen=True)
class _TracingCallbacks:
    """AOTAutograd's callbacks while it traces one graph, with or without most of its repeated `layers`.

    torch 2.11 keeps some of these functions, so they must not refer to parameters.
    """

    graph: CapturedGraph
    programs: Programs
    inputs: int
    """Number of the graph's inputs."""
    gm: Any
    layers: RepeatedLayers | None
    before: tuple[int, Counter[str]]
    """Number of notes, and fallbacks, before the graph was traced."""

    def partition(self, joint: Any, joint_inputs: Any, **keywords: Any) -> tuple[Any, Any]:
        """Rewrite and cut a joint graph."""
        self._complete(joint)
        forward, backward = self.graph.partition(joint, joint_inputs, **keywords)
        self.graph.note_graphs(forward, backward, self.before)
        return forward, backward

    def forward(self, module: Any, _inputs: Any) -> Any:
        """Compile a forward."""
        self._check()
        return self.graph.compile_forward(self.programs, module, self.inputs)

    def backward(self, module: Any, _inputs: Any) -> Any:
        """Compile a backward."""
        return self.graph.compile_backward(self.programs, module)

    def inference(self, module: Any, _inputs: Any) -> Any:
        """Compile a graph that needs no gradients."""
        self._check()
        self._complete(module)
        return self.graph.compile_inference(self.programs, module, self.inputs, self.before)

    def _complete(self, module: Any) -> None:
        """Insert the layers that were left out of tracing."""
        if self.layers is not None:
            unfold(module, self.gm, self.layers)

    def _check(self) -> None:
        if self.layers is not None:
            check_inputs(self.layers)


@dataclass(frozen=True)
class _ReplayCallbacks:
    """AOTAutograd's callbacks for a cached trace: it traces nothing."""

    graph: CapturedGraph
    programs: Programs
    inputs: int
    """Number of the graph's inputs."""
    cached: KeptTrace

    def partition(self, _joint: Any, _joint_inputs: Any, **_: Any) -> tuple[Any, Any]:
        """Return the cached parts."""
        return self.graph.take_parts(self.cached)

    def forward(self, module: Any, _inputs: Any) -> Any:
        """Compile a forward."""
        return self.graph.compile_forward(self.programs, module, self.inputs)

    def backward(self, module: Any, _inputs: Any) -> Any:
        """Compile a backward."""
        return self.graph.compile_backward(self.programs, module)

    def inference(self, module: Any, _inputs: Any) -> Any:
        """Compile a graph that needs no gradients."""
        return self.graph.compile_inference(self.programs, module, self.inputs, None)


def mark_boxed(function: Any) -> Boxed:
    """Mark a function that takes one list and empties it."""
    function._boxed_call = True
    boxed: Boxed = function
    return boxed


def _never(args: list[Any]) -> list[Any]:
    raise AssertionError("a graph ran that was refused when it was compiled")
