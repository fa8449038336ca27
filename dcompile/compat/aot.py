"""AOTAutograd: joint graphs, their partition, and decompositions."""

from __future__ import annotations

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcompile.compat.patches.batch_norm_statistics import unseen_statistics
from dcompile.compat.patches.cse import regions_without_inductor
from dcompile.compat.patches.index_strides import strides_of_indices
from dcompile.compat.patches.lean_wrappers import lean_runtime, unpack_arguments
from dcompile.compat.patches.mutated_input_order import results_in_their_places
from dcompile.compat.patches.quiet_dumps import no_unread_backwards, no_unread_graphs
from dcompile.compat.patches.rng_under_checkpoint import is_drawn_again as is_drawn_again
from dcompile.compat.patches.rng_under_checkpoint import no_unread_counters, states_of_what_draws
from dcompile.compat.patches.symbolic_tangents import tangents_of_any_size
from dcompile.compat.patches.symbolic_views import views_as_asked
from dcompile.compat.sizes import remembering_numbers_alone, simplifying_once

if TYPE_CHECKING:
    import torch


def aot_compile(
    gm: Any,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[[Any, Any], Any],
    backward: Callable[[Any, Any], Any],
    inference: Callable[[Any, Any], Any],
    partition: Callable[..., Any],
    decompositions: dict[Any, Any],
    around: contextlib.AbstractContextManager[None],
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them apart, and compile each with what is given.

    `around` is entered meanwhile: see `aot_trace`.
    """
    import torch._functorch.config as config
    from torch._functorch.aot_autograd import aot_module_simplified

    # With donation on, AOTAutograd refuses backward(retain_graph=True). Memory planning of ours reuses what it may.
    settings: dict[str, Any] = {"donated_buffer": False}
    # With this on, what draws random numbers on a GPU and is recomputed has a generator of its own, seeded in the first
    # call: eager has no such thing.
    if hasattr(config, "graphsafe_rng_functionalization"):
        settings["graphsafe_rng_functionalization"] = False
    known = config.patch(settings)  # type: ignore[no-untyped-call, unused-ignore]
    remembering = remembering_numbers_alone(example_inputs)
    lean = lean_runtime(example_inputs)
    with (
        known,
        tangents_as_results(),
        simplifying_once(),
        views_as_asked(),
        strides_of_indices(),
        remembering,
        no_unread_graphs(),
        no_unread_counters(),
        results_in_their_places(),
        unseen_statistics(),
        tangents_of_any_size(),
        lean,
        around,
    ):
        compiled = aot_module_simplified(
            gm,  # type: ignore[arg-type, unused-ignore]
            example_inputs,
            fw_compiler=forward,  # type: ignore[arg-type, unused-ignore]
            bw_compiler=backward,  # type: ignore[arg-type, unused-ignore]
            inference_compiler=inference,  # type: ignore[arg-type, unused-ignore]
            partition_fn=partition,
            decompositions=decompositions,
            keep_inference_input_mutations=True,
        )
        return unpack_arguments(compiled, gm)


@contextlib.contextmanager
def tangents_as_results() -> Iterator[None]:
    """Expect a result's gradient to lie as the result does, and not in row-major order, before torch 2.13 does so.

    A gradient that lies otherwise than expected is copied, which was two thirds of rotary embedding's backward. Results
    that overlap themselves (from expand) say nothing about their gradients, which the setting alone would copy wrong.
    """
    import torch
    import torch._functorch.config as config
    from torch._functorch._aot_autograd import schemas

    name, kind = "guess_tangent_strides_as_outputs", getattr(schemas, "MemoryFormatMeta", None)
    if kind is None or getattr(config, name, True):
        yield
        return
    own = kind.from_tensor

    def from_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        apart = torch._debug_has_internal_overlap(tensor) == 0
        with config.patch({name: apart}):  # type: ignore[no-untyped-call, unused-ignore]
            return own(tensor, *args, **kwargs)

    kind.from_tensor = staticmethod(from_tensor)
    try:
        yield
    finally:
        kind.from_tensor = staticmethod(own)


def backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """Have AOTAutograd call the backward's compiler with the forward's, and not in the first backward."""
    import torch._functorch.config as config

    name = "force_non_lazy_backward_lowering"
    if not hasattr(config, name):
        return contextlib.nullcontext()
    return config.patch({name: True})  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def _metadata() -> Any:
    """Inside a compiler of AOTAutograd: what it knows of the forward's inputs and results; None elsewhere."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def no_donation() -> None:
    """Say, from inside the backward compiler, that this graph donates no buffer (its run-time check wants a list)."""
    metadata = _metadata()
    if metadata is not None:
        metadata.bw_donated_idxs = []


def changed_inputs(count: int) -> frozenset[int] | None:
    """Inside a compiler of AOTAutograd: positions of inputs, of `count`, that the graph writes to; None if unknown.

    It is not known where one input stands for several that share memory.
    """
    metadata = _metadata()
    if metadata is None or len(metadata.input_info) != count:
        return None
    return frozenset(n for n, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata)


def not_only_read() -> frozenset[int]:
    """Inside a compiler of AOTAutograd: positions of inputs that the graph changes, or returns as they are or as views.

    It deals with these outside the graph, on the very tensors that it is called with.
    """
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    changed = (n for n, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata)
    aliases = (o.base_idx for o in metadata.output_info if o.output_type.name in ("alias_of_input", "is_input"))
    return frozenset((*changed, *(n for n in aliases if n is not None)))


def looks_at_inputs() -> dict[int, int]:
    """Inside the compiler of a forward or an inference graph: position of a result -> of the input it is a view of.

    AOTAutograd hands out views of the inputs there, and reads no more of the results than how they lie. Inputs that the
    graph gives another shape are left out: their views are of what becomes of them.
    """
    metadata = _metadata()
    if metadata is None:
        return {}
    changed = metadata.num_mutated_inp_runtime_indices  # inputs that come first
    kinds = enumerate(metadata.output_info, changed)
    looks = ((place, info.base_idx) for place, info in kinds if info.output_type.name == "alias_of_input")
    return {place: base for place, base in looks if not metadata.input_info[base].mutates_metadata}


def returned_changes(gm: Any) -> dict[Any, Any]:
    """Placeholders of inputs that AOTAutograd changes behind this graph -> what it returns for them."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    output = gm.graph.output_node()
    placeholders = {node.meta.get("desc"): node for node in gm.graph.find_nodes(op="placeholder")}
    described = zip(output.args[0], output.meta.get("desc", ()), strict=False)
    return {placeholders[d.mutated_input]: node for node, d in described if isinstance(d, InputMutationAOTOutput)}


def min_cut_partition(
    joint: Any,
    joint_inputs: Any,
    fusible: frozenset[Any],
    recomputable: frozenset[Any],
    memory_budget: float = 1.0,
    again_for_calls: bool = False,
    minimum_cut: Callable[..., Any] | None = None,
    **keywords: Any,
) -> tuple[Any, Any]:
    """torch's own choice of what to save and what to recompute: (forward, backward).

    `fusible` and `recomputable` are overload packets that it is to treat so beside those it knows: the list is a
    function of its module, replaced while the cut is made. Where torch has no such function, its own list decides.
    `memory_budget` is the part of what this would save that may be saved at most; the rest is computed again.
    `again_for_calls` lets the backward also compute again what it then has to write for a library call.
    Views of whole tensors are never saved, but what they look at: weighing both, torch may save a product's result and
    the view of what was computed from it, where the latter alone would do (a ReLU between two linear layers).
    `minimum_cut` answers in networkx's place, which gets passed on for what it cannot answer.
    """
    from torch._functorch import config, partitioners

    # a budget that the user has set for torch.compile itself stands where ours says nothing
    changes: dict[str, Any] = {"activation_memory_budget": memory_budget} if memory_budget < 1 else {}
    if again_for_calls and hasattr(config, "ban_recompute_materialized_backward"):
        changes["ban_recompute_materialized_backward"] = False
    if hasattr(config, "recompute_views") and hasattr(partitioners, "get_default_op_list"):
        changes["recompute_views"] = True
    ops, cutting = _more_ops(partitioners, fusible, recomputable), _cutting(minimum_cut)
    unread = no_unread_backwards()
    with ops, cutting, unread, regions_without_inductor(), states_of_what_draws(), config.patch(changes):
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **keywords)


def _cutting(minimum_cut: Callable[..., Any] | None) -> contextlib.AbstractContextManager[Any]:
    """The partitioner looks networkx's function up when it needs it."""
    try:
        import networkx  # type: ignore[import-untyped, unused-ignore]
    except ImportError:  # the partitioner says so itself
        return contextlib.nullcontext()
    if minimum_cut is None:
        return contextlib.nullcontext()
    own = networkx.minimum_cut

    def cut(graph: Any, source: Any, sink: Any) -> Any:
        return minimum_cut(graph, source, sink, own)

    return unittest.mock.patch.object(networkx, "minimum_cut", cut)  # type: ignore[no-any-return, unused-ignore]


@contextlib.contextmanager
def _more_ops(partitioners: Any, fusible: frozenset[Any], recomputable: frozenset[Any]) -> Iterator[None]:
    own = getattr(partitioners, "get_default_op_list", None)
    if own is None:
        yield
        return
    parts = _parts()

    def op_list() -> Any:
        found = own()
        return dataclasses.replace(
            found,
            fusible_ops=found.fusible_ops | fusible,
            recomputable_ops=found.recomputable_ops | recomputable,
            view_ops=found.view_ops - parts,
        )

    with unittest.mock.patch.object(partitioners, "get_default_op_list", op_list):
        yield


def _parts() -> frozenset[Any]:
    """Views that show a part of a tensor: saving the whole in their place may take more memory."""
    import torch

    aten = torch.ops.aten
    return frozenset((aten.slice, aten.select, aten.split, aten.as_strided))


def primal_index(node: Any) -> int | None:
    """Position among the Dynamo graph's inputs that this gradient of a joint graph belongs to, or None."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    if not isinstance(node, GradAOTOutput) or not isinstance(node.grad_of, PlainAOTInput):
        return None
    return node.grad_of.idx


def changed_behind(joint: Any) -> frozenset[Any]:
    """Placeholders of a joint graph whose tensors AOTAutograd changes, once the forward has run, to what it returns."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    described = joint.graph.output_node().meta.get("desc", ())
    changed = {d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)}
    return frozenset(node for node in joint.graph.find_nodes(op="placeholder") if node.meta.get("desc") in changed)


