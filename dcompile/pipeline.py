"""Every pass of every stage, in order: the table of contents of the compiler.

A row is a pass, its arguments from the request, its condition, and its effect on the order of sums. `driver.py` runs
the loop and launch passes, `capture/passes/run_passes.py` those over FX graphs. `codegen/emit/cpp/kernel.py` runs those
over the nest of a kernel. `DCOMPILE_DUMP` writes the graph or program after each pass, `DCOMPILE_SKIP` skips some, and
`DCOMPILE_UNTIL` stops after one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dcompile import compat
from dcompile.capture.aliasing.input_memory import resize_only_inputs
from dcompile.capture.aliasing.output_views import (
    constant_results_to_separate,
    remove_dtype_views,
    repeated_results,
    results_to_detach,
    results_to_separate,
    saved_in_same_memory,
    saved_input_views,
)
from dcompile.capture.dynamo_backend import (
    check_eager_regions,
    convert_distributed_tensors,
    convert_subclasses,
    flatten_lists,
    leave_gradients_absent,
    run_new_overlaps_eagerly,
    save_in_program,
    view_results_without_gradients,
    wait_for_step,
    watch_replaced_parameters,
)
from dcompile.capture.passes.dynamo.attention_masks import (
    recognize_causal_masks,
    skip_masked_attention,
    specialize_block_sizes,
)
from dcompile.capture.passes.dynamo.chunked_cross_entropy.match import chunk_losses
from dcompile.capture.passes.dynamo.chunked_cross_entropy.op import recompute_loss_chunks
from dcompile.capture.passes.dynamo.decode_attention import decompose_decode_attention
from dcompile.capture.passes.dynamo.grouped_query_attention import use_grouped_query_attention
from dcompile.capture.passes.dynamo.inline_regions import inline_checkpoints, inline_nested_regions
from dcompile.capture.passes.dynamo.loss_gradient_in_forward import compute_loss_gradient_in_forward
from dcompile.capture.passes.dynamo.replaced_layers import group_experts, keep_recurrent_layers_whole
from dcompile.capture.passes.dynamo.unfold_by_slices import view_unfold_by_slices
from dcompile.capture.passes.dynamo.upsampling import gather_upsampling_gradients
from dcompile.capture.passes.joint.broadcast_addends import separate_broadcast_addends
from dcompile.capture.passes.joint.complex_pairs import pair_complex_numbers
from dcompile.capture.passes.joint.gathers import gather_permutation_gradients, narrow_gathers
from dcompile.capture.passes.joint.layouts import keep_rows_contiguous, use_channels_last
from dcompile.capture.passes.joint.padding import pad_groups, pad_matmuls
from dcompile.capture.passes.joint.rng_keys import assign_rng_keys
from dcompile.capture.passes.joint.saved_values import (
    copy_changed_inputs,
    drop_saved_pool_inputs,
    offload_by_policy,
    recompute_misaligned_views,
    recompute_softmax,
    recompute_views,
    remove_clones,
    save_as_strided_views,
    save_random_values,
)
from dcompile.passes import (
    GraphPass,
    LoopPass,
    OutputStep,
    Pass,
    Row,
    recomputes,
    with_own_kernels,
)
from dcompile.results.result_steps import (
    detach_results,
    detach_saved_views,
    repeat_results,
    return_views,
    separate_results,
    view_as_dtypes,
)
from dcompile.toolchain import own_products

if TYPE_CHECKING:
    from dcompile.collectives.contract import Request
    from dcompile.config import Config

BOTH = ("joint", "inference")


def element_tracer() -> Any:
    """Return what computes the elements of attention masks: lowering's rules, which load with the first such pass."""
    from dcompile.codegen.lower.elements import ElementTracer

    return ElementTracer()


