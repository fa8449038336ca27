"""Every patch of torch, and of what torch calls: what it changes, why, for which versions, and how it is undone.

Patches with stages are entered by `patched` around that stage, in the order of this list. The others are entered, or
made once, by the module that needs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dcompile.compat import absent_ranks, alone, aot_bundle, aot_trace, dispatch_watch, groups, guards, sizes, zero
from dcompile.compat.layer_calls.watched_tracing import watched_tracing
from dcompile.compat.patches import (
    batch_norm_statistics,
    compile_call,
    cse,
    dynamo_metrics,
    gpu_capability,
    grouped_experts,
    index_strides,
    lean_wrappers,
    mutated_input_order,
    optimizer_breaks,
    packed_sequences,
    partitioner,
    quick_reads,
    quiet_dumps,
    repeated_layers,
    rng_under_checkpoint,
    saved_functions,
    scalar_writes,
    symbolic_arithmetic,
    symbolic_tangents,
    symbolic_views,
    sync_batch_norm,
    tangent_strides,
    traced_gathers,
)
from dcompile.compat.patches.torch_patch import PatchRequest, Stage, TorchPatch, installed_version

FRAME: tuple[Stage, ...] = ("frame",)
GRAPH: tuple[Stage, ...] = ("graph",)
BOTH: tuple[Stage, ...] = ("frame", "graph")
PARTITION: tuple[Stage, ...] = ("partition",)
_FAKE_OPS = "torch._subclasses.fake_impls.op_implementations_dict"
_GUARDS = "torch._dynamo.guards.GuardBuilder"
_PARTITIONERS = "torch._functorch.partitioners"
_GRAPH_COMPILE = "torch._functorch._aot_autograd.graph_compile"
_TRACERS = (f"{_GRAPH_COMPILE}.aot_dispatch_autograd_graph", f"{_GRAPH_COMPILE}.aot_dispatch_base_graph")

PATCHES: tuple[TorchPatch, ...] = (
    # --- Dynamo compiles a frame ---
    TorchPatch(
        dynamo_metrics.quiet_metrics,
        ("torch._dynamo.utils._scrubbed_inductor_config_for_logging",),
        "correctness",
        "metrics of torch 2.11 fail to write functions among settings; those of inductor say nothing of our frames",
        FRAME,
    ),
    TorchPatch(
        sync_batch_norm.traced_sync_batch_norm,
        ("torch._dynamo.variables.misc.AutogradFunctionVariable.call_apply",),
        "takeover",
        "SyncBatchNorm's collectives become steps of the program",
        FRAME,
        lambda request: (request.sync_batch_norm,),
    ),
    TorchPatch(
        grouped_experts.experts_grouped,
        ("torch._dynamo.variables.functions.UserMethodVariable.call_function",),
        "takeover",
        "a loop over experts runs as often as experts are hit, which no graph can",
        FRAME,
        lambda request: (request.group_experts,),
    ),
    TorchPatch(
        guards.short_guard_of_hooks,
        (f"{_GUARDS}.AUTOGRAD_SAVED_TENSORS_HOOKS",),
        "speed",
        "the guard on hooks of saved tensors asks for all of them at each call",
        FRAME,
        lambda request: (request.told_of_hooks,),
    ),
    TorchPatch(
        guards.remembered_lines,
        ("torch._dynamo.guards.format_frame",),
        "speed",
        "each guard looks up the line of the model that it comes from, for the reason of a recompilation",
        FRAME,
    ),
    TorchPatch(
        guards.guard_methods,
        ("torch._dynamo.symbolic_convert.InliningInstructionTranslator.inline_call",),
        "correctness",
        "kernel libraries put another method in a class, of which Dynamo asks nothing",
        FRAME,
    ),
    TorchPatch(
        scalar_writes.writes_to_scalars_kept,
        ("torch._dynamo.output_graph.OutputGraph.remove_tensorify_specialized_graphargs",),
        "correctness",
        "in-place writes to float64 scalars are taken out of the graph with any backend",
        FRAME,
    ),
    TorchPatch(
        packed_sequences.packed_sequences_apart,
        ("torch._dynamo.trace_rules._disallowed_callable_ids",),
        "correctness",
        "tracing how a packed sequence is padded fails",
        FRAME,
        last=(2, 11),
    ),
    TorchPatch(
        optimizer_breaks.optimizers_whole,
        ("torch._dynamo.variables.functions.SkipFunctionVariable.call_function",),
        "speed",
        "graph breaks around an optimizer's step make three frames of it, two with guards on each tensor",
        FRAME,
    ),
    TorchPatch(
        traced_gathers.reordered_gathers_traced,
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
        quiet_dumps.no_unread_code,
        ("torch._dynamo.output_graph.dynamo_timed",),
        "speed",
        "a captured graph is written as Python for a module that nobody calls",
        FRAME,
    ),
    TorchPatch(
        quick_reads.quick_settings,
        ("torch.utils._config_module.ConfigModule.__getattr__",),
        "speed",
        "each reading of a setting asks seven questions, a twentieth of a frame's time",
        FRAME,
    ),
    TorchPatch(
        quick_reads.compiled_sources,
        ("torch._guards.ChainedSource.get_value",),
        "speed",
        "each guard compiles the expression that leads to its value",
        FRAME,
    ),
    TorchPatch(
        repeated_layers.repeated_layers_once,
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
        symbolic_arithmetic.remembered_arithmetic,
        ("torch.fx.experimental.sym_node.SymNode._mul",),
        "speed",
        "each fake tensor works out anew what its symbolic sizes come to, a quarter of the time that tracing takes",
        BOTH,
    ),
    TorchPatch(
        symbolic_views.views_as_asked,
        (_FAKE_OPS,),
        "speed",
        "views of symbolic sizes guard on each comparison, and come out as longer expressions",
        BOTH,
    ),
    TorchPatch(
        index_strides.strides_of_indices,
        (_FAKE_OPS, "torch._subclasses.fake_tensor.FakeTensorMode._cache_key"),
        "correctness",
        "strides of x[i] follow the index in eager, and are traced without it",
        BOTH,
    ),
    # --- AOTAutograd traces a graph ---
    TorchPatch(
        tangent_strides.tangents_as_results,
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
        rng_under_checkpoint.no_unread_counters,
        ("torch._decomp.decompositions_for_rng.PhiloxStateTracker.reset",),
        "speed",
        "twelve fake tensors for counters of random numbers that nothing reads",
        GRAPH,
    ),
    TorchPatch(
        mutated_input_order.results_in_their_places,
        ("torch._functorch._aot_autograd.graph_capture.create_functionalized_fn",),
        "correctness",
        "a result that is a changed input comes out in another's place",
        GRAPH,
    ),
    TorchPatch(
        batch_norm_statistics.unseen_statistics,
        ("torch._subclasses.functional_tensor.FunctionalTensorMode.__torch_dispatch__",),
        "correctness",
        "eager's batch norm changes its statistics unseen by autograd; traced, a second call refused the backward",
        GRAPH,
    ),
    TorchPatch(
        symbolic_tangents.tangents_of_any_size,
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
        partitioner.more_fusible_ops,
        (f"{_PARTITIONERS}.get_default_op_list",),
        "takeover",
        "torch's list of operations that loops hold was made for its own compiler",
        PARTITION,
        lambda request: (request.fusible, request.recomputable),
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
        cse.regions_without_inductor,
        (f"{_PARTITIONERS}.fx_graph_cse",),
        "speed",
        "two helpers of a few lines import all of inductor",
        PARTITION,
    ),
    TorchPatch(
        rng_under_checkpoint.states_of_what_draws,
        (f"{_PARTITIONERS}.functionalize_rng_ops",),
        "speed",
        "attention without dropout draws nothing, and hides in an operator on functions",
        PARTITION,
    ),
    # --- entered by whoever needs them ---
    TorchPatch(
        guards.collect_finalizers,
        ("torch._dynamo.guards.weakref",),
        "correctness",
        "finalizers of guards keep these alive as long as what they compare",
        undone="when the frame is compiled",
    ),
    TorchPatch(
        guards.guard_tensor_identity,
        (f"{_GUARDS}.TENSOR_MATCH",),
        "takeover",
        "what is compiled with a parameter that is kept in step serves its own module alone",
        undone="when the frame is compiled",
    ),
    TorchPatch(
        watched_tracing,
        (
            "torch._dynamo.variables.functions.invoke_and_store_as_constant",
            "torch.fx.Graph.create_node",
            "torch.fx.Node._rename",
        ),
        "speed",
        "the call of a layer is recorded, for copies of it",
        undone="when the call is traced",
    ),
    TorchPatch(
        aot_trace.recording_metadata,
        (*_TRACERS, f"{_GRAPH_COMPILE}._create_wrappers_for_dispatch"),
        "takeover",
        "what AOTAutograd finds out of a graph is kept for later starts",
        undone="when the graph is compiled",
    ),
    TorchPatch(
        aot_trace.replayed,
        (*_TRACERS, "torch._functorch.aot_autograd.run_functionalized_fw_and_collect_metadata"),
        "speed",
        "a kept trace stands in for tracing, which is half of a warm start",
        undone="when the graph is compiled",
    ),
    TorchPatch(
        saved_functions.unread_gradients_left_out,
        ("torch._dynamo.guards.GuardsStatePickler.reducer_override",),
        "correctness",
        "saved guards on a tensor that had a gradient cannot be loaded",
        last=(2, 14),
        undone="when the function is compiled",
    ),
    TorchPatch(
        saved_functions.globals_saved,
        ("torch._dynamo.convert_frame.GraphCaptureOutput.get_runtime_env",),
        "correctness",
        "saved code names modules by Dynamo's globals, which no other process has",
        undone="when the function is compiled",
    ),
    TorchPatch(
        aot_bundle.recording_programs,
        (
            "torch._functorch._aot_autograd.autograd_cache.autograd_cache_key",
            "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.save",
        ),
        "takeover",
        "a graph that is compiled ahead of time is saved in a file, and neither found in torch's cache nor kept there",
        undone="when the graph is compiled",
    ),
    TorchPatch(
        alone.SingleRankCollectives,
        ("torch.distributed.all_reduce", "torch.distributed.all_gather", "torch.distributed.broadcast"),
        "takeover",
        "a model that is explained alone finds nobody to answer its collectives",
        undone="when explaining ends",
    ),
    TorchPatch(
        absent_ranks.for_all_groups,
        (
            "torch.distributed.init_process_group",
            "torch.distributed.new_group",
            "torch.distributed.rendezvous",
            "torch.distributed.TCPStore",
            "torch.distributed.all_gather_object",
            "torch.distributed.broadcast_object_list",
            "torch.distributed.barrier",
            "torch.nn.parallel.DistributedDataParallel._ddp_init_helper",
        ),
        "takeover",
        "a job that is precompiled finds no other ranks to meet, and none that could tell it something",
        undone="when precompiling ends",
    ),
    TorchPatch(
        absent_ranks.without_data,
        (
            "torch.distributed.device_mesh.init_device_mesh",
            "torch.distributed.device_mesh.DeviceMesh.__init__",
            "torch.nn.parallel.distributed._verify_param_shape_across_processes",
            "torch.nn.parallel.distributed._sync_module_states",
            "torch.optim.adam._get_value",
            "torch.utils.swap_tensors",
            "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty",
        ),
        "correctness",
        "wrappers, meshes and optimizers read memory, which tensors of a precompiled job do not have",
        undone="when precompiling ends",
    ),
    TorchPatch(
        zero.stock_linear,
        ("torch.nn.functional.linear",),
        "correctness",
        "ZeRO 3's own linear has no gradients where it is traced",
        undone="when the frame is compiled",
    ),
    TorchPatch(
        compile_call.intercept_compile,
        ("torch._dynamo.eval_frame._TorchDynamoContext.__call__",),
        "takeover",
        "torch.compile(model, backend='dcompile') is a door, and must see whole modules",
        undone="never; other backends go torch's way",
    ),
    TorchPatch(
        guards.hooks_behind_guards,
        ("torch._C._dynamo.eval_frame.set_guard_complete_hook",),
        "correctness",
        "guards that are asked without Dynamo would leave other ranks alone in its collective",
        undone="never; it calls torch's own",
    ),
    TorchPatch(
        groups.hear_of_destroyed_groups,
        ("torch.distributed.destroy_process_group",),
        "correctness",
        "CUDA graphs hold communicators, which must not be destroyed before them",
        undone="never; it calls torch's own",
    ),
    TorchPatch(
        gpu_capability.gpu_capability_as,
        ("torch.cuda.get_device_capability",),
        "takeover",
        "an export for a GPU that is not in this machine compiles for its compute capability",
        undone="when the export ends",
    ),
    TorchPatch(
        dispatch_watch.watch_tensor_texts,
        ("torch._tensor_str._str",),
        "correctness",
        "printing a parameter that has no memory while a graph gathers it would read what is not there",
        undone="never; other tensors print as ever",
    ),
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