def input_index(placeholder: Any) -> int | None:
    """Position among the Dynamo graph's inputs that a placeholder of AOTAutograd's graphs stands for, or None."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    description = placeholder.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None


def is_tangent(placeholder: Any) -> bool:
    """Whether a placeholder of AOTAutograd's graphs stands for a gradient that autograd hands to the backward.

    Or for the part of one that is taken apart, such as a DTensor's local tensor.
    """
    from torch._functorch._aot_autograd.descriptors import TangentAOTInput

    description = placeholder.meta.get("desc")
    while is_part_of_subclass(placeholder) and hasattr(description, "base"):
        description = description.base
    return isinstance(description, TangentAOTInput)


def is_part_of_subclass(placeholder: Any) -> bool:
    """Whether a placeholder of AOTAutograd's graphs stands for a part of a tensor that it has taken apart."""
    return type(placeholder.meta.get("desc")).__name__.startswith("Subclass")


def is_base_of_inputs(placeholder: Any) -> bool:
    """Whether a placeholder of AOTAutograd's graphs stands for what several inputs are views of."""
    from torch._functorch._aot_autograd.descriptors import ViewBaseAOTInput

    return isinstance(placeholder.meta.get("desc"), ViewBaseAOTInput)


def takes_absent_tangents() -> bool:
    """Whether backwards of AOTAutograd pass on a None that autograd gives them for a gradient; if so, unchanged."""
    from torch._functorch._aot_autograd import runtime_wrappers

    process = getattr(getattr(runtime_wrappers, "AOTDispatchAutograd", None), "process_runtime_tangent", None)
    try:
        return process is not None and process(None, None) == (None, [None])
    except (TypeError, AttributeError, AssertionError):
        return False


