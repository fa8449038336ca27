"""All settings, each defined once: default, help, environment variable, whether it is in the cache key."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dcompile.errors import OptionError, suggestion
from dcompile.kernel_backends.names import REPLAYED, KernelBackend, find_backend

TRUTH_VALUES = ("0", "1", "false", "true", "")
"""Texts of truth values, in lower case."""


def setting(default: Any, text: str, *, in_key: bool = True, option: str = "") -> Any:
    """Define a field of `Config`: default, help, whether kernels depend on it, and an option's name that has a dot."""
    return dataclasses.field(default=default, metadata={"help": text, "in_key": in_key, "option": option})


def variable_name(name: str) -> str:
    """Environment variable of a field."""
    return f"DCOMPILE_{name.upper()}"


def option_name(f: dataclasses.Field[Any]) -> str:
    """Name of a field in options={...}; some of torch's have a dot."""
    return str(f.metadata["option"] or f.name)


def check_type(name: str, hint: Any, value: Any) -> Any:
    """Return `value` converted to the field's type; strings are parsed as from the environment.

    Raises OptionError.
    """
    if typing.get_origin(hint) in (Literal, types.UnionType):
        if value not in typing.get_args(hint):
            near = suggestion(str(value), map(str, typing.get_args(hint)), "valid values")
            raise OptionError(f"dcompile: unknown value {name}={value!r}{near}")
        return value
    if hint is bool and isinstance(value, str):
        if value.lower() not in TRUTH_VALUES:
            raise OptionError(f"dcompile: {name}={value!r} is not a truth value (use 0 or 1)")
        return value.lower() in ("1", "true")
    if hint is float:
        return _fraction(name, value)
    if hint is int and isinstance(value, str) and value.lstrip("-").isdigit():
        value = int(value)
    if not isinstance(value, hint):
        raise OptionError(f"dcompile: {name}={value!r} should be {hint.__name__}, not {type(value).__name__}")
    return value


