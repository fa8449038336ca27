"""From one Dynamo graph to its programs: what is done to it before, while and after AOTAutograd traces it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from dcompile import compat
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.adapters.fsdp_common import ShardedAdapter
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.capture.agreement.capture_digest import captured_calls
from dcompile.capture.aliasing.output_views import results_without_gradients, view_without_gradients
from dcompile.capture.aliasing.overlapping_inputs import as_traced, watched_inputs
from dcompile.capture.aliasing.storage_resizes import resize_only_inputs
from dcompile.capture.compiled_model import CompiledModel
from dcompile.capture.graph_boundary import COPIED, COPIES_IN, with_flat_inputs, with_plain_boundary, with_plain_tensors
from dcompile.capture.graph_runner import GraphPrograms, mark_boxed
from dcompile.capture.joint_graph import (
    PartitionResult,
    partitioner,
    recompute_views,
    returned_views,
    save_random_values,
)
from dcompile.capture.passes.dynamo.causal_mask import recognize_causal_masks
from dcompile.capture.passes.dynamo.chunked_cross_entropy.match import LEFT_WHOLE, chunk_losses
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import recompute_loss_chunks
from dcompile.capture.passes.dynamo.decode_attention import decompose_decode_attention
from dcompile.capture.passes.dynamo.grouped_experts import group_experts
from dcompile.capture.passes.dynamo.grouped_query_attention import use_grouped_query_attention
from dcompile.capture.passes.dynamo.has_matmul import multiplies
from dcompile.capture.passes.dynamo.higher_order_bodies import is_checkpointed
from dcompile.capture.passes.dynamo.loss_gradient_in_forward import compute_loss_gradient_in_forward
from dcompile.capture.passes.dynamo.recurrent_layers import keep_recurrent_layers_whole
from dcompile.capture.passes.dynamo.unfold_by_slices import view_unfold_by_slices
from dcompile.capture.passes.joint.absent_gradients import can_be_absent, shapes_of, tangents
from dcompile.capture.passes.joint.channels_last import use_channels_last
from dcompile.capture.passes.joint.compact_pool_indices import compact_pool_indices, drop_saved_pool_inputs
from dcompile.capture.passes.joint.narrow_gathers import narrow_gathers
from dcompile.capture.passes.joint.pad_matmul import pad_matmuls
from dcompile.capture.passes.joint.permutation_gradients import gather_permutation_gradients
from dcompile.capture.passes.joint.remove_clones import remove_clones
from dcompile.capture.passes.joint.rng_keys import assign_rng_keys
from dcompile.capture.passes.repeated_layers.find import repeated_layers, shorten
from dcompile.capture.passes.repeated_layers.replicate import LayersDiffer, check_inputs, unfold


class DynamoGraph(GraphPrograms):
    """One Dynamo graph of a compiled model."""

    gpu = "cuda"
    """The kind of device whose kernels decide what is rewritten for GPUs."""

    needs_data = True
    """Whether programs read memory, which fake tensors lack."""

    def compile(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo is to call in place of `gm`."""
        example_inputs = compat.dynamo.take_full_numbers(gm, example_inputs)
        count = len(example_inputs)  # of its functions, torch 2.11 keeps some, which must not keep parameters
        compiler = self.model.toolbox.compiler
        if multiplies(gm):
            compiler.expect_products()
        if self.model.shards is not None and is_checkpointed(gm):
            self.model.shards.save_memory("activations are checkpointed")
        self._goes_on = self.number > 0 or compat.dynamo.goes_on(gm)
        if self.model.compares_captures():
            self.captured = captured_calls(self.model, gm, self.params)
        self.notes += group_experts(gm, self.model.settings.config.autocast_experts)
        self.notes += keep_recurrent_layers_whole(gm)
        view_unfold_by_slices(gm)
        if self.model.settings.config.kernels != "aten":
            self.notes += recognize_causal_masks(gm)
            self.notes += decompose_decode_attention(gm)
            self.notes += use_grouped_query_attention(gm, self.gpu)
        if self.model.settings.config.chunked_loss:
            notes, whole = chunk_losses(gm, self.model.settings.config.chunked_loss)
            self.notes += notes
            self.fallbacks += Counter({LEFT_WHOLE: whole})
        if self.model.settings.config.kernels != "aten":
            compute_loss_gradient_in_forward(gm)
        layers = repeated_layers(gm) if self.model.settings.config.layers_once else None

        def complete(module: Any) -> None:
            if layers is not None:
                unfold(module, gm, layers)

        def check() -> None:
            if layers is not None:
                check_inputs(layers)

        def found(cut: PartitionResult) -> None:
            self.training = True
            self._cut = cut
            self.grads = tuple((out, self.params[index]) for out, index in cut.gradients if index in self.params)

        def parted(joint: Any, *args: Any, **keywords: Any) -> tuple[Any, Any]:
            complete(joint)
            pair = partition(joint, *args, **keywords)
            self._parted = pair[1]
            self._shapes_kept = shapes_of(pair[1], tangents(pair[1])) if self._may_lack else ()
            return pair

        def forward(module: Any, _inputs: Any) -> Any:
            check()
            self.changed = compat.aot.changed_inputs(count)
            if self._needs_parameters():
                return mark_boxed(_never)
            self._own_results, self._learning = compat.aot.own_results(), compat.aot.learning_results()
            return mark_boxed(self._forward(module))

        def backward(module: Any, _inputs: Any) -> Any:
            compat.aot.no_donation()
            runner, between = self._backward(module), self.model.between
            runner = mark_boxed(runner if between is None else between.undisturbed(runner))
            return mark_boxed(compat.dynamo.no_dynamo(runner, "a compiled backward"))

        def inference(module: Any, _inputs: Any) -> Any:
            check()
            complete(module)
            resize_only_inputs(module)
            assign_rng_keys(module)
            self._find_shards(module)
            self.changed = compat.aot.changed_inputs(count)
            if self._needs_parameters():
                return mark_boxed(_never)
            self._lay_out(module)
            self._learning = compat.aot.learning_results()
            return mark_boxed(self._inference(module))

        config = self.model.settings.config
        partition = partitioner(
            self.adapter.carries_sync,
            found,
            compiler.fusible,
            self._prepare,
            config.activation_memory_budget,
            config.recompute == "memory",
        )
        trace = partial(
            compat.aot.aot_compile,
            example_inputs=example_inputs,
            forward=forward,
            backward=backward,
            inference=inference,
            partition=parted,
            decompositions=compiler.decompositions(),
        )
        try:
            compiled = trace(gm if layers is None else shorten(gm, layers))
        except LayersDiffer as reason:
            self.notes.append(f"layers that repeat are traced each by itself: {reason}")
            layers = None
            compiled = trace(gm)
        compiled = self._leaving_absent(self._checked(compiled))
        seen = results_without_gradients(gm, self._learning)
        return compat.dynamo.no_dynamo(view_without_gradients(compiled, seen), "a compiled graph")

    def _prepare(self, joint: Any) -> None:
        """Before the joint graph is cut apart."""
        self._may_lack = can_be_absent(joint, alone=not self._goes_on)
        if self.model.settings.config.kernels != "aten":
            remove_clones(joint)
            gather_permutation_gradients(joint)
            compact_pool_indices(joint)
        self._lay_out(joint)
        if self.model.settings.config.kernels != "aten":
            drop_saved_pool_inputs(joint)
        recompute_loss_chunks(joint)
        self.notes += save_random_values(joint)
        recompute_views(joint, self._find_shards(joint))

    def _needs_parameters(self) -> bool:
        """Whether the graph returns a sharded parameter or writes to it; then it is refused.

        Gathered parameters are gone after a program: this takes FSDP's own.
        """
        used = compat.aot.not_only_read() & self.params.keys()
        if not isinstance(self.adapter, ShardedAdapter) or not used:
            return False
        self._refuse_uses([self.params[position] for position in used])
        return True

    def _refuse_uses(self, numbers: Iterable[int]) -> None:
        names = ", ".join(sorted(self.adapter.param_infos()[number].fqn for number in numbers))
        self.model.refuse(f"the model returns or changes a parameter in its forward: {names}")

    def _find_shards(self, module: Any) -> list[Any]:
        """Placeholders of sharded parameters; forward and backward will call them by the same names."""
        if not isinstance(self.adapter, ShardedAdapter):
            return []
        inputs = [(node, compat.aot.input_index(node)) for node in module.graph.find_nodes(op="placeholder")]
        found = {node: self.params[index] for node, index in inputs if index in self.params}
        self._sharded = {node.name: number for node, number in found.items()}
        if any(str(user.target).startswith("aten.as_strided.") for node in found for user in node.users):
            self.model.refuse("a parameter is looked at by as_strided, which counts from where its own memory begins")
        results = self._cut.results if self.training else len(module.graph.output_node().args[0])
        if returned := returned_views(module, found, results):
            self._refuse_uses(found[node] for node in returned)
        return list(found)

    def _lay_out(self, module: Any) -> None:
        config = self.model.settings.config
        if config.kernels == "aten":
            return
        if config.shape_padding:
            pad_matmuls(module)
        narrow_gathers(module)
        use_channels_last(module)

    def _checked(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, noticing when a parameter object was replaced (load_state_dict(assign=True))."""
        adapter = self.adapter
        if not isinstance(adapter, DdpAdapter) or not self.params:
            return compiled
        slots = [(position, number) for position, number in self.params.items()]
        refs = adapter.refs

        def checked(*args: Any) -> Any:
            for position, number in slots:
                if refs[number]() is not args[position]:
                    adapter.rebind(number, args[position])
            return compiled(*args)

        return checked

    def _leaving_absent(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, whose backward gets None for gradients that there are none of, if its program can do without."""
        if not self._may_lack or not self._own_results:
            return compiled
        position, shown, none = self._own_results[0], self._shapes_kept, MappingProxyType[int, Any]({})

        def leaving(*args: Any) -> Any:
            results = compiled(*args)
            shapes = {index: results[index].shape for index in shown} if shown else none
            compat.aot.leave_absent(results[position], shapes)
            return results

        return leaving


class Backend:
    """What Dynamo calls with each graph of one compiled model. Dynamo never drops it, so it holds the model weakly."""

    def __init__(self, model: CompiledModel, graph: type[DynamoGraph] = DynamoGraph) -> None:
        self._model = weakref.ref(model)
        self._graph = graph
        self.__name__ = "dcompile"

    def __call__(self, gm: Any, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        model = self._model()
        assert model is not None, "a compiled model was collected while Dynamo compiled for it"
        if self._graph.needs_data and compat.dynamo.have_no_data(example_inputs):
            return gm  # type: ignore[no-any-return]
        captured, flat_inputs, flat = with_flat_inputs(gm, example_inputs)
        inputs, relabelled = with_plain_tensors(captured, flat_inputs)
        gm, inputs, border = with_plain_boundary(captured, inputs, model.adapter)
        graph = self._graph(model, inputs)
        if relabelled.copies:
            graph.notes.append(COPIED)
            graph.fallbacks[COPIES_IN] = len(relabelled.copies)
        compiled = relabelled.around(border.around(graph.compile(gm, inputs), graph.fallbacks), graph.fallbacks)
        watched = watched_inputs(captured, flat_inputs, graph.changed)
        exchanges = type(model.adapter) is not PlainAdapter
        compiled = flat.around(as_traced(compiled, captured, watched, graph.fallbacks, exchanges))
        return compiled if model.between is None else model.between.around(compiled, example_inputs)


def _never(args: list[Any]) -> list[Any]:
    raise AssertionError("a graph ran that was refused when it was compiled")