DYNAMO_PASSES: tuple[GraphPass, ...] = (
    # first: other passes treat inlined regions as part of the graph
    GraphPass(inline_nested_regions, required=True),
    GraphPass(
        group_experts,
        lambda request: (request.config.autocast_experts,),
        when=lambda config: config.numerics != "bitwise",
        required=True,
    ),
    GraphPass(keep_recurrent_layers_whole, required=True),
    GraphPass(specialize_block_sizes, when=with_own_kernels),
    # torch writes zeros into the gaps between windows that are changed in place
    GraphPass(view_unfold_by_slices, required=True),
    GraphPass(gather_upsampling_gradients, lambda request: (request.planned_for,), when=with_own_kernels),
    GraphPass(
        recognize_causal_masks,
        lambda request: (element_tracer, request.config.numerics == "bitwise"),
        when=lambda config: with_own_kernels(config) or config.numerics == "bitwise",
    ),
    GraphPass(decompose_decode_attention, when=with_own_kernels),
    # after causal masks, for which kernels have a flag, and single queries, whose keys are read once
    GraphPass(
        skip_masked_attention,
        lambda request: (element_tracer, request.planned_for, request.figures),
        when=with_own_kernels,
    ),
    # after masks: attention with a mask is left unchanged
    GraphPass(use_grouped_query_attention, lambda request: (request.planned_for,), when=with_own_kernels),
    GraphPass(
        chunk_losses,
        lambda request: (request.config.chunked_loss, request.planned_for, recomputes(request.config)),
        when=lambda config: bool(config.chunked_loss) and (config.chunked_loss != "auto" or with_own_kernels(config)),
        required=True,
    ),
    # after chunks: those losses have no logits left
    GraphPass(compute_loss_gradient_in_forward, when=with_own_kernels),
    # last: other passes recognize checkpointed operations by their regions
    GraphPass(inline_checkpoints, when=lambda config: config.layers_once),
)
"""Rewrites of the graph that TorchDynamo captured, before autograd traces it."""

JOINT_PASSES: tuple[GraphPass, ...] = (
    GraphPass(compat.sizes.multiply_pairwise, stages=BOTH, required=True),
    GraphPass(assign_rng_keys, stages=BOTH, required=True),
    GraphPass(resize_only_inputs, stages=BOTH, required=True),
    GraphPass(copy_changed_inputs, stages=("joint",), required=True),
    GraphPass(save_as_strided_views, stages=("joint",), required=True),
    GraphPass(remove_clones, stages=("joint",), when=with_own_kernels),
    GraphPass(pair_complex_numbers, stages=BOTH, when=with_own_kernels),
    # before padding, which leaves matmuls that add a broadcast matrix as they are
    GraphPass(separate_broadcast_addends, stages=BOTH, when=with_own_kernels),
    GraphPass(gather_permutation_gradients, stages=("joint",), when=with_own_kernels),
    GraphPass(pad_matmuls, stages=BOTH, when=lambda config: config.shape_padding and with_own_kernels(config)),
    GraphPass(narrow_gathers, stages=BOTH, when=with_own_kernels),
    GraphPass(use_channels_last, stages=BOTH, when=with_own_kernels),
    # after layouts: padding is for channels-last convolutions
    GraphPass(pad_groups, stages=BOTH, when=with_own_kernels),
    # after convolutions: what they leave permuted
    GraphPass(keep_rows_contiguous, stages=BOTH, when=with_own_kernels),
    # after layouts: nothing changes strides from here on
    GraphPass(drop_saved_pool_inputs, stages=("joint",), when=with_own_kernels),
    # after passes that replace operations: they keep policies, but not this mark
    GraphPass(offload_by_policy, stages=("joint",), required=True),
    GraphPass(recompute_softmax, stages=("joint",), when=with_own_kernels),
    GraphPass(recompute_loss_chunks, stages=("joint",), required=True),
    GraphPass(save_random_values, stages=("joint",), required=True),
    GraphPass(recompute_misaligned_views, stages=("joint",), when=with_own_kernels),
    # last: the partitioner must see what it marks
    GraphPass(recompute_views, lambda request: (request.sharded_parameters,), stages=("joint",), required=True),
)
"""Rewrites of a joint graph before its partition into forward and backward, and of an inference graph."""