def _fraction(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = -1.0
    if isinstance(value, bool) or not 0 <= found <= 1:
        raise OptionError(f"dcompile: {name}={value!r} should be a number from 0 to 1")
    return found


def chunk_count(value: Any) -> int | str:
    """A number of chunks of a loss, or `auto`. Raises OptionError."""
    if value == "auto":
        return "auto"
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0 or number == 1:
        raise OptionError(
            f"dcompile: chunked_loss={number!r} should be 'auto', or a number of parts, at least 2, or 0 for none"
        )
    return number


AUTO = "auto"
"""The `memory_budget` that is found out when the first step begins."""
_UNITS = {"b": 1, "gib": 1 << 30, "mib": 1 << 20, "gb": 10**9, "mb": 10**6}


def memory_budget_bytes(given: str, total: int) -> int:
    """Bytes of a `memory_budget` on a device with `total` bytes; 0 for none, and for `auto`. Raises OptionError."""
    if given in ("", AUTO):
        return 0
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", given)
    unit = found[2].lower() if found else ""
    try:
        number = float(found[1]) if found else -1.0
    except ValueError:
        number = -1.0
    if (unit in _UNITS and number > 0) or (not unit and 0 < number <= 1):
        return int(number * _UNITS.get(unit, total))
    raise OptionError(
        f"dcompile: memory_budget={given!r} should be such as '70GiB', a part of the device from 0 to 1, or 'auto'"
    )


def size_bounds(value: Any) -> str:
    """Bounds of size classes, as text in one form. Raises OptionError unless they are sizes."""
    if value is None or value in ("", "auto"):
        return value or ""
    words = value.split(",") if isinstance(value, str) else value
    words = list(words) if isinstance(words, Iterable) else [words]
    if any(isinstance(word, bool) or not str(word).strip().isdigit() or int(word) < 2 for word in words) or not words:
        raise OptionError(
            f"dcompile: size_classes={value!r} should be sizes of at least 2, such as [512, 1024, 2048], or 'auto'"
        )
    return ",".join(map(str, sorted({int(word) for word in words})))


CHANNELS = ("passes", "overlap", "kernels", "memory")
"""Channels of option `log`: the loggers `dcompile.passes` and so on. `all` is also accepted: log on every rank."""

LEVELS: Mapping[str, int] = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
"""Levels of a channel in `log`."""


@dataclass(frozen=True, slots=True)
class LogSetting:
    """Parsed option `log`: the level of each named channel, and whether every rank logs."""

    levels: Mapping[str, int]
    every_rank: bool


@functools.cache
def parse_log(text: str) -> LogSetting:
    """Parse `passes=INFO,overlap,all`. Raises OptionError for an unknown channel or level."""
    levels: dict[str, int] = {}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        channel, has_level, level = (part.strip() for part in word.partition("="))
        if channel not in CHANNELS and word != "all":
            known = (*CHANNELS, "all")
            raise OptionError(f"dcompile: unknown log channel {word!r}{suggestion(channel, known, 'channels')}")
        if has_level and level.upper() not in LEVELS:
            near = suggestion(level.upper(), LEVELS, "levels")
            raise OptionError(f"dcompile: unknown log level {level!r} in {word!r}{near}")
        if word != "all":
            levels[channel] = LEVELS[level.upper()] if has_level else logging.DEBUG
    return LogSetting(levels, "all" in words)


_REASONS: Mapping[str, str] = {
    "kernels are cached by dcompile, as options cache_dir and share_artifacts say": """
        autotune_local_cache autotune_remote_cache bundle_triton_into_fx_graph_cache bundled_autotune_remote_cache
        enable_caching_generated_triton_templates file_lock_timeout force_disable_caches fx_graph_cache
        fx_graph_remote_cache global_cache_dir non_blocking_remote_cache_write remote_gemm_autotune_cache
        search_autotune_cache
    """,
    "option max_autotune measures cuBLASLt's algorithms, and nothing else is measured": """
        autotune_fallback_to_aten autotune_in_subproc autotune_lookup_table autotune_multi_device
        autotune_num_choices_displayed benchmark_combo_kernel benchmark_epilogue_fusion benchmark_fusion
        benchmark_harness benchmark_kernel coordinate_descent_check_all_directions coordinate_descent_search_radius
        cutedsl_enable_autotuning distributed_max_autotune_gemm incremental_autotune inductor_default_autotune_rep
        inductor_default_autotune_warmup max_autotune_allow_flexible_layouts max_autotune_conv_backends
        max_autotune_conv_bwd_input_backends max_autotune_conv_bwd_weight_backends max_autotune_flex_search_space
        max_autotune_gemm max_autotune_gemm_backends max_autotune_gemm_search_space max_autotune_pointwise
        max_autotune_prune_choices_based_on_shared_mem max_autotune_report_choices_stats
        max_autotune_subproc_graceful_timeout_seconds max_autotune_subproc_result_timeout_seconds
        max_autotune_subproc_terminate_timeout_seconds max_epilogue_benchmarked_choices multi_kernel_hints
        pipeline_max_autotune_gemm triton.autotune_at_compile_time triton.autotune_cublasLt triton.autotune_pointwise
        triton.autotune_with_sample_inputs triton.enable_persistent_tma_matmul triton.multi_kernel
        use_experimental_benchmarker
    """,
    "options log and dump show what dcompile does; DCOMPILE_DUMP writes programs and kernels": """
        comment_origin cpp.descriptive_names cpp.enable_kernel_profile debug debug_fusion debug_ir_traceback
        developer_warnings disable_progress enabled_metric_tables log_tlparse profile_bandwidth
        profile_bandwidth_output profile_bandwidth_regex profiler_mark_wrapper_call reorder_for_peak_memory_debug
        trace.compile_profile trace.debug_dir trace.debug_log trace.dot_graph_shape trace.draw_orig_fx_graph
        trace.fx_graph trace.fx_graph_transformed trace.graph_diagram_format trace.info_log trace.ir_post_fusion
        trace.ir_pre_fusion trace.log_autotuning_results trace.output_code trace.provenance_tracking_level
        triton.descriptive_names triton.store_cubin triton.unique_kernel_names triton.unique_user_kernel_names
        verbose_progress warn_mix_layout
    """,
    "guards check sizes and strides, and kernels check indices": """
        alignment_asserts assert_indirect_indexing debug_index_asserts do_not_emit_runtime_assertions scalar_asserts
        size_asserts triton.fast_path_cudagraph_asserts triton.slow_path_cudagraph_asserts
    """,
    "a cost model decides what is fused, in which order it runs, and how loops are tiled": """
        aggressive_fusion b2b_gemm_pass batch_fusion combo_kernel_allow_mixed_sizes
        combo_kernel_foreach_dynamic_shapes combo_kernel_max_num_args combo_kernels combo_kernels_autotune
        constant_and_index_propagation delay_realize_cheap_outputs epilogue_fusion_first
        epilogue_fusion_with_atomic_add force_pointwise_cat group_fusion inplace_buffers loop_index_inversion_in_fusion
        loop_ordering_after_fusion loop_reindexing_after_fusion max_fusion_buffer_group_pairwise_attempts
        max_fusion_size max_fusion_unique_io_buffers max_pointwise_cat_inputs memory_planning memory_pool min_num_split
        online_softmax optimize_scatter_upon_const_tensor pattern_matcher permute_fusion pick_loop_orders
        post_grad_fusion_options pre_grad_fusion_options prologue_fusion realize_acc_reads_size_threshold
        realize_acc_reads_threshold realize_opcount_threshold realize_reads_threshold reorder_for_locality
        score_fusion_memory_threshold size_threshold_for_succ_based_strategy small_memory_access_threshold
        split_cat_fx_passes split_reductions triton.coalesce_tiling_analysis triton.cooperative_reductions
        triton.dense_indexing triton.divisible_by_16 triton.force_cooperative_reductions triton.max_tiles
        triton.min_split_scan_rblock triton.mix_order_reduction triton.persistent_reductions triton.prefer_nd_tiling
        triton.skip_l1_cache triton.spill_threshold triton.tile_reductions triton.tiling_prevents_pointwise_fusion
        triton.tiling_prevents_reduction_fusion triton.use_block_ptr unroll_reductions_threshold
    """,
    "layouts and padding follow from the model and option shape_padding": """
        comprehensive_padding conv_1x1_as_mm disable_padding_cpu force_layout_optimization force_shape_pad
        inplace_padding layout_opt_default layout_optimization pad_channels_last pad_dynamic_shapes
        padding_alignment_bytes padding_stride_threshold
    """,
    "compilers run in threads of the process, under option compile_timeout_s": """
        compile_threads compile_worker_wait_timeout precompilation_timeout_seconds quiesce_async_compile_pool
        quiesce_async_compile_time worker_log_path worker_start_method worker_suppress_logging
    """,
    "vector width, tiles and threads of C++ kernels follow from the processor and the program": """
        cpp.dynamic_threads cpp.enable_grouped_gemm_template cpp.enable_loop_tail_vec cpp.enable_tiling_heuristics
        cpp.force_inline_kernel cpp.gemm_cache_blocking cpp.gemm_max_k_slices cpp.gemm_thread_factors
        cpp.max_horizontal_fusion_size cpp.min_chunk_size cpp.no_redundant_loops cpp.simdlen cpp.threads
        cpp.weight_prepack cpp_cache_precompile_headers cpp_wrapper
    """,
    "a program is recorded as one CUDA graph, or in pieces around steps that cannot be recorded": """
        graph_partition triton.cudagraph_dynamic_shape_warn_limit triton.cudagraph_skip_dynamic_graphs
        triton.cudagraph_support_input_mutation triton.cudagraph_trees_history_recording
        triton.cudagraph_trees_objgraph triton.cudagraph_unexpected_rerecord_limit triton.force_cudagraph_sync
        triton.force_cudagraphs_warmup triton.skip_cudagraph_warmup
    """,
    "collectives of dcompile are bucketed and placed by its cost model": """
        _fuse_ddp_bucket_size _fuse_ddp_communication _fuse_ddp_communication_passes _micro_pipeline_tp
        bucket_all_gathers_bucket_mode bucket_all_gathers_fx bucket_all_gathers_fx_bucket_size_determinator
        bucket_all_reduces_fx bucket_reduce_scatters_bucket_mode bucket_reduce_scatters_fx
        bucket_reduce_scatters_fx_bucket_size_determinator dedup_reduce_scatters estimate_op_runtime inter_node_bw
        intra_node_bw reorder_for_compute_comm_overlap_passes reorder_prefetch_limit
    """,
    "block sizes and warps of dcompile's kernels follow from their sizes and are not measured": """
        coordinate_descent_tuning
    """,
    "recordings of a model always share memory, in a tree like torch's": "triton.cudagraph_trees",
    "decompositions follow from `kernels` alone": "selective_decompose",
    "one order is planned for memory and overlap together": "reorder_for_peak_memory",
    "the cost model always places dcompile's collectives so; the model's own keep the places of their waits": """
        reorder_for_compute_comm_overlap
    """,
    "steps between the CUDA graphs of a program stay in its order": "triton.reorder_for_reducing_graph_partitions",
    "option numerics says how values are rounded, by default as in eager mode": """
        emulate_precision_casts emulate_precision_casts_on_saved_tensors eager_numerics.disable_ftz
        eager_numerics.division_rounding eager_numerics.use_pytorch_libdevice use_fast_math
    """,
    "inductor's passes do not run": "use_pre_grad_passes use_joint_graph_passes use_post_grad_passes",
    "operations whose results are not used are always removed": "use_dce",
    "a buffer's memory is always used again after its last reader": "allow_buffer_reuse",
    "selective checkpoints choose among the operators of the traced graph": "wrap_inductor_compiled_regions",
    "launching is the host program's": "use_fast_triton_launcher use_launch_metadata_schema use_static_cuda_launcher",
}

REASON_OF: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Option -> why it has no effect here."""

USUAL: Mapping[str, bool] = {
    "coordinate_descent_tuning": False, "triton.cudagraph_trees": True, "selective_decompose": False,
    "reorder_for_peak_memory": True, "reorder_for_compute_comm_overlap": False,
    "triton.reorder_for_reducing_graph_partitions": True, "use_pre_grad_passes": True, "use_joint_graph_passes": True,
    "use_post_grad_passes": True, "use_dce": True, "allow_buffer_reuse": True,
}  # fmt: skip
"""Default values of those that modes of torch.compile list: the receipt says nothing of them."""


DUMP_DIRECTORY = "dcompile_dump"
"""Directory of a dump that names none, relative to the working directory."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "lite": {"kernels": "aten"},
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}
"""Modes of torch.compile, and the options that each sets."""

