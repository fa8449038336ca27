"""Options of TorchInductor that have no effect here, with reasons: an existing `torch.compile` call needs no change.

The listed options are safe to ignore: they tune speed, compile time or diagnostics of another compiler. Options that
change values, memory that a caller sees, or checks are unknown, and raise errors.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    "a program is recorded as one CUDA graph, or not at all": """
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
    "launching is the host program's": "use_fast_triton_launcher use_launch_metadata_schema use_static_cuda_launcher",
}

REASON_OF: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Option -> why it has no effect here."""