OUTPUT_STEPS: tuple[OutputStep, ...] = (
    OutputStep(
        return_views,
        lambda gm, request: saved_in_same_memory(gm, request.views, request.count),
        stages=("forward",),
    ),
    # before views as other dtypes, which are made of the separated tensors
    OutputStep(separate_results, lambda gm, _: results_to_separate(gm), stages=("inference",)),
    OutputStep(
        view_as_dtypes,
        lambda gm, request: remove_dtype_views(gm, request.count),
        stages=("forward", "inference"),
        rewrites=True,
    ),
    OutputStep(detach_saved_views, lambda gm, request: saved_input_views(gm, request.count), stages=("forward",)),
    OutputStep(
        separate_results,
        lambda gm, request: constant_results_to_separate(gm, request.constant),
        stages=("forward",),
    ),
    # last: results without a gradient are detached, whatever they are views of
    OutputStep(
        detach_results,
        lambda gm, request: results_to_detach(gm, request.constant, request.count),
        stages=("forward",),
    ),
    OutputStep(repeat_results, lambda gm, _: repeated_results(gm), stages=("inference",)),
)
"""Steps on the results of a program, with the plan that each makes from a graph."""

GRAPH_WRAPPERS: tuple[Row, ...] = (
    Row(save_in_program),
    Row(watch_replaced_parameters),
    Row(leave_gradients_absent),
    # a forward that waits has no results yet for what is above to mark
    Row(wait_for_step),
    # the views have a graph's results as bases, not what a caller's tensors become below
    Row(view_results_without_gradients),
    Row(convert_distributed_tensors),
    Row(convert_subclasses),
    # the captured graph takes arguments as Dynamo passes them, so all conversions are inside
    Row(run_new_overlaps_eagerly),
    Row(flatten_lists),
    # last: it looks at the call, whatever runs inside
    Row(check_eager_regions),
)
"""What stands around each compiled graph, the innermost first: `run(compiled, around)`, or `compiled` itself if it is
not needed. `around` is a `capture.dynamo_backend.WrapperRequest`.
"""