BITWISE: Mapping[str, Any] = {
    "kernels": "aten", "matmul": "aten", "chunked_loss": 0, "shape_padding": False, "fallback_random": True,
    "autocast_experts": False, "all_reduces": "collective",
}  # fmt: skip
"""Options that `numerics="bitwise"` sets: whatever else they may be changes some bit of a result."""

_NUMERICS: Mapping[str, str] = {"strict": "bitwise", "default": "eager"}
"""Values of TorchInductor's option `numerics` -> ours."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. Each is an option of `dcompile.compile` and an environment variable, `DCOMPILE_` and its name."""

    kernels: str | KernelBackend = setting(  # noqa: RUF009  a frozen value, as all others
        "auto",
        "Compiler of the kernels between collectives. auto: dcompile; aten: ATen's kernels, for debugging "
        "communication; cudagraphs: ATen's, replayed as CUDA graphs; inductor, onnxruntime, openvino, tensorrt, tvm, "
        "ipex, openxla, or another backend that torch knows: that compiler. Or a callable with their signature, "
        "`fn(gm, example_inputs)`.",
    )
    matmul: Literal["auto", "aten", "own"] = setting(
        "auto",
        "Kernel for float32 matmul and attention on CPU, and for products of one row, in 16 bits of up to 16 rows, on "
        "GPU. own: dcompile's; aten: ATen's; auto: dcompile's on GPU, and on CPUs whose BLAS does not use AVX-512 "
        "(AMD).",
    )
    numerics: Literal["bitwise", "eager", "fast"] = setting(
        "eager",
        "What results promise. bitwise: stock's bits, by ATen's kernels in dcompile's schedule; eager: each operation "
        "rounds as in eager mode, but sums may be in another order and functions differ in their last places; fast: "
        "kernels keep 16-bit values in float32 between operations. TorchInductor's `strict` is bitwise.",
    )
    activation_memory_budget: float = setting(
        1.0,
        "Part of the activations that the backward may keep, 0 to 1; the others are recomputed. 1 keeps those that "
        "save time.",
    )
    memory_budget: str = setting(
        "",
        "Peak of the memory that a training step allocates on a device: GiB ('70GiB'), a part of the device (0.8), or "
        "auto, what is free when the first step begins, less a margin. The backward then recomputes only what this "
        "requires, also where the model checkpoints activations. Empty: no budget, checkpoints as the model has them.",
        in_key=False,  # kernels depend on the graphs that it leads to
    )
    recompute: Literal["registers", "memory"] = setting(
        "registers",
        "Pointwise operations of the forward that the backward recomputes instead of keeping their results. registers: "
        "those inside its kernels; memory: also those that it must write for library calls, such as matmul operands.",
    )
    chunked_loss: int | str = setting(
        "auto",
        "`cross_entropy` of a linear layer's result without its logits as a whole. auto: where the cost model says "
        "that this saves memory for little time, in chunks of rows, whose gradients the forward computes. A number, at "
        "least 2: in this many chunks of classes, which the backward recomputes. 0: never. Losses differ by rounding.",
    )
    autocast_experts: bool = setting(
        False,
        "Under autocast, multiply Hugging Face's experts in autocast's dtype, like linear layers. Eager multiplies "
        "them in their weights' dtype: with float32 weights, several times slower on a GPU.",
    )
    overlap_mb: int = setting(
        -1,
        "MiB that early all-gathers and late waits for reductions may add to a graph's peak memory. -1: the memory of "
        "the largest all-gather and the largest reduce-scatter.",
    )
    figures: Literal["table", "measured"] = setting(
        "table",
        "Source of the cost model's machine figures. table: by kind of GPU; measured: by "
        "`python -m dcompile.calibrate` on rank 0.",
        in_key=False,  # the figures themselves are in the key
    )
    gathers: Literal["auto", "collective"] = setting(
        "auto",
        "How sharded parameters are gathered on GPUs. auto: copy-engine all-gathers where a group's ranks can map each "
        "other's memory, as on one machine, which takes no multiprocessors; elsewhere collectives. collective: always "
        "collectives.",
        in_key=False,  # the ranks' agreement is in the key
    )
    all_reduces: Literal["auto", "collective"] = setting(
        "auto",
        "How small all-reduces of the model's own, as in tensor parallelism, run on GPUs. auto: as one kernel, where a "
        "group's ranks can map each other's memory; elsewhere, and with collective, by the group's own collective.",
    )
    shard_copies: Literal["auto", "kept", "gather"] = setting(
        "auto",
        "Memory of shards converted to the compute dtype, under mixed precision. kept: a permanent buffer, from which "
        "other ranks may copy; gather: new memory for each all-gather. auto: kept, unless it takes a sixteenth of a "
        "GPU's memory, recompute is memory, or the model checkpoints activations.",
        in_key=False,  # the ranks' agreement is in the key
    )
    distributed: Literal["auto", "stock"] = setting("auto", "stock: communication is left to DDP and FSDP.")
    zero: Literal["off", "graph"] = setting(
        "off",
        "ZeRO's collectives of a DeepSpeed engine, stages 0 to 3. graph: part of the compiled graph where possible; "
        "off: left to DeepSpeed.",
    )
    promote: bool = setting(
        True,
        "Compile an FSDP2 root as one program where its blocks were compiled each by itself and alike, so that gathers "
        "of one block run beside the block before. Off: each block is a program.",
        in_key=False,  # the graphs differ
    )
    layers_once: bool = setting(
        True,
        "Trace a few of several equal layers, and copy the result for the others. Off: trace each layer.",
        in_key=False,  # the graph is the same
    )
    trace_cache: bool = setting(
        True,
        "Keep what AOTAutograd traces in the kernel cache, so that a later start runs Dynamo alone. Off, each start "
        "traces anew.",
        in_key=False,
    )
    late_sizes: bool = setting(
        True,
        "Capture operations with data-dependent result sizes (`nonzero`, masks), where torch.compile breaks the graph "
        "by default. Off with CUDA graphs.",
        in_key=False,  # the graph differs
    )
    size_classes: str = setting(
        "",
        "For batches of many lengths: the largest size of each class, as a list or `'512,1024,2048'`, or `auto` for "
        "powers of two. Sizes of inputs are then symbols from the first call on, so that no other size compiles, on "
        "any rank; and with `triton.cudagraphs` each class has one CUDA graph.",
    )
    fallback_random: bool = setting(
        False, "Draw every random number as eager does, bit for bit; dropout masks are then saved for the backward."
    )
    in_place: bool = setting(
        False,
        "With `torch.compile(module, backend='dcompile')`: compile the module in place and return it, as "
        "`dcompile.compile` does, so that names in its `state_dict` stay as they are.",
        in_key=False,
    )
    receipt: bool = setting(True, "Print the receipt on rank 0 after the first compiled step.", in_key=False)
    progress: bool = setting(
        True,
        "While a step is compiled for more than five seconds, show in a terminal what is done: a line on rank 0 that "
        "goes away. It needs tqdm, and option `receipt`.",
        in_key=False,
    )
    log: str = setting(
        "",
        "Log channels with their levels, comma-separated: `passes=INFO,overlap`. Channels: passes, overlap, kernels, "
        "memory. A bare name means DEBUG. With `all` among them, every rank logs, otherwise rank 0 alone.",
        in_key=False,
    )
    dump: str = setting(
        "",
        "Directory for programs, kernels and the receipt; a second model gets a folder in it. True or 1: "
        "`dcompile_dump`.",
        in_key=False,
    )
    trace_enabled: bool = setting(
        False,
        "Write a dump, as `dump=True` does, unless `dump` names a directory.",
        in_key=False,
        option="trace.enabled",
    )
    trace_graph_diagram: bool = setting(
        False,
        "Add a picture of each graph after fusion to the dump: graph_diagram.dot, and .svg if Graphviz is installed.",
        in_key=False,
        option="trace.graph_diagram",
    )
    verify: bool = setting(False, "Verify after each pass; compare collective order across ranks.", in_key=False)
    sentinel: int = setting(
        0,
        "Check one call of each program in so many of its calls by ATen's kernels, while the job runs. 0: none.",
        in_key=False,
    )
    on_miss: Literal["aten", "stop"] = setting(
        "aten",
        "What follows if the sentinel finds a wrong result. aten: the program runs on ATen's kernels from then on, on "
        "all ranks; stop: WrongResultError on all ranks.",
        in_key=False,
    )
    skip: str = setting("", "Passes to skip, comma-separated.")
    until: str = setting("", "Stop after this pass.")
    cache_dir: str = setting("", "Kernel cache; default: dcompile under XDG_CACHE_HOME or ~/.cache.", in_key=False)
    cache_size_gib: int = setting(
        20,
        "Size in GiB above which the kernel cache evicts its least recently used files, once a day. 0: no limit.",
        in_key=False,
    )
    precompiled: str = setting(
        "",
        "Folder that `dcompile.precompile` has filled: read where the kernel cache lacks something, never written to. "
        "All ranks may share it, and it may belong to root.",
        in_key=False,
    )
    share_artifacts: bool = setting(
        True,
        "Compile each graph on the first rank that reaches it, and send the code to its process group through the "
        "job's store. Off: each rank compiles what its cache lacks.",
        in_key=False,
    )
    compile_timeout_s: int = setting(300, "Longest time of one compiler process, in seconds.", in_key=False)
    epilogue_fusion: bool = setting(
        True,
        "With max_autotune: fuse pointwise kernels into dcompile's 16-bit matmuls on GPUs as epilogues, where that is "
        "measured to be faster than the library's matmul and a separate kernel.",
    )
    max_autotune: bool = setting(
        False,
        "Measure cuBLASLt's algorithms for each large 16-bit matmul on a GPU, two seconds each, and use the fastest "
        "one if it beats ATen's choice. For products of 2 to 16 rows, measure tiles of dcompile's kernels, and the "
        "library.",
    )
    shape_padding: bool = setting(
        True,
        "Pad large 16-bit matrices on GPUs with zeros if their rows are not multiples of 16 bytes: their matmuls take "
        "half the time or less. Off: matrices keep their sizes.",
    )
    triton_cudagraphs: bool = setting(
        False,
        "Replay programs on GPUs as CUDA graphs.",
        in_key=False,
        option="triton.cudagraphs",
    )
    fallback_by_default: bool = setting(
        False, "Leave every kernel to ATen, as `kernels='aten'` does, unless `kernels` says otherwise.", in_key=False
    )
    ignored: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), compare=False)
    """Options of TorchInductor that were given but have no effect, with their values; not an option itself."""

    @classmethod
    def make(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Config:
        """Combine defaults, environment, mode and options, in this order. Raises OptionError."""
        if mode is not None and options:
            raise OptionError("dcompile: give either mode or options, not both (a mode is a set of options)")
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"dcompile: options must be a dict, not {type(options).__name__}")
        options = {str(name).replace("-", "_"): value for name, value in (options or {}).items()}
        usual = {name for name, value in USUAL.items() if options.get(name) == value}
        ignored = tuple((name, value) for name, value in options.items() if name in REASON_OF and name not in usual)
        chosen = {_field_of(name): value for name, value in options.items() if name not in REASON_OF}
        mode = chosen.pop("mode", mode) or "default"
        if mode not in MODES:
            raise OptionError(f"dcompile: unknown mode {mode!r}{suggestion(str(mode), MODES, 'valid modes')}")
        values = {**_from_environment(), **{_field_of(name): value for name, value in MODES[mode].items()}, **chosen}
        config = cls(**{name: _checked(name, value) for name, value in values.items()}, ignored=ignored)
        if config.fallback_by_default and "kernels" not in chosen:
            config = dataclasses.replace(config, kernels="aten")
        if config.kernels == REPLAYED:
            config = dataclasses.replace(config, kernels="aten", triton_cudagraphs=True)
        if config.numerics == "bitwise":
            config = config._with_stock_bits(values)
        if config.memory_budget and config.activation_memory_budget < 1:
            raise OptionError("dcompile: give either memory_budget or activation_memory_budget, not both")
        if (config.trace_enabled or config.trace_graph_diagram) and not config.dump:
            return dataclasses.replace(config, dump=DUMP_DIRECTORY)
        return config

    def _with_stock_bits(self, given: Mapping[str, Any]) -> Config:
        """Return the settings of `numerics="bitwise"`. Raises OptionError if one was given that changes bits."""
        for name, value in BITWISE.items():
            if name in given and getattr(self, name) != value:
                raise OptionError(
                    f"dcompile: numerics='bitwise' needs {name}={value!r}, but {name}={getattr(self, name)!r} was "
                    "given; leave one of the two out"
                )
        return dataclasses.replace(self, **BITWISE)

    @property
    def own_kernels(self) -> bool:
        """Whether kernels are dcompile's own where possible."""
        return self.kernels == "auto"

    @property
    def backend(self) -> KernelBackend | None:
        """Other compiler for regions, or None."""
        return self.kernels if isinstance(self.kernels, KernelBackend) else None

    @property
    def size_bounds(self) -> tuple[int, ...] | None:
        """The largest size of each class, ascending; none for powers of two; None without classes."""
        if not self.size_classes:
            return None
        return () if self.size_classes == "auto" else tuple(map(int, self.size_classes.split(",")))

    def idle(self) -> tuple[str, ...]:
        """A line for each option without effect, with the reason, and for misspelt environment variables."""
        ignored = (f"option {name}={value} has no effect: {REASON_OF[name]}" for name, value in self.ignored)
        ours = [variable_name(name) for name in _fields()]
        others = sorted(set(os.environ).difference(ours))
        variables = (
            f"environment variable {name} has no effect: there is no such setting{suggestion(name, ours)}"
            for name in others
            if name.startswith("DCOMPILE_")
        )
        return (*ignored, *variables)

    def key(self) -> str:
        """Text of all settings that generated code depends on, one a line."""
        return "\n".join(f"{name}={getattr(self, name)}" for name, f in _fields().items() if f.metadata["in_key"])


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(Config) if f.metadata}