def own_results() -> tuple[int, ...]:
    """Inside a compiler of AOTAutograd: positions of results that its node of the autograd graph has made itself.

    Views of what the graph computes are such, too. Behind those that share memory, which come last, is what it made.
    """
    metadata = _metadata()
    if metadata is None:
        return ()
    own = ("non_alias", "unsafe_view_alias", "alias_of_intermediate", "alias_of_intermediate_save_as_output",
           "alias_of_intermediate_base_is_user_output")  # fmt: skip
    kinds = [info.output_type.name if info.requires_grad else "" for info in _shown_results(metadata)]
    found = [n for n, kind in enumerate(kinds) if kind in own]
    return tuple(sorted(found, key=lambda n: own.index(kinds[n]) > 1))


def learning_results() -> frozenset[int]:
    """Inside the compiler of a forward or an inference graph: positions of results that are to have a gradient."""
    metadata = _metadata()
    if metadata is None:
        return frozenset()
    return frozenset(n for n, info in enumerate(_shown_results(metadata)) if info.requires_grad)


def _shown_results(metadata: Any) -> list[Any]:
    """What AOTAutograd knows of each result as the caller sees it: of a DTensor, of the local tensor in it.

    The mesh beside that counts as a result of the traced graph.
    """
    from torch._library.fake_class_registry import FakeScriptObject

    return [info for info in metadata.output_info if not issubclass(info.raw_type, FakeScriptObject)]


def constant_results() -> tuple[int, ...]:
    """Inside the compiler of a forward: positions of results without a gradient."""
    metadata = _metadata()
    if metadata is None:
        return ()
    changed = metadata.num_mutated_inp_runtime_indices  # inputs that come first
    return tuple(changed + n for n, info in enumerate(metadata.output_info) if not info.requires_grad)