@functools.cache
def loop_passes() -> tuple[LoopPass, ...]:
    """Rows of `LOOP_PASSES`, created at first use: a start from the cache loads no scheduler."""
    from dcompile.codegen.schedule.fusion.fuse import fuse
    from dcompile.codegen.schedule.fusion.loop_order import (
        interchange_reductions,
        order_inner_loops,
        use_online_softmax,
    )
    from dcompile.codegen.schedule.fusion.matmul_epilogue import (
        accumulate_matmuls,
        choose_skinny_matmuls,
        fuse_matmul_epilogues,
    )
    from dcompile.codegen.schedule.fusion.narrow_buffers import keep_wide_values, narrow_buffers
    from dcompile.codegen.schedule.fusion.rematerialize import recompute_rows, rematerialize
    from dcompile.codegen.schedule.fusion.split_reductions import (
        refuse_after_split,
        split_column_reductions,
        split_row_reductions,
    )
    from dcompile.codegen.schedule.memory.reorder_for_peak import plan_memory_for_peak
    from dcompile.codegen.schedule.order.dependences import group_updates, remove_dead_steps
    from dcompile.codegen.schedule.order.overlap_collectives import overlap_collectives, start_early_wait_late
    from dcompile.collectives.coalesce_small import coalesce_small
    from dcompile.collectives.ddp_all_reduce import fold_average, insert_ddp_buckets
    from dcompile.collectives.fsdp_all_gather import insert_all_gathers
    from dcompile.collectives.fsdp_reduce_scatter import insert_reduce_scatters
    from dcompile.collectives.fsdp_units import sharded_accesses
    from dcompile.collectives.send_in_place import send_in_place
    from dcompile.collectives.updates import return_gradients, update_after_reductions

    def sharded(request: Request) -> tuple[Any, ...]:
        """Inputs that are gathered, and outputs that are reduced: no pass may swap the places of their collectives."""
        return sharded_accesses(request.params, request.gathers, request.grads)

    return (
        LoopPass(remove_dead_steps, needs_loops=False),
        # before fusion, which makes one loop of sums and their readers
        LoopPass(accumulate_matmuls, reorders_sums=True),
        # before fusion: the rewrite of sums must not depend on it
        LoopPass(use_online_softmax, reorders_sums=True),
        LoopPass(interchange_reductions, reorders_sums=True),
        LoopPass(fuse, sharded),
        # after fusion, which removes most buffers, and before bytes of the rest are counted
        LoopPass(narrow_buffers),
        # after fusion, which leaves values in memory across a reduction
        LoopPass(rematerialize, lambda request: sharded(request)[:1]),
        # after fusion, which matches loops of one space by the order of their axes
        LoopPass(order_inner_loops, reorders_sums=True),
        # after fusion, which determines the rows and columns of a kernel
        LoopPass(split_column_reductions, reorders_sums=True),
        LoopPass(split_row_reductions, reorders_sums=True),
        LoopPass(refuse_after_split, sharded),
        # after splitting, whose loops need not be read by all programs of another
        LoopPass(recompute_rows, lambda request: sharded(request)[:1], reorders_sums=True),
        # after all passes that merge loops
        LoopPass(keep_wide_values, when=lambda config: config.numerics == "fast"),
        # after fusion, which computes unshared values where they are sent: the remaining copies are of matmuls
        LoopPass(send_in_place, needs_loops=False),
        # before collectives are inserted, which are those of a backward without updates
        LoopPass(return_gradients, needs_loops=False, required=True),
        # after fusion, so that a bucket's all-reduce starts after the real kernel that writes its last gradient
        LoopPass(insert_ddp_buckets, lambda request: (request.params, request.rule), needs_loops=False, required=True),
        LoopPass(fold_average, needs_loops=False),
        LoopPass(
            insert_reduce_scatters,
            lambda request: (request.params, request.reductions),
            needs_loops=False,
            required=True,
        ),
        # before passes over the order of collectives: updates hide them
        LoopPass(update_after_reductions, lambda request: (request.grads,), needs_loops=False, required=True),
        LoopPass(
            insert_all_gathers,
            lambda request: (request.params, request.gathers, request.results),
            needs_loops=False,
            required=True,
        ),
        LoopPass(coalesce_small, lambda request: (request.figures, dict(request.groups)), needs_loops=False),
        LoopPass(start_early_wait_late, needs_loops=False),
        LoopPass(
            overlap_collectives,
            lambda request: (request.figures, dict(request.groups), request.early_bytes),
            needs_loops=False,
        ),
        # after all passes that move collectives: it only changes the order of neighbours
        LoopPass(group_updates),
        # after all passes that need costs of single steps, and before memory: a matmul with an epilogue has no result
        LoopPass(fuse_matmul_epilogues, lambda request: (dict(request.epilogues),), reorders_sums=True),
        LoopPass(choose_skinny_matmuls, lambda request: (dict(request.epilogues),), reorders_sums=True),
        LoopPass(plan_memory_for_peak, lambda request: (request.kind == "forward",), needs_loops=False, required=True),
    )


