"""Every private torch name, by area. An area imports what it needs when first used: runtime/ loads no compiler.

Supported: torch 2.11 to 2.15. A name that may be missing has a probe here, and its caller a way to go on without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import re
import sys
import unittest.mock
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcompile.errors import UnsupportedTorchError

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

FIRST_TORCH, END_TORCH = (2, 11), (2, 16)


# --- versions ---------------------------------------------------------------------------------------------------------


def check_torch(version: str | None = None) -> None:
    """Raise UnsupportedTorchError unless torch is 2.11 to 2.15; reads package metadata, so torch is not loaded."""
    if version is None:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            import torch  # built from source without metadata

            version = str(torch.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not FIRST_TORCH <= (int(found[1]), int(found[2])) < END_TORCH:
        raise UnsupportedTorchError(
            f"dcompile: torch {version} is installed, but torch >=2.11,<2.16 is needed; "
            "install a version in that range, for example: pip install 'torch>=2.11,<2.16'"
        )


# --- TorchDynamo ------------------------------------------------------------------------------------------------------


def optimize(
    backend: Callable[..., Any],
    *,
    fullgraph: bool,
    guard_filter_fn: Callable[..., Any] | None,
    limits: Mapping[str, Any],
) -> Any:
    """The context that compiles a function with `backend`: `context(function)` is the compiled function.

    What torch.compile calls `dynamic` is for `tracing_settings`: the context would change settings at every call.
    """
    import torch._dynamo

    # Frames behind a graph break belong to code that all models of a class share, with one limit on recompiles: where
    # torch can, give each model a cache of its own.
    more = {"isolate_recompiles": True} if isolates_recompiles() else {}
    return torch._dynamo.optimize(  # type: ignore[no-untyped-call, unused-ignore]
        backend=backend, nopython=fullgraph, guard_filter_fn=guard_filter_fn, **more, **limits
    )


def isolates_recompiles() -> bool:
    """Whether this torch can keep compiled code apart by torch.compile call (2.11 cannot)."""
    from torch._dynamo.eval_frame import _optimize

    return "isolate_recompiles" in inspect.signature(_optimize).parameters


def limits(**given: Any) -> dict[str, Any]:
    """Of these arguments of torch.compile the ones that say something. Raises TypeError for one this torch lacks."""
    import torch

    asked = {name: value for name, value in given.items() if value is not None}
    known = inspect.signature(torch.compile).parameters
    for name in asked:
        if name not in known:
            raise TypeError(f"dcompile: torch {torch.__version__} has no {name} in torch.compile; leave it out")
    return asked


def context_limits(context: Any) -> dict[str, Any]:
    """recompile_limit and shapes_spec of a torch.compile call, where they were given."""
    found = {"shapes_spec": getattr(context, "_shapes_spec", None)}
    callback = context.callback
    while callback is not None:
        found["recompile_limit"] = found.get("recompile_limit") or getattr(callback, "_recompile_limit", None)
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return {name: value for name, value in found.items() if value is not None}


def wrap_frame_callback(context: Any, around: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> None:
    """Enter `around(code)` whenever this context compiles a frame; cached frames do not come by here."""
    inner = context.callback
    if not callable(inner) or isinstance(inner, bool):
        return  # TORCHDYNAMO_DISABLE=1: nothing will be compiled

    def callback(frame: Any, *args: Any, **kwargs: Any) -> Any:
        with around(frame.f_code):
            return inner(frame, *args, **kwargs)

    # Dynamo finds the backend of a cached frame through this attribute
    callback._torchdynamo_orig_backend = getattr(inner, "_torchdynamo_orig_backend", inner)  # type: ignore[attr-defined]
    context.callback = callback


@contextlib.contextmanager
def tracing_settings(dynamic: bool | None = None) -> Iterator[None]:
    """Settings of Dynamo while one of our frames is compiled; restored afterwards, so no other backend sees them.

    `dynamic` as torch.compile has it: sizes are symbols from the start, never, or once they have changed.
    """
    import logging

    import torch._dynamo.config as config

    # DDPOptimizer would cut the graph at bucket boundaries and hide the parameters' identity.
    # Models log in their loss (transformers' warning_once): dropping the call keeps the graph whole.
    ignored = set(getattr(config, "ignore_logging_functions", ()))
    ignored |= {logging.Logger.warning, logging.Logger.info, logging.Logger.debug, logging.Logger.error}
    ignored |= _transformers_logging()
    settings: dict[str, Any] = {"optimize_ddp": False, "ignore_logging_functions": ignored}
    if dynamic is not None:
        settings["assume_static_by_default"] = not dynamic
    if dynamic is False:
        settings["automatic_dynamic_shapes"] = False
    if keeps_static_graphs():
        settings["automatic_dynamic_exclusion_guard"] = True
    # A mark in profiles, whether one is taken or not: 16 of 60 Python calls of a compiled call (17 to 15 us). After a
    # kernel that swept the cache, the code of every one of them comes from memory again.
    if hasattr(config, "record_runtime_overhead"):
        settings["record_runtime_overhead"] = False
    with (
        config.patch(settings),  # type: ignore[no-untyped-call, unused-ignore]
        _quiet_metrics(),
    ):
        yield


def keeps_static_graphs() -> bool:
    """Whether this torch can leave a shape that has a static graph to that graph once a dynamic one fits it as well.

    Without, Dynamo asks the newest graph first, so that one odd batch demotes the usual shape to the dynamic program.
    """
    import torch._dynamo.config as config

    return hasattr(config, "automatic_dynamic_exclusion_guard")


def _quiet_metrics() -> contextlib.AbstractContextManager[Any]:
    """Keep Dynamo's metrics from logging an error: those of torch 2.11 cannot write functions among its settings."""
    import torch._dynamo.utils as utils

    name = "_get_dynamo_config_for_logging"
    if not hasattr(utils, name) or _can_log_functions():
        return contextlib.nullcontext()
    return unittest.mock.patch.object(utils, name, lambda: None)