def take_views() -> tuple[int, ...]:
    """Inside the compiler of a forward: positions of views that are to be handed out as tensors of their own.

    AOTAutograd would do it; from now on it leaves that to the caller. None where a torch notes them in another way.
    """
    metadata = _metadata()
    views = getattr(metadata, "unsafe_view_out_indices", ())
    if metadata is None or not views:
        return ()
    metadata.unsafe_view_out_indices, metadata.num_unsafe_view_outputs = [], 0
    changed = metadata.num_mutated_inp_runtime_indices  # inputs that come first
    return tuple(changed + place for place in views)


def result_index(tangent: Any) -> int | None:
    """Position among a graph's results of the one that this placeholder of a backward is the gradient of, or None."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

    result = getattr(tangent.meta.get("desc"), "output", None)
    return result.idx if isinstance(result, PlainAOTOutput) else None


def leave_absent(result: Any, shapes: Mapping[int, Any]) -> None:
    """Have autograd hand None to the compiled backward behind this result, where it would make zeros.

    Functions decide this while they run forward; the node of the autograd graph is what they decide it by. It keeps
    `shapes` for `absent_shapes`.
    """
    from dcompile.compat.tensors import is_compiled_backward

    node = result.grad_fn
    if node is not None and result._base is not None and not is_compiled_backward(node):
        node = result._base.grad_fn
    if node is not None and is_compiled_backward(node):
        node.materialize_grads = False  # as `set_materialize_grads` does, in one call of Python less
        node.dcompile_shapes = shapes


def absent_shapes() -> Mapping[int, Any]:
    """Inside a compiled backward: what its forward gave to `leave_absent`."""
    import torch

    return getattr(torch._C._current_autograd_node(), "dcompile_shapes", {})


def batch_test() -> Callable[[torch.Tensor], bool]:
    """What tells a batch of `is_grads_batched=True` and `jacobian(vectorize=True)`; torch refuses those of `vmap`."""
    import torch

    return torch._C._functorch.is_legacy_batchedtensor


def hooked_leaves() -> frozenset[int]:
    """Inside a compiled backward: positions, among the tensors its forward got, of leaves with hooks on gradients."""
    import torch

    edges = enumerate(torch._C._current_autograd_node().next_functions)  # type: ignore[attr-defined, unused-ignore]
    leaves = ((n, getattr(function, "variable", None)) for n, (function, _) in edges)
    return frozenset(n for n, leaf in leaves if leaf is not None and leaf._backward_hooks)


def always_recompute(node: Any) -> None:
    """Have the partitioner compute this node again in the backward, whatever it costs to save it.

    The number orders regions of gradient checkpointing; a region that is behind another makes torch save what the two
    share. No region is behind this one.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 1 << 30


def never_recompute(node: Any) -> None:
    """Have the partitioner save this node where the backward needs it, or what the forward makes of it."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@contextlib.contextmanager
def annotate_nodes(marks: dict[str, Any]) -> Iterator[None]:
    """Note `marks` with each operation that is traced inside, as `meta["custom"]`.

    torch's `annotate` adds them to the dictionary that is there, which may be that of the node being traced.
    """
    from torch.fx import traceback

    meta = traceback.current_meta
    if "custom" in meta:
        meta["custom"] = dict(meta["custom"])
    with traceback.annotate(marks):
        yield


def lazy_graph_module(root: Any, graph: Any) -> Any:
    """A graph module that writes its Python code when that is first asked for: a tenth of making a graph anew."""
    import torch

    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return torch.fx.GraphModule(root, graph)
    return _LazyGraphModule(root, graph)


def detect_fake_mode(values: Any) -> Any:
    """The mode that fake tensors among `values` belong to."""
    from torch._guards import detect_fake_mode as detect

    return detect(values)


def fake_input(tensor: torch.Tensor) -> Any:
    """Inside Dynamo's backend: the fake tensor that AOTAutograd will trace with for an input that Dynamo did not see.

    Its sizes are numbers. Left to itself, AOTAutograd would make symbols of them; it asks the mode's memory first.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    assert context is not None and context.fake_mode is not None, "only a graph that is being compiled has inputs"
    return context.fake_mode.from_tensor(tensor, static_shapes=True)


def decompositions(also: Sequence[Any]) -> dict[Any, Any]:
    """torch's core decompositions of ops that autograd sees whole, and those of the ops in `also`."""
    import torch._decomp as decomp

    core = getattr(decomp, "_core_aten_decompositions_post_autograd", decomp.core_aten_decompositions)
    return {**core(), **decomp.get_decompositions(also)}


def dimensions_by_stride(x: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, outermost in memory first, in the order that eager's elementwise kernels see."""
    import torch._prims_common as prims

    return list(prims.compute_elementwise_output_logical_to_physical_perm(x)[0])


def suggest_memory_format(x: torch.Tensor) -> torch.memory_format:
    """The layout that eager's kernels give to results of `x`: channels last if its strides look so."""
    import torch._prims_common as prims

    return prims.suggest_memory_format(x)