@functools.cache
def nest_passes() -> tuple[Pass, ...]:
    """Rows of `NEST_PASSES`, created at first use: a start from the cache loads no emitter.

    Each is a decision about the nest of one C++ kernel: `run(plan)`, the same plan with one more decision. Without it,
    results are the same up to the order of float sums, whichever other rows are skipped.
    """
    from dcompile.codegen.emit.cpp.column_sums import collect_columns
    from dcompile.codegen.emit.cpp.interleave_rows import interleave_column_sums, interleave_row_sums
    from dcompile.codegen.emit.cpp.keep_values import hoist_values, keep_values
    from dcompile.codegen.emit.cpp.loop_conditions import select_masked_rows, skip_identity_scale, split_loops
    from dcompile.codegen.emit.cpp.narrow_values import count_positions, shorten_nans
    from dcompile.codegen.emit.cpp.outer_vectorize import vectorize_rows
    from dcompile.codegen.emit.cpp.parallelize import parallelize, share_columns, share_elements
    from dcompile.codegen.emit.cpp.prefetch import prefetch_gathers, prefetch_next_row, stream_stores
    from dcompile.codegen.emit.cpp.scans import block_scans
    from dcompile.codegen.emit.cpp.software_pipeline import pipeline_last_pass
    from dcompile.codegen.emit.cpp.transpose import transpose_tiles
    from dcompile.codegen.emit.cpp.vectorize import vectorize

    return (
        Pass(skip_identity_scale),
        Pass(parallelize),
        Pass(collect_columns, required=True),
        Pass(share_columns),
        Pass(transpose_tiles),
        Pass(shorten_nans),
        Pass(hoist_values),
        # after hoisting: values computed from hoisted ones are cheap
        Pass(keep_values),
        Pass(share_elements),
        Pass(block_scans, required=True),
        Pass(select_masked_rows),
        Pass(count_positions),
        Pass(stream_stores),
        Pass(prefetch_next_row),
        Pass(prefetch_gathers),
        # after all passes that determine what a pass over the row reads, writes and counts
        Pass(vectorize),
        Pass(vectorize_rows),
        # after vectors, whose steps are interleaved
        Pass(pipeline_last_pass),
        Pass(interleave_row_sums),
        Pass(interleave_column_sums),
        # last: only plain loops are split
        Pass(split_loops),
    )


@functools.cache
def launch_passes() -> tuple[Pass, ...]:
    """Rows of `LAUNCH_PASSES`, created at first use: a start from the cache loads no emitter.

    Each is a rewrite of a program's kernels: `run(kernels, program, *given(request))`, new kernels for the same values.
    `request` is a `codegen.emit.target.EmitRequest`.
    """
    from dcompile.codegen.emit.cpp.attention import replace_attentions
    from dcompile.codegen.emit.cpp.sgemm import replace_matmuls
    from dcompile.codegen.emit.select_target import emit_loops
    from dcompile.codegen.emit.triton.flex_attention import emit_flex_attention
    from dcompile.codegen.emit.triton.horizontal_fusion import fuse_launches, read_inputs_early, start_next_first
    from dcompile.codegen.emit.triton.one_shot_all_reduce import end_all_reduces_with_loops, sum_in_one_kernel
    from dcompile.codegen.emit.triton.segment_sum import sum_groups

    def own(config: Config) -> bool:
        return own_products(config.matmul)

    return (
        Pass(replace_matmuls, when=own),
        Pass(replace_attentions, when=own),
        Pass(sum_groups, required=True),
        Pass(emit_flex_attention, lambda request: (request.arch,), required=True),
        # before loops: kernels start early unless there are collectives on other streams
        Pass(sum_in_one_kernel, when=lambda config: config.all_reduces == "auto"),
        Pass(emit_loops, lambda request: (request,), required=True),
        Pass(end_all_reduces_with_loops),
        Pass(read_inputs_early, lambda request: (request.kind,)),
        # after all passes over kernels of single loops
        Pass(fuse_launches),
        # last: the first launch depends on what was fused
        Pass(start_next_first, lambda request: (request.kind,)),
    )


if TYPE_CHECKING:
    LOOP_PASSES: tuple[LoopPass, ...]
    """Rewrites of the program of loops, library calls and collectives."""
    NEST_PASSES: tuple[Pass, ...]
    """Decisions about the nest of one C++ kernel."""
    LAUNCH_PASSES: tuple[Pass, ...]
    """Rewrites of a program's kernels and their launches."""


def __getattr__(name: str) -> Any:
    lists = {"LOOP_PASSES": loop_passes, "NEST_PASSES": nest_passes, "LAUNCH_PASSES": launch_passes}
    if name in lists:
        return lists[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
