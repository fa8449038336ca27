"""AOTAutograd: joint graphs, their partition, and decompositions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._decomp as decomp
import torch._prims_common as prims
from torch._guards import TracingContext
from torch._guards import detect_fake_mode as detect
from torch._higher_order_ops.effects import has_effects
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from dcompile.compat.patches.lean_wrappers import unpack_arguments
from dcompile.compat.patches.random_numbers import NO_REGION
from dcompile.compat.patches.random_numbers import checkpointed_by_user as checkpointed_by_user
from dcompile.compat.patches.random_numbers import is_drawn_again as is_drawn_again
from dcompile.compat.patches.random_numbers import never_recompute as never_recompute
from dcompile.compat.patches.registry import patched
from dcompile.compat.patches.torch_patch import PatchRequest
from dcompile.compat.tensors import has_storage


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
    is_saved: bool = False,
    eager_kernels: bool = False,
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, partition them, and compile each with the given functions.

    `around` is entered meanwhile: see `aot_trace`. `is_saved`: keep torch's own wrappers, which a saved graph has when
    it is loaded: see `aot_bundle`. `eager_kernels`: trace operators by the kernels that eager mode runs.
    """
    import torch._functorch.config as config
    from torch._functorch.aot_autograd import aot_module_simplified

    # With donation on, AOTAutograd refuses backward(retain_graph=True). dcompile's memory planning reuses what it may.
    settings: dict[str, Any] = {"donated_buffer": False}
    # With this on, recomputed GPU random numbers come from a separate generator, which is seeded in the first call.
    # Eager has no such generator.
    if hasattr(config, "graphsafe_rng_functionalization"):
        settings["graphsafe_rng_functionalization"] = False
    # By default the backward is traced under the forward's autocast. Eager runs it under that of the `backward` call,
    # which belongs outside. Whoever sets something else gets that.
    if getattr(config, "backward_pass_autocast", "") == "same_as_forward":
        settings["backward_pass_autocast"] = "off"
    # Inputs that share memory, one of which is changed, are views of a base in the graph. Views of such an input would
    # be repeated on that base, as if it were the input.
    if hasattr(config, "view_replay_for_aliased_outputs") and _share_memory(example_inputs):
        settings["view_replay_for_aliased_outputs"] = False
    known = config.patch(settings)  # type: ignore[no-untyped-call, unused-ignore]
    request = PatchRequest(example_inputs=() if is_saved else example_inputs, eager_kernels=eager_kernels)
    with known, patched("graph", request), around:
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
        return compiled if is_saved else unpack_arguments(compiled, gm)


def _share_memory(values: Sequence[Any]) -> bool:
    tensors = [value for value in values if hasattr(value, "untyped_storage") and has_storage(value)]
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)


def backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """Make AOTAutograd compile the backward together with the forward, instead of in the first backward."""
    import torch._functorch.config as config

    name = "force_non_lazy_backward_lowering"
    if not hasattr(config, name):
        return contextlib.nullcontext()
    return config.patch({name: True})  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def min_cut_partition(
    joint: Any,
    joint_inputs: Any,
    fusible: tuple[frozenset[Any], frozenset[Any]] | None,
    memory_budget: float = 1.0,
    recompute_library_operands: bool = False,
    minimum_cut: Callable[..., Any] | None = None,
    choose_saved: Callable[..., Any] | None = None,
    **keywords: Any,
) -> tuple[Any, Any]:
    """Partition a joint graph as torch does, by a minimum cut between saving and recomputing: (forward, backward).

    `fusible`: overload packets that torch takes for fusible besides its own, and those that it may recompute. None: no
    operation is fused, and only views are recomputed. Both are told through a function of its module, which is
    replaced during the cut. If torch has no such function, only its own list counts.

    `memory_budget`: part of the bytes that would be saved; the rest is recomputed.
    `recompute_library_operands`: the backward may also recompute tensors that it then has to write for a library call.
    `minimum_cut` replaces networkx's function; it gets that function as an argument, for graphs that it cannot cut.
    `choose_saved` chooses the saved values: see `patches.partitioner.saved_values_chosen_by`.

    Views of whole tensors are never saved, but their bases are. With both as candidates, torch may save a matmul's
    result and also the view of what was computed from it. The latter alone would suffice for a ReLU between two linear
    layers.
    """
    from torch._functorch import config, partitioners

    # a budget that the user set for torch.compile applies if there is none of ours
    changes: dict[str, Any] = {"activation_memory_budget": memory_budget} if memory_budget < 1 else {}
    if recompute_library_operands and hasattr(config, "ban_recompute_materialized_backward"):
        changes["ban_recompute_materialized_backward"] = False
    if hasattr(config, "recompute_views") and hasattr(partitioners, "get_default_op_list"):
        changes["recompute_views"] = True
    request = PatchRequest(fusible=fusible, minimum_cut=minimum_cut, choose_saved=choose_saved)
    with patched("partition", request), config.patch(changes):
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **keywords)