@functools.cache
def _can_log_functions() -> bool:
    import torch._dynamo.utils as utils

    return "ignore_logging_functions" in inspect.getsource(utils._get_dynamo_config_for_logging)


def _transformers_logging() -> set[Any]:
    import sys

    module = sys.modules.get("transformers.utils.logging")
    names = ("warning_once", "warning_advice", "info_once")
    return {getattr(module, name) for name in names if hasattr(module, name)} if module else set()


def graph_break_count() -> int:
    """Graph breaks that Dynamo has counted in this process so far."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def graph_breaks(begin: int = 0) -> list[tuple[str, list[Any]]]:
    """Graph breaks of this process from the `begin`-th on: the reason, and the user's frames (innermost last)."""
    import torch._dynamo.output_graph as output_graph

    found = getattr(output_graph, "graph_break_reasons", [])[begin:]
    return [(str(entry.reason), list(entry.user_stack)) for entry in found]


def no_dynamo(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function`, never traced by Dynamo."""
    import torch

    return torch._dynamo.disable(function, reason=reason)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def is_compile_context(context: Any) -> bool:
    """Whether `context` compiles what it is called with (torch.compile's), rather than disables or only runs it."""
    from torch._dynamo.eval_frame import OptimizeContext

    return isinstance(context, OptimizeContext)


def innermost_backend(context: Any) -> Any:
    """What the user gave as backend to the torch.compile call behind `context`."""
    from torch._dynamo.eval_frame import innermost_backend as innermost

    return innermost(context.callback) if callable(context.callback) else None


def context_settings(context: Any) -> tuple[bool, bool | None, Callable[..., Any] | None]:
    """fullgraph, dynamic and guard_filter_fn of a torch.compile call."""
    hooks = getattr(context, "_hooks", None)
    return bool(context.fullgraph), context._dynamic, getattr(hooks, "guard_filter_fn", None)


def intercept_compile(handle: Callable[[Any, Any], Any]) -> None:
    """Let `handle(context, fn)` see every torch.compile; where it returns NotImplemented, torch goes on as always."""
    from torch._dynamo.eval_frame import _TorchDynamoContext

    original = _TorchDynamoContext.__call__
    if hasattr(original, "_dcompile"):
        return

    @functools.wraps(original)
    def __call__(self: Any, fn: Any) -> Any:
        result = handle(self, fn)
        return original(self, fn) if result is NotImplemented else result

    __call__._dcompile = True  # type: ignore[attr-defined]
    _TorchDynamoContext.__call__ = __call__  # type: ignore[method-assign]


def guard_count(gm: Any) -> int:
    """How many guards on symbolic sizes there are so far: whoever asks for a size's value adds one."""
    import torch

    for node in gm.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return len(size.node.shape_env.guards)
    return 0


def size_expression(size: Any) -> Any:
    """A SymInt as torch has simplified it by what its guards say so far (divisibility, for example); adds no guard."""
    return size.node.shape_env.simplify(size.node.expr)


def least_value(shape_env: Any, symbol: Any) -> int | None:
    """The least value that a size symbol may have, as far as torch knows without asking for it; None if none."""
    known = shape_env.var_to_range.get(symbol)
    lower = None if known is None else known.lower
    return int(lower) if lower is not None and getattr(lower, "is_Integer", isinstance(lower, int)) else None


def size_symbols(gm: Any) -> dict[Any, Any]:
    """Size symbols of a graph -> their shape environment."""
    import torch

    found: dict[Any, Any] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            for size in (*item.shape, *item.stride()) if isinstance(item, torch.Tensor) else (item,):
                if isinstance(size, torch.SymInt):
                    found |= dict.fromkeys(size.node.expr.free_symbols, size.node.shape_env)
    return found


def least_values(gm: Any) -> dict[Any, int | None]:
    """Size symbols of a graph -> the least value each may have."""
    return {symbol: least_value(environment, symbol) for symbol, environment in size_symbols(gm).items()}


def size_hint(shape_env: Any, symbol: Any) -> int | None:
    """The number that a size symbol was traced with, looked up without guarding on it."""
    numbers = getattr(shape_env, "backed_var_to_val", None) or getattr(shape_env, "var_to_val", {})
    return int(numbers[symbol]) if symbol in numbers else None


def is_known_empty(tensor: Any) -> bool:
    """Whether a tensor has no elements, as far as that is known without guarding on its sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(tensor.numel() == 0))


def is_optimized_module(thing: Any) -> bool:
    """What torch.compile(module) returns."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(thing, OptimizedModule)


# --- AOTAutograd ------------------------------------------------------------------------------------------------------


def aot_compile(
    gm: Any,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[[Any, Any], Any],
    backward: Callable[[Any, Any], Any],
    inference: Callable[[Any, Any], Any],
    partition: Callable[..., Any],
    decompositions: dict[Any, Any],
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph, cut them apart, and compile each with what is given."""
    import torch._functorch.config as config
    from torch._functorch.aot_autograd import aot_module_simplified

    # With donation on, AOTAutograd refuses backward(retain_graph=True). Memory planning of ours reuses what it may.
    with config.patch(donated_buffer=False):  # type: ignore[no-untyped-call, unused-ignore]
        return aot_module_simplified(
            gm,  # type: ignore[arg-type, unused-ignore]
            example_inputs,
            fw_compiler=forward,  # type: ignore[arg-type, unused-ignore]
            bw_compiler=backward,  # type: ignore[arg-type, unused-ignore]
            inference_compiler=inference,  # type: ignore[arg-type, unused-ignore]
            partition_fn=partition,
            decompositions=decompositions,
            keep_inference_input_mutations=True,
        )


def backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """Have AOTAutograd call the backward's compiler with the forward's, and not in the first backward."""
    import torch._functorch.config as config

    name = "force_non_lazy_backward_lowering"
    if not hasattr(config, name):
        return contextlib.nullcontext()
    return config.patch({name: True})  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def no_donation() -> None:
    """Say, from inside the backward compiler, that this graph donates no buffer (its run-time check wants a list)."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def min_cut_partition(
    joint: Any,
    joint_inputs: Any,
    fusible: frozenset[Any],
    recomputable: frozenset[Any],
    memory_budget: float = 1.0,
    **keywords: Any,
) -> tuple[Any, Any]:
    """torch's own choice of what to save and what to recompute: (forward, backward).

    `fusible` and `recomputable` are overload packets that it is to treat so beside those it knows: the list is a
    function of its module, replaced while the cut is made. Where torch has no such function, its own list decides.
    `memory_budget` is the part of what this would save that may be saved at most; the rest is computed again.
    """
    from torch._functorch import config, partitioners

    # a budget that the user has set for torch.compile itself stands where ours says nothing
    budget = config.patch(activation_memory_budget=memory_budget) if memory_budget < 1 else contextlib.nullcontext()
    with _more_ops(partitioners, fusible, recomputable), budget:
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **keywords)


@contextlib.contextmanager
def _more_ops(partitioners: Any, fusible: frozenset[Any], recomputable: frozenset[Any]) -> Iterator[None]:
    own = getattr(partitioners, "get_default_op_list", None)
    if own is None:
        yield
        return

    def op_list() -> Any:
        found = own()
        again = found.recomputable_ops | recomputable
        return dataclasses.replace(found, fusible_ops=found.fusible_ops | fusible, recomputable_ops=again)

    with unittest.mock.patch.object(partitioners, "get_default_op_list", op_list):
        yield


def primal_index(node: Any) -> int | None:
    """Position among the Dynamo graph's inputs that this gradient of a joint graph belongs to, or None."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    if not isinstance(node, GradAOTOutput) or not isinstance(node.grad_of, PlainAOTInput):
        return None
    return node.grad_of.idx


def detect_fake_mode(values: Any) -> Any:
    """The mode that fake tensors among `values` belong to."""
    from torch._guards import detect_fake_mode as detect

    return detect(values)


def decompositions(also: Sequence[Any]) -> dict[Any, Any]:
    """torch's core decompositions of ops that autograd sees whole, and those of the ops in `also`."""
    import torch._decomp as decomp

    core = getattr(decomp, "_core_aten_decompositions_post_autograd", decomp.core_aten_decompositions)
    return {**core(), **decomp.get_decompositions(also)}


def suggest_memory_format(x: torch.Tensor) -> torch.memory_format:
    """The layout that eager's kernels give to results of `x`: channels last if its strides look so."""
    import torch._prims_common as prims

    return prims.suggest_memory_format(x)


# --- autograd ---------------------------------------------------------------------------------------------------------


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is now running is through."""
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Inside a backward: whether it is going to add to this parameter's .grad (torch.autograd.grad does not)."""
    import torch
    from torch.autograd.graph import get_gradient_edge

    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:
        return False  # what torch answers for a leaf that torch.autograd.grad was asked for


def backward_task() -> int:
    """Number of the backward that is now running; -1 outside."""
    import torch

    return int(torch._C._current_graph_task_id())


def is_compiled_backward(node: Any) -> bool:
    """Whether this node of the autograd graph runs a backward that AOTAutograd compiled."""
    return bool(type(node).__name__ == "CompiledFunctionBackward")


# --- GPUs -------------------------------------------------------------------------------------------------------------


def raw_stream(device: int) -> int:
    """The current stream of a GPU, as the CUDA driver takes it."""
    import torch

    fast = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(fast(device) if fast is not None else torch.cuda.current_stream(device).cuda_stream)


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Stop with `message` unless `condition` holds, without waiting for the GPU to find out."""
    import torch

    torch._assert_async(condition, message)


# --- tensors ----------------------------------------------------------------------------------------------------------


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many tensors (and other holders) refer to this tensor's storage, `tensor` itself included.

    All Python code shares one storage object, which counts as one tensor does; its own reference count tells whether
    anybody else has it.
    """
    import torch

    storage = tensor.untyped_storage()
    others = sys.getrefcount(storage) - _lonely_storage_references()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + others  # `storage` itself is one


class Held:
    """A tensor that is kept, and whether anybody else has its storage: asked at every call, so in 0.2 us."""

    __slots__ = ("_address", "_references", "_storage", "_uses", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        """`tensor` is new: nobody else has it."""
        import torch

        self.tensor = tensor
        self._storage = tensor.untyped_storage()  # kept: it is one object for all Python code
        self._address = self._storage._cdata
        self._uses = torch._C._storage_Use_Count(self._address)
        self._references = sys.getrefcount(self._storage)

    def alone(self) -> bool:
        """No other tensor, storage object or holder in C++ refers to the storage."""
        import torch

        same = torch._C._storage_Use_Count(self._address) == self._uses
        return bool(same and sys.getrefcount(self._storage) == self._references)


@functools.cache
def _lonely_storage_references() -> int:
    """The reference count of a storage object that one local variable has: 2 or 3, depending on torch and Python."""
    import torch

    tensor = torch.empty(1)  # kept: the reference that a living tensor has to it counts, in some versions
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


# --- memory of CUDA graphs --------------------------------------------------------------------------------------------


def storage_holders(storage: Any) -> int:
    """How many tensors and storages refer to one memory; all Python code together counts as one."""
    import torch

    return int(torch._C._storage_Use_Count(storage._cdata))


def storage_key(tensor: torch.Tensor) -> int:
    """The same number for tensors, fake ones too, that share memory."""
    return int(tensor.untyped_storage()._cdata)


def storage_at(address: int, nbytes: int, device: Any) -> Any:
    """A storage over memory that somebody else owns."""
    import torch

    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def addresses_are(args: list[Any], addresses: list[int], positions: list[int]) -> bool:
    """Whether the tensors at these positions lie where `addresses` has them: 20 us for 300 in Python, so in C++.

    `addresses` has a number for each argument. Lists, since the C++ function takes nothing else.
    """
    import torch

    quick = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)  # only in builds with CUDA
    if quick is not None:
        return bool(quick(args, addresses, positions))
    return all(args[position].data_ptr() == addresses[position] for position in positions)


def is_static_input(tensor: torch.Tensor) -> bool:
    """Whether Dynamo or the user has said that this tensor stays where it is (buffers, caches)."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def only_python_holds(tensor: torch.Tensor) -> bool:
    """Whether no C++ code, such as an autograd graph that is retained, holds this tensor beside Python."""
    count = getattr(tensor, "_use_count", None)
    return count is not None and int(count()) <= 1


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def active_ddp() -> DistributedDataParallel | None:
    """The DDP module whose forward is running."""
    import sys

    module = sys.modules.get("torch.nn.parallel.distributed")
    return module.DistributedDataParallel._active_ddp_module if module else None


def ddp_missing(ddp: Any) -> list[str]:
    """Private names that taking over needs and this torch lacks."""
    import torch

    names = (
        "_remove_autograd_hooks", "_module_parameters", "_comm_hooks", "_join_config", "mixed_precision", "reducer",
        "_delay_all_reduce_all_params", "_use_python_reducer", "require_backward_grad_sync", "bucket_bytes_cap",
        "bucket_bytes_cap_default", "_build_params_for_reducer", "_ddp_init_helper", "process_group",
    )  # fmt: skip
    engine = ("_will_engine_execute_node", "_current_graph_task_id", "_storage_Use_Count")
    missing = [name for name in names if not hasattr(ddp, name)]
    return missing + [f"torch._C.{name}" for name in engine if not hasattr(torch._C, name)]


def ddp_parameters(ddp: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Names (within the wrapped module) and parameters that this DDP module keeps in step, in its order."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [(names[id(parameter)], parameter) for parameter in ddp._module_parameters if id(parameter) in names]


def ddp_objections(ddp: Any) -> list[str]:
    """What this DDP module was asked for that only its own reducer does."""
    import torch

    comm_hook = ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook")
    found = {
        "a communication hook is registered": bool(comm_hook),
        "the Join context manager is on": bool(ddp._join_config.enable),
        "DDP mixed precision is on": ddp.mixed_precision is not None,
        "all-reduces are delayed (delay_all_reduce_named_params)": bool(
            ddp._delay_all_reduce_all_params or getattr(ddp, "_delay_all_reduce_params", None)
        ),
        "DDP was built with the python reducer": bool(ddp._use_python_reducer),
        "parameters are on several devices": bool(ddp.is_multi_device_module),
        "a module asks for sparse gradients": any(
            isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
            for module in ddp.module.modules()
        ),
    }
    return [reason for reason, holds in found.items() if holds]


def ddp_bucket_bytes(ddp: Any) -> tuple[int, int]:
    """Sizes at which DDP closes its first and its other buckets."""
    from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES

    cap = int(ddp.bucket_bytes_cap)
    return (int(_DEFAULT_FIRST_BUCKET_BYTES) if ddp.bucket_bytes_cap_default else cap), cap


def ddp_hold_static_graph(ddp: Any) -> bool:
    """Keep a static_graph DDP from queueing its one big reduction; True if it would have queued it."""
    if not ddp.static_graph or ddp._static_graph_delay_allreduce_enqueued:
        return False
    ddp._static_graph_delay_allreduce_enqueued = True
    return True


def ddp_let_go_static_graph(ddp: Any) -> None:
    """Undo `ddp_hold_static_graph` within the same forward."""
    ddp._static_graph_delay_allreduce_enqueued = False


def ddp_comm_hook_count(ddp: Any) -> int:
    """Communication hooks registered so far."""
    return len(ddp._comm_hooks)


def ddp_is_joining(ddp: Any) -> bool:
    """Whether the Join context manager is on."""
    return bool(ddp._join_config.enable)


def ddp_release_static_graph(ddp: Any) -> None:
    """Queue the reduction that `ddp_hold_static_graph` kept back; call inside the backward."""
    at_end_of_backward(ddp.reducer._delay_all_reduce)


def ddp_silence_reducer(ddp: Any) -> None:
    """Take DDP's reduction off its parameters: its forward, no_sync and buffer broadcast stay as they are."""
    ddp._remove_autograd_hooks()


def ddp_rebuild_reducer(ddp: Any, inside_forward: bool) -> None:
    """Put DDP's own reduction back: a new reducer, as its constructor builds it."""
    import torch
    from torch._C._distributed_c10d import _register_comm_hook

    parameters, sparse = ddp._build_params_for_reducer()
    static = bool(ddp.static_graph)
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), static)
    if static:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        _register_comm_hook(ddp.reducer, state, hook)
    if inside_forward and torch.is_grad_enabled() and ddp.require_backward_grad_sync:
        ddp.logger.set_runtime_stats_and_log()
        ddp.reducer.prepare_for_forward()  # DDP.forward has called it on the reducer that was there before


# --- process groups ---------------------------------------------------------------------------------------------------


def before_groups_end(callback: Callable[[], None]) -> None:
    """Call a bound method before torch.distributed.destroy_process_group does its work, if its object still lives.

    NCCL waits, when a communicator ends, for every CUDA graph that has collectives of it.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    stock, weakly = c10d.destroy_process_group, weakref.WeakMethod(callback)

    @functools.wraps(stock)
    def destroy(*args: Any, **kwargs: Any) -> Any:
        alive = weakly()
        if alive is not None:
            alive()
        return stock(*args, **kwargs)

    dist.destroy_process_group = c10d.destroy_process_group = destroy


def group_store(group: Any) -> Any:
    """The key-value store through which this process group was set up: works while collectives do not."""
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_process_group_store(group)


def weak(thing: Any) -> Callable[[], Any]:
    """A weak reference, or None as a function."""
    return weakref.ref(thing) if thing is not None else (lambda: None)
