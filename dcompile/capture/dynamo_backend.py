"""Dynamo's backend: rewrite a captured graph, let AOTAutograd trace it, and compile its programs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.agreement.capture_digest import captured_calls
from dcompile.capture.aliasing.input_memory import as_traced, watched_inputs
from dcompile.capture.aliasing.output_views import results_without_gradients, view_without_gradients
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.graph_boundary import COPIED, COPIES_IN, with_flat_inputs, with_plain_boundary, with_plain_tensors
from dcompile.capture.graph_pass import GraphRequest, run_passes
from dcompile.capture.graph_runner import Boxed, GraphPrograms, mark_boxed
from dcompile.capture.joint_graph import PartitionResult, gradient_positions, partition_joint, returned_views
from dcompile.capture.passes.dynamo.captured_nodes import multiplies
from dcompile.capture.passes.dynamo.higher_order_bodies import is_checkpointed
from dcompile.capture.passes.joint.absent_gradients import can_be_absent, shapes_of, tangents
from dcompile.capture.passes.repeated_layers.find import RepeatedLayers, repeated_layers, shorten
from dcompile.capture.passes.repeated_layers.replicate import LayersDiffer, check_inputs, unfold
from dcompile.capture.services import figures_by_type
from dcompile.capture.trace_cache.graph_trace import GraphTrace, KeptTrace, TraceFacts
from dcompile.capture.trace_cache.trace_key import trace_key
from dcompile.compat.trace_symbols import SizeSymbols
from dcompile.passes import GraphPass


class DynamoGraph(GraphPrograms):
    """A Dynamo graph of a compiled model: its passes, trace and partition."""

    planned_for: str | None = None
    """Type of the device that programs are compiled for, if graphs are captured on another."""

    needs_data = True
    """Whether programs read memory, which fake tensors lack."""

    is_saved = False
    """Whether the compiled graph is saved in a file, with AOTAutograd's record of it."""

    def compile(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo is to call in place of `gm`."""
        example_inputs = compat.dynamo.take_full_numbers(gm, example_inputs)
        self._examine(gm, example_inputs)
        store = self.model.services.compiler.traces() if self.needs_data else None
        trace = self.trace = GraphTrace(store, lambda symbols: self._trace_key(gm, example_inputs, symbols))
        if trace.cached is not None:
            compiled, seen = self._replay(gm, trace.cached, example_inputs), trace.cached.facts.without_gradients
        else:
            compiled = self._trace_graph(gm, example_inputs)
            seen = results_without_gradients(gm, self._learning)
            trace.keep(lambda facts: replace(facts, without_gradients=seen))
        compiled = self._leaving_absent(self.sync.watch_parameters(compiled, self.params))
        return compat.dynamo.no_dynamo(view_without_gradients(compiled, seen), "a compiled graph")

    def _trace_key(self, gm: Any, example_inputs: Sequence[Any], symbols: SizeSymbols) -> str:
        """What the graph's trace is called in the cache: by all that it follows from. Raises NotKeepable."""
        infos = self.infos if self.sync.sharded is not None else ()
        sharded = [(at, infos[number].shard) for at, number in sorted(self.params.items()) if infos]
        facts = (
            f"token {self.adapter.carries_sync} goes on {self._goes_on} on {self.planned_for} {self.device}",
            f"figures {figures_by_type(torch.device(self.device).type)}",  # masks are skipped where they gain
            f"sharded {[(at, shard is not None and shard.reshard) for at, shard in sharded]}",
        )
        return trace_key(gm, example_inputs, self.model.settings.config, facts, symbols)

    def _trace_graph(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Rewrite a graph, have AOTAutograd trace it, and compile what comes of it."""
        self._before = len(self.notes), Counter(self.fallbacks)
        self._run_passes(self.model.services.compiler.graph_passes().dynamo, gm, "dynamo")
        layers = repeated_layers(gm) if self.model.settings.config.layers_once else None
        try:
            return self._trace(gm, layers, example_inputs)
        except LayersDiffer as reason:
            self.notes.append(f"layers that repeat are traced each by itself: {reason}")
            return self._trace(gm, None, example_inputs)

    def _replay(self, gm: Any, cached: KeptTrace, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile what was traced of this graph before."""
        facts = cached.facts
        self.notes += facts.notes
        self.fallbacks.update(facts.fallbacks)
        self._may_lack, self._shapes_kept = facts.may_lack, facts.shapes_kept
        callbacks = _ReplayCallbacks(self, cached, len(example_inputs))
        compiled: Callable[..., Any] = compat.aot.aot_compile(
            gm,
            example_inputs=example_inputs,
            forward=callbacks.forward,
            backward=callbacks.backward,
            inference=callbacks.inference,
            partition=callbacks.partition,
            decompositions={},
            around=compat.aot_trace.replayed(
                cached.metadata, None if cached.backward else cached.forward, example_inputs
            ),
        )
        return compiled

    def _facts(self) -> TraceFacts:
        """What tracing has found out about the graph so far."""
        notes, fallbacks = self._before
        return TraceFacts(
            self._cut.gradients,
            self._cut.results,
            self._may_lack,
            self._shapes_kept,
            notes=tuple(self.notes[notes:]),
            fallbacks=dict(self.fallbacks - fallbacks),
        )

    def _examine(self, gm: Any, example_inputs: Sequence[Any]) -> None:
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
        # DDP passes None to every result of its module that no loss uses, and so to a compiled part behind them
        self._goes_on = self.number > 0 or compat.dynamo.goes_on(gm) or is_part
        if self.model.compares_captures():
            self.captured = captured_calls(self.model, gm, self.params)

    def _run_passes(self, passes: Sequence[GraphPass], gm: Any, stage: str) -> None:
        config, name = self.model.settings.config, f"graph{self.number}"
        request = GraphRequest(config, name, self.planned_for, self._find_shards, figures_by_type)
        report = run_passes(passes, gm, request, stage)
        self.notes += report.notes
        self.fallbacks.update(report.fallbacks)

    def _trace(self, gm: Any, layers: RepeatedLayers | None, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        callbacks = _TracingCallbacks(self, gm, layers, len(example_inputs))
        trains = torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in example_inputs)
        compiled: Callable[..., Any] = compat.aot.aot_compile(
            gm if layers is None else shorten(gm, layers),
            example_inputs=example_inputs,
            forward=callbacks.forward,
            backward=callbacks.backward,
            inference=callbacks.inference,
            partition=callbacks.partition,
            decompositions=self.model.services.compiler.decompositions(trains),
            around=self._recording(),
            is_saved=self.is_saved,
        )
        return compiled

    def _recording(self) -> AbstractContextManager[None]:
        """Around tracing: what is found out is noted, if it is going to be kept."""
        return nullcontext() if self.trace is None or not self.trace.is_noted else self.trace.recording()

    def partition(self, joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> tuple[Any, Any]:
        """Rewrite a joint graph and cut it into forward and backward."""
        config, compiler = self.model.settings.config, self.model.services.compiler
        self._take_cut(PartitionResult(gradient_positions(joint, num_fwd_outputs), num_fwd_outputs))
        self._may_lack = can_be_absent(joint, alone=not self._goes_on)
        self._run_passes(compiler.graph_passes().joint, joint, "joint")
        forward, backward = partition_joint(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            carries_sync=self.adapter.carries_sync,
            fusible=compiler.fusible(),
            memory_budget=config.activation_memory_budget,
            again_for_calls=config.recompute == "memory",
            **keywords,
        )
        self._parted = backward
        self._shapes_kept = shapes_of(backward, tangents(backward)) if self._may_lack else ()
        self._note_graphs(forward, backward)
        return forward, backward

    def take_parts(self, cached: KeptTrace) -> tuple[Any, Any]:
        """The same of a graph that was rewritten and cut in an earlier start."""
        self._take_cut(PartitionResult(cached.facts.gradients, cached.facts.results))
        self._find_shards(cached.forward)
        self._parted = cached.backward
        return cached.forward, cached.backward

    def _take_cut(self, cut: PartitionResult) -> None:
        self.training, self._cut = True, cut
        self.grads = tuple((out, self.params[index]) for out, index in cut.gradients if index in self.params)

    def _note_graphs(self, forward: Any, backward: Any) -> None:
        if self.trace is not None:
            self.trace.note_graphs(forward, backward, self._facts())

    def compile_forward(self, module: Any, inputs: int) -> Boxed:
        """The forward of a training graph, which has so many inputs."""
        self.changed = compat.aot_metadata.changed_inputs(inputs)
        if self._needs_parameters():
            return mark_boxed(_never)
        self._own_results, self._learning = compat.aot_metadata.own_results(), compat.aot_metadata.learning_results()
        return mark_boxed(self._forward(module))

    def compile_backward(self, module: Any) -> Boxed:
        """The backward, compiled at its first call."""
        compat.aot_metadata.no_donation()
        runner, regions = self._backward(module), self.model.eager_regions
        runner = mark_boxed(runner if regions is None else regions.undisturbed(runner))
        return mark_boxed(compat.dynamo.no_dynamo(runner, "a compiled backward"))

    def compile_inference(self, module: Any, inputs: int, rewritten: bool = False) -> Boxed:
        """A graph that needs no gradient, which has so many inputs; `rewritten` if passes have run on it before."""
        self._find_shards(module)
        self.changed = compat.aot_metadata.changed_inputs(inputs)
        if self._needs_parameters():
            return mark_boxed(_never)
        if not rewritten:
            self._run_passes(self.model.services.compiler.graph_passes().joint, module, "inference")
            self._note_graphs(module, None)
        self._learning = compat.aot_metadata.learning_results()
        return mark_boxed(self._inference(module))

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

    def _find_shards(self, module: Any) -> list[Any]:
        """Return the placeholders of sharded parameters, and record their names: forward and backward use the same."""
        if self.sync.sharded is None:
            return []
        inputs = [
            (node, compat.aot_descriptors.input_index(node)) for node in module.graph.find_nodes(op="placeholder")
        ]
        found = {node: self.params[index] for node, index in inputs if index in self.params}
        self._sharded = {node.name: number for node, number in found.items()}
        if any(str(user.target).startswith("aten.as_strided.") for node in found for user in node.users):
            self.model.refuse("a parameter is looked at by as_strided, which counts from where its own memory begins")
        results = self._cut.results if self.training else len(module.graph.output_node().args[0])
        if returned := returned_views(module, found, results):
            self._refuse_uses(found[node] for node in returned)
        return list(found)

    def _leaving_absent(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compiled` so that its backward gets None for absent gradients, if its program allows that."""
        if not self._may_lack or not self._own_results:
            return compiled
        position, shown, none = self._own_results[0], self._shapes_kept, MappingProxyType[int, Any]({})

        def leaving(*args: Any) -> Any:
            results = compiled(*args)
            shapes = {index: results[index].shape for index in shown} if shown else none
            compat.aot.leave_absent(results[position], shapes)
            return results

        return leaving


@dataclass(frozen=True)
class _TracingCallbacks:
    """AOTAutograd's callbacks while it traces one graph, with or without most of its repeated `layers`.

    torch 2.11 keeps some of these functions, so they must not refer to parameters.
    """

    graph: DynamoGraph
    gm: Any
    layers: RepeatedLayers | None
    inputs: int
    """Number of the graph's inputs."""

    def partition(self, joint: Any, joint_inputs: Any, **keywords: Any) -> tuple[Any, Any]:
        """Partition a joint graph."""
        self._complete(joint)
        return self.graph.partition(joint, joint_inputs, **keywords)

    def forward(self, module: Any, _inputs: Any) -> Any:
        """Compile a forward."""
        self._check()
        return self.graph.compile_forward(module, self.inputs)

    def backward(self, module: Any, _inputs: Any) -> Any:
        """Compile a backward."""
        return self.graph.compile_backward(module)

    def inference(self, module: Any, _inputs: Any) -> Any:
        """Compile a graph that needs no gradients."""
        self._check()
        self._complete(module)
        return self.graph.compile_inference(module, self.inputs)

    def _complete(self, module: Any) -> None:
        """Insert the layers that were left out of tracing."""
        if self.layers is not None:
            unfold(module, self.gm, self.layers)

    def _check(self) -> None:
        if self.layers is not None:
            check_inputs(self.layers)


@dataclass(frozen=True)
class _ReplayCallbacks:
    """What AOTAutograd calls back where it traces nothing, since the trace was kept."""

    graph: DynamoGraph
    cached: KeptTrace
    inputs: int
    """How many the graph has."""

    def partition(self, _joint: Any, _joint_inputs: Any, **_: Any) -> tuple[Any, Any]:
        """A partition function as AOTAutograd wants it."""
        return self.graph.take_parts(self.cached)

    def forward(self, module: Any, _inputs: Any) -> Any:
        """The forward's compiler."""
        return self.graph.compile_forward(module, self.inputs)

    def backward(self, module: Any, _inputs: Any) -> Any:
        """The backward's compiler."""
        return self.graph.compile_backward(module)

    def inference(self, module: Any, _inputs: Any) -> Any:
        """The compiler of a graph that needs no gradients."""
        return self.graph.compile_inference(module, self.inputs, rewritten=True)


class Backend:
    """Backend that Dynamo calls with each graph of one compiled model.

    Dynamo never drops a backend, so this one has only a weak reference to the model.
    """

    def __init__(self, model: CompiledModel, graph: type[DynamoGraph] = DynamoGraph) -> None:
        self._model = weakref.ref(model)
        self._graph = graph
        self.__name__ = "dcompile"

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        model = self._model()
        assert model is not None, "a compiled model was collected while Dynamo compiled for it"
        needs_data = self._graph.needs_data and model.services.needs_data
        if needs_data and compat.dynamo.have_no_data(example_inputs):
            return gm  # type: ignore[no-any-return]
        captured, flat_inputs, flat = with_flat_inputs(gm, example_inputs)
        inputs, relabelled = with_plain_tensors(captured, flat_inputs)
        gm, inputs, border = with_plain_boundary(captured, inputs, model.adapter)
        graph = self._graph(model, inputs)
        if relabelled.copies:
            graph.notes.append(COPIED)
            graph.fallbacks[COPIES_IN] = len(relabelled.copies)
        compiled = relabelled.around(border.around(graph.compile(gm, inputs), graph.fallbacks), graph.fallbacks)
        watched = watched_inputs(captured, flat_inputs, graph.changed) if needs_data else None  # compares addresses
        exchanges = model.adapter.synchronizes
        compiled = flat.around(as_traced(compiled, captured, watched, graph.fallbacks, exchanges))
        return compiled if model.eager_regions is None else model.eager_regions.around(compiled, example_inputs)


def _never(args: list[Any]) -> list[Any]:
    raise AssertionError("a graph ran that was refused when it was compiled")