def takes_absent_tangents() -> bool:
    """Whether AOTAutograd's backwards pass on a None that autograd gives them as a gradient."""
    from torch._functorch._aot_autograd import runtime_wrappers

    process = getattr(getattr(runtime_wrappers, "AOTDispatchAutograd", None), "process_runtime_tangent", None)
    try:
        return process is not None and process(None, None) == (None, [None])
    except (TypeError, AttributeError, AssertionError):
        return False


def leave_absent(result: Any, shapes: Mapping[int, Any]) -> None:
    """Make autograd pass None to the compiled backward of this result, where it would create zeros.

    Functions set that while they run forward; the node of the autograd graph stores it. The node keeps `shapes` for
    `absent_shapes`.
    """
    from dcompile.compat.autograd import is_compiled_backward

    node = result.grad_fn
    if node is not None and result._base is not None and not is_compiled_backward(node):
        node = result._base.grad_fn
    if node is not None and is_compiled_backward(node):
        node.materialize_grads = False  # like `set_materialize_grads`, with one Python call less
        node.dcompile_shapes = shapes


def absent_shapes() -> Mapping[int, Any]:
    """Shapes that the forward passed to `leave_absent`. Inside a compiled backward."""
    return getattr(torch._C._current_autograd_node(), "dcompile_shapes", {})


def batch_test() -> Callable[[torch.Tensor], bool]:
    """Predicate for batches of `is_grads_batched=True` and `jacobian(vectorize=True)`; torch refuses `vmap`'s."""
    return torch._C._functorch.is_legacy_batchedtensor


def hooked_leaves() -> frozenset[int]:
    """Positions, among the forward's inputs, of leaves with gradient hooks. Inside a compiled backward."""
    edges = enumerate(torch._C._current_autograd_node().next_functions)  # type: ignore[attr-defined, unused-ignore]
    leaves = ((n, getattr(function, "variable", None)) for n, (function, _) in edges)
    return frozenset(n for n, leaf in leaves if leaf is not None and leaf._backward_hooks)


def always_recompute(node: Any) -> None:
    """Force the partitioner to recompute this node in the backward, whatever that costs.

    The number orders regions of gradient checkpointing. For two consecutive regions, torch saves tensors that both use.
    No region comes after this one.
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = NO_REGION


def asks_to_offload(node: Any) -> bool:
    """Whether a policy of selective checkpointing saves this node in host memory; torch 2.11 has no such policy."""
    return getattr(node.meta.get("recompute"), "name", "") in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")


def prefer_recompute(node: Any, region: int) -> None:
    """Have the partitioner compute this node of a checkpointed region again, as `torch.utils.checkpoint` asks it to."""
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = region


def checkpoint_region(node: Any) -> int | None:
    """The number of the checkpointed region that a node is in, if it is in one."""
    number: int | None = node.meta.get("ac_graph_id")
    return number


def is_saved_by_mark(node: Any) -> bool:
    """Whether a node is marked to be saved for the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def number_region(node: Any, region: int) -> None:
    """Say which checkpointed region a node is in."""
    node.meta["ac_graph_id"] = region


@contextlib.contextmanager
def annotate_nodes(marks: dict[str, Any]) -> Iterator[None]:
    """Store `marks` with each operation that is traced inside, as `meta["custom"]`.

    torch's `annotate` adds them to the existing dictionary, which may belong to the node being traced.
    """
    meta = traceback.current_meta
    if "custom" in meta:
        meta["custom"] = dict(meta["custom"])
    with traceback.annotate(marks):
        yield


