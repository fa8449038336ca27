"""Every patch of torch, and of what torch calls: what it changes, why, for which versions, and how it is undone.

Patches with stages are entered by `patched` around that stage, in the order of this list. The others (`on_demand.py`)
are entered, or made once, by the module that needs them. `describe` writes the list as text, with what applies to the
installed torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from dcompile.compat import guards, sizes
from dcompile.compat.patches import (
    aot_graphs,
    dynamo_frames,
    lean_wrappers,
    partitioner,
    quiet_dumps,
    random_numbers,
    traced_sizes,
)
from dcompile.compat.patches.on_demand import ON_DEMAND
from dcompile.compat.patches.torch_patch import GUARDS, PatchRequest, Stage, TorchPatch, installed_version
from dcompile.compat.versions import torch_version

FRAME: tuple[Stage, ...] = ("frame",)
GRAPH: tuple[Stage, ...] = ("graph",)
BOTH: tuple[Stage, ...] = ("frame", "graph")
PARTITION: tuple[Stage, ...] = ("partition",)
_FAKE_OPS = "torch._subclasses.fake_impls.op_implementations_dict"
_PARTITIONERS = "torch._functorch.partitioners"

PATCHES: tuple[TorchPatch, ...] = (
    # --- Dynamo compiles a frame ---
    TorchPatch(
        quiet_dumps.quiet_metrics,
        ("torch._dynamo.utils._scrubbed_inductor_config_for_logging",),
        "correctness",
        "metrics of torch 2.11 fail to write functions among settings; those of inductor say nothing of our frames",
        FRAME,
    ),
    TorchPatch(
        dynamo_frames.compiling_in_one_thread,
        ("torch.compiler._compile_session_context",),
        "correctness",
        "optimizers that step in other threads meanwhile take themselves for compiled, and fail",
        FRAME,
        first=(2, 12),
    ),
    TorchPatch(
        dynamo_frames.traced_sync_batch_norm,
        ("torch._dynamo.variables.misc.AutogradFunctionVariable.call_apply",),
        "takeover",
        "SyncBatchNorm's collectives become steps of the program",
        FRAME,
        lambda request: (request.sync_batch_norm,),
    ),
    TorchPatch(
        dynamo_frames.functions_told_of_absence_in_eager,
        (
            "torch._dynamo.variables.misc.AutogradFunctionContextVariable.var_getattr",
            "torch._dynamo.variables.misc.AutogradFunctionVariable.call_apply",
        ),
        "correctness",
        "a backward that asks which gradients are absent is traced as if none were",
        FRAME,
    ),
    TorchPatch(
        dynamo_frames.experts_grouped,
        ("torch._dynamo.variables.functions.UserMethodVariable.call_function",),
        "takeover",
        "a loop over experts runs as often as experts are hit, which no graph can",
        FRAME,
        lambda request: (request.group_experts,),
    ),
    TorchPatch(
        guards.short_guard_of_hooks,
        (f"{GUARDS}.AUTOGRAD_SAVED_TENSORS_HOOKS",),
        "speed",
        "the guard on hooks of saved tensors asks for all of them at each call",
        FRAME,
        lambda request: (request.told_of_hooks,),
    ),
    TorchPatch(
        guards.guard_methods,
        ("torch._dynamo.symbolic_convert.InliningInstructionTranslator.inline_call",),
        "correctness",
        "kernel libraries put another method in a class, of which Dynamo asks nothing",
        FRAME,
    ),
    TorchPatch(
        dynamo_frames.writes_to_scalars_kept,
        ("torch._dynamo.output_graph.OutputGraph.remove_tensorify_specialized_graphargs",),
        "correctness",
        "in-place writes to float64 scalars are taken out of the graph with any backend",
        FRAME,
    ),
    TorchPatch(
        dynamo_frames.strided_results_written,
        ("torch._dynamo.variables.torch.TorchInGraphFunctionVariable.call_function",),
        "takeover",
        "`out=` of a tile breaks the graph, and each frame around it is traced anew",
        FRAME,
    ),
    TorchPatch(
        dynamo_frames.absent_gradients_passed,
        ("torch._dynamo._trace_wrapped_higher_order_op.autograd_function_backward_rewritten",),
        "correctness",
        "a custom Function whose results include None is an AttributeError in its backward",
        FRAME,
    ),
    TorchPatch(
        dynamo_frames.packed_sequences_apart,
        ("torch._dynamo.trace_rules._disallowed_callable_ids",),
        "correctness",
        "tracing how a packed sequence is padded fails",
        FRAME,
        last=(2, 11),
    ),
    TorchPatch(
        dynamo_frames.library_functions_whole,
        ("torch._dynamo.variables.functions.SkipFunctionVariable.call_function",),
        "speed",
        "graph breaks around an optimizer's step make three frames of it; the warnings of a loss leave it to eager",
        FRAME,
    ),
    TorchPatch(
        dynamo_frames.certain_branches_taken,
        ("torch._dynamo.symbolic_convert.InstructionTranslator.dispatch_table",),
        "speed",
        "LayerDrop with a probability of 0 breaks the graph before each layer",
        FRAME,
        lambda request: (request.certain_branches,),
    ),
    TorchPatch(
        dynamo_frames.reordered_gathers_traced,
        ("torch._dynamo.trace_rules.get_torch_obj_rule_map",),
        "correctness",
        "Dynamo refuses to trace all_gather_tensor along another dimension than the first",
        FRAME,
        last=(2, 11),
    ),
    TorchPatch(
        quiet_dumps.no_unread_latencies,
        ("torch._dynamo.guards.profile_guard_manager",),
        "speed",
        "timing new guards sweeps the caches, 27 ms a frame, whether anybody reads it or not",
        FRAME,
    ),
    TorchPatch(
        quiet_dumps.no_unread_names,
        ("torch._dynamo.symbolic_convert.get_funcname",),
        "speed",
        "finding the names of traced functions parses whole files for a log that is off",
        FRAME,
    ),
    TorchPatch(
        dynamo_frames.repeated_layers_once,
        (
            "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable.call_function",
            "torch._dynamo.side_effects.SideEffects.mutation",
            "torch._dynamo.side_effects.SideEffects.store_attr",
        ),
        "speed",
        "Dynamo traces each layer of a model, which takes most of a warm start",
        FRAME,
        lambda request: (request.layers_once,),
    ),
    # --- Dynamo's tracing calls AOTAutograd's: within themselves these change nothing ---
    TorchPatch(
        sizes.simplifying_once,
        ("sympy.simplify",),
        "speed",
        "simplifying a division simplifies what is inside anew at each level",
        BOTH,
    ),
    TorchPatch(
        traced_sizes.remembered_arithmetic,
        ("torch.fx.experimental.sym_node.SymNode._mul",),
        "speed",
        "each fake tensor works out anew what its symbolic sizes come to, a quarter of the time that tracing takes",
        BOTH,
    ),
    TorchPatch(
        traced_sizes.views_as_asked,
        (_FAKE_OPS,),
        "speed",
        "views of symbolic sizes guard on each comparison, and come out as longer expressions",
        BOTH,
    ),
    TorchPatch(
        traced_sizes.strides_of_indices,
        (_FAKE_OPS, "torch._subclasses.fake_tensor.FakeTensorMode._cache_key"),
        "correctness",
        "strides of x[i] follow the index in eager, and are traced without it",
        BOTH,
    ),
    # --- AOTAutograd traces a graph ---
    TorchPatch(
        aot_graphs.tangents_as_results,
        ("torch._functorch._aot_autograd.schemas.MemoryFormatMeta.from_tensor",),
        "speed",
        "gradients that are stored as their results were copied to row-major order",
        GRAPH,
    ),
    TorchPatch(
        sizes.remembering_numbers_alone,
        ("torch._subclasses.fake_tensor.disable_fake_tensor_cache",),
        "speed",
        "remembering results of symbolic sizes takes longer than working them out",
        GRAPH,
        lambda request: (request.example_inputs,),
    ),
    TorchPatch(
        quiet_dumps.no_unread_graphs,
        ("torch._functorch._aot_autograd.graph_compile._log_joint_graph",),
        "speed",
        "graphs are written as text for logs that are off",
        GRAPH,
    ),
    TorchPatch(
        random_numbers.no_unread_counters,
        ("torch._decomp.decompositions_for_rng.PhiloxStateTracker.reset",),
        "speed",
        "twelve fake tensors for counters of random numbers that nothing reads",
        GRAPH,
    ),
    TorchPatch(
        aot_graphs.without_python_kernels,
        ("torch.ops.aten.upsample_bilinear2d.vec.py_kernels", "torch.ops.aten.dropout.default.py_kernels"),
        "correctness",
        "tracing enlarges images and drops values by other operations than eager mode, with other last bits",
        GRAPH,
        lambda request: (request.eager_kernels,),
    ),
    TorchPatch(
        aot_graphs.results_in_their_places,
        ("torch._functorch._aot_autograd.graph_capture.create_functionalized_fn",),
        "correctness",
        "a result that is a changed input comes out in another's place",
        GRAPH,
    ),
    TorchPatch(
        aot_graphs.unseen_statistics,
        ("torch._subclasses.functional_tensor.FunctionalTensorMode.__torch_dispatch__",),
        "correctness",
        "eager's batch norm changes its statistics unseen by autograd; traced, a second call refused the backward",
        GRAPH,
    ),
    TorchPatch(
        aot_graphs.tangents_of_any_size,
        ("torch._functorch._aot_autograd.runtime_wrappers.AOTDispatchAutograd.process_runtime_tangent",),
        "correctness",
        "comparing DTensors' gradients makes numbers of symbolic sizes",
        GRAPH,
    ),
    TorchPatch(
        lean_wrappers.lean_runtime,
        ("torch._functorch._aot_autograd.runtime_wrappers.RuntimeWrapper.post_compile",),
        "speed",
        "seventy Python calls around a plain graph, of which it needs few",
        GRAPH,
        lambda request: (request.example_inputs,),
    ),
    # --- a joint graph is cut ---
    TorchPatch(
        partitioner.other_fusible_ops,
        (f"{_PARTITIONERS}.get_default_op_list",),
        "takeover",
        "torch's list of operations that loops hold was made for its own compiler",
        PARTITION,
        lambda request: (request.fusible,),
    ),
    TorchPatch(
        partitioner.minimum_cut_by,
        ("networkx.minimum_cut",),
        "speed",
        "networkx takes most of a large graph's partition",
        PARTITION,
        lambda request: (request.minimum_cut,),
    ),
    TorchPatch(
        quiet_dumps.no_unread_backwards,
        (f"{_PARTITIONERS}.reordering_to_mimic_autograd_engine", "torch.fx.GraphModule.recompile"),
        "speed",
        "the backward's Python text is written three times, and nobody runs it",
        PARTITION,
    ),
    TorchPatch(
        partitioner.regions_without_inductor,
        (f"{_PARTITIONERS}.fx_graph_cse",),
        "speed",
        "two helpers of a few lines import all of inductor",
        PARTITION,
    ),
    TorchPatch(
        random_numbers.states_of_what_draws,
        (f"{_PARTITIONERS}.functionalize_rng_ops",),
        "speed",
        "attention without dropout draws nothing, and hides in an operator on functions",
        PARTITION,
    ),
    TorchPatch(
        random_numbers.one_draw_each,
        (f"{_PARTITIONERS}.choose_saved_values_set", f"{_PARTITIONERS}.fx_graph_cse"),
        "correctness",
        "with a memory budget the backward draws other random numbers, and two equal calls that draw become one",
        ("graph", "partition"),  # bodies of conditions and loops are cut while their graph is traced
    ),
    TorchPatch(
        partitioner.saved_values_chosen_by,
        (f"{_PARTITIONERS}.choose_saved_values_set",),
        "takeover",
        "under a memory budget dcompile chooses what is saved, by the peak of the step",
        PARTITION,
        lambda request: (request.choose_saved,),
    ),
    *ON_DEMAND,
)


@contextlib.contextmanager
def patched(stage: Stage, request: PatchRequest) -> Iterator[None]:
    """Enter the patches of a stage that this torch needs, in order."""
    version = installed_version()
    with contextlib.ExitStack() as entered:
        for patch in PATCHES:
            if stage in patch.stages and patch.applies_to(version):
                entered.enter_context(patch.apply(*patch.given(request)))
        yield


def find_target(dotted: str) -> Any:
    """Return the object of a dotted name. Raises ImportError or AttributeError if this torch lacks it."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[count:], found)
    raise ModuleNotFoundError(f"No module named {parts[0]!r}", name=parts[0])


def status_of(patch: TorchPatch) -> str:
    """Whether a patch applies to the installed torch, and why not."""
    major, minor = version = installed_version()
    if not patch.applies_to(version):
        return f"not needed by torch {major}.{minor}"
    missing = []
    for target in patch.targets:
        try:
            find_target(target)
        except (ImportError, AttributeError):
            missing.append(target)
    return f"does nothing: there is no {', '.join(missing)}" if missing else "applies"


def describe(gains: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield lines for each patch, with whether it applies to the installed torch. `gains`: share of time, by case."""
    yield f"torch {torch_version()}: {len(PATCHES)} patches"
    for patch in PATCHES:
        yield ""
        yield f"{patch.name}: {status_of(patch)}"
        yield f"  replaces  {', '.join(patch.targets)}"
        yield f"  reason    {patch.kind}: {patch.reason}"
        yield f"  versions  torch {patch.versions}"
        yield f"  undone    {patch.undone}"
        if found := gains.get(patch.name):
            yield "  gains     " + ", ".join(f"{case}: {gain:.1%}" for case, gain in found.items())