@functools.cache
def _types() -> dict[str, Any]:
    """Types of the fields. Evaluating them runs 80 pieces of Python."""
    return typing.get_type_hints(Config)


def _field_of(option: Any) -> str:
    """Field of an option, with dashes read as underscores, as torch does. Raises OptionError."""
    names = {option_name(f): name for name, f in _fields().items()} | {"mode": "mode"}
    spelt = str(option).replace("-", "_")
    if spelt in names:
        return names[spelt]
    raise OptionError(f"dcompile: unknown option {option!r}{suggestion(spelt, option_names(), 'valid options')}")


def _from_environment() -> dict[str, str]:
    names = {variable_name(name): name for name in _fields()}
    return {names[variable]: value for variable, value in os.environ.items() if variable in names}


def _checked(name: str, value: Any) -> Any:
    """`value` as the type that the field declares, and what the field demands beyond that."""
    if name == "kernels":
        return find_backend(value)
    if name == "chunked_loss":
        return chunk_count(value)
    if name == "numerics":
        value = _NUMERICS.get(value, value)
    if name == "size_classes":
        return size_bounds(value)
    if name == "memory_budget":
        memory_budget_bytes(value := str(value), 1 << 40)
    if name == "dump" and (isinstance(value, bool) or str(value).lower() in TRUTH_VALUES):
        value = DUMP_DIRECTORY if check_type(name, bool, value) else ""
    value = check_type(name, _types()[name], value)
    if name == "sentinel" and value < 0:
        raise OptionError(f"dcompile: sentinel={value!r} should be a number of calls, or 0 for no checks")
    if name == "cache_size_gib" and value < 0:
        raise OptionError(f"dcompile: {name}={value!r} should be a number of GiB, or 0 for no limit")
    if name == "log":
        parse_log(value)
    return value


def option_types() -> dict[str, tuple[str, Any, str]]:
    """Field of `Config` -> its name in options={...}, its type, and its help, for front ends."""
    return {name: (option_name(f), _types()[name], f.metadata["help"]) for name, f in _fields().items()}


def option_names() -> list[str]:
    """Names accepted in options={...}."""
    return ["mode", *map(option_name, _fields().values())]


def describe() -> list[tuple[str, str, str, str]]:
    """(option, environment variable, default, help) of every setting, for the docs' table."""
    return [(option_name(f), variable_name(name), repr(f.default), f.metadata["help"]) for name, f in _fields().items()]