def lazy_graph_module(root: Any, graph: Any, copy: Callable[[Any], Any] | None = None) -> Any:
    """A graph module that writes its Python code when that is first asked for: a tenth of making a graph anew.

    `copy` makes its deep copies, if given.
    """
    kind = _lazy_graph_type() if copy is None else _copied_graph_type(copy)
    return kind(root, graph)


@functools.cache
def _lazy_graph_type() -> Any:
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return torch.fx.GraphModule
    return _LazyGraphModule


@functools.cache
def _copied_graph_type(copy: Callable[[Any], Any]) -> Any:
    lazy: Any = _lazy_graph_type()

    class CopiedGraphModule(lazy):  # type: ignore[misc, unused-ignore]
        """A graph module with another way to copy it deeply."""

        def __deepcopy__(self, memo: Any) -> Any:
            return copy(self)

    return CopiedGraphModule


def detect_fake_mode(values: Any) -> Any:
    """Mode of the fake tensors among `values`."""
    return detect(values)


def traced_again(function: Callable[..., Any], given: Sequence[Any], decompositions: Mapping[Any, Any]) -> Any:
    """Return the graph of a function, traced with what a graph's nodes have as values.

    Those have no elements. Nor may what the function makes, such as the infinity of `torch.where(test, score, -inf)`.
    """
    modes = (getattr(value, "fake_mode", None) for value in given)
    mode = next((mode for mode in modes if mode is not None), contextlib.nullcontext())
    with mode:
        return make_fx(function, decomposition_table=dict(decompositions))(*given)


def fake_input(tensor: torch.Tensor) -> Any:
    """Fake tensor with which AOTAutograd will trace an input that Dynamo did not see. Inside Dynamo's backend.

    Its sizes are numbers. Otherwise AOTAutograd would create symbols for them; it looks for a known fake tensor first.
    """
    context = TracingContext.try_get()
    assert context is not None and context.fake_mode is not None, "only a graph that is being compiled has inputs"
    return context.fake_mode.from_tensor(tensor, static_shapes=True)


def export_graph(gm: Any, example_inputs: Sequence[Any], decompositions: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Trace a Dynamo graph into a functional one for inference. Return it with its signature."""
    from torch._functorch.aot_autograd import aot_export_module

    return aot_export_module(gm, [*example_inputs], trace_joint=False, decompositions={**decompositions})


def metadata_checks(graph: Any) -> list[Any]:
    """Calls that torch.export adds to check metadata of computed values, a traced dtype for example."""
    return [*graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default)]


CHECKED = frozenset(f"aten::linalg_{name}" for name in ("cholesky", "inv", "ldl_factor", "lu_factor", "solve"))
"""Composite operators that end with a check without a result."""


def composite_decompositions() -> dict[Any, Any]:
    """Decompositions of ATen's composite operators, which AOTAutograd decomposes and torch.export keeps whole.

    An older torch does not know that `_linalg_check_errors` has an effect, and removes it. Its callers stay whole.
    """
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    whole = frozenset() if has_effects(torch.ops.aten._linalg_check_errors.default) else CHECKED
    table: Any = torch.export.default_decompositions()
    return {
        op: function
        for op, function in table.items()
        if isinstance(op, torch._ops.OpOverload)
        and op.has_kernel_for_dispatch_key(composite)
        and op._schema.name not in whole
    }


def decompositions(also: Sequence[Any]) -> dict[Any, Any]:
    """torch's core decompositions of ops that autograd sees whole, and those of the ops in `also`."""
    core = getattr(decomp, "_core_aten_decompositions_post_autograd", decomp.core_aten_decompositions)
    return {**core(), **decomp.get_decompositions(also)}


def dimensions_by_stride(x: torch.Tensor) -> list[int]:
    """Dimensions of a tensor from outermost to innermost in memory, as eager's elementwise kernels order them."""
    return list(prims.compute_elementwise_output_logical_to_physical_perm(x)[0])


def suggest_memory_format(x: torch.Tensor) -> torch.memory_format:
    """Memory format that eager's kernels give to results of `x`: channels last if its strides have that order."""
    return prims.suggest_memory_format(x)
