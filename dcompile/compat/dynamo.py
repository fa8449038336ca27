"""TorchDynamo: compiling frames, its settings, its counters, and the door torch.compile."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dcompile.compat.guards import guard_methods, short_guard_of_hooks
from dcompile.compat.optimizers import optimizers_whole
from dcompile.compat.patches.index_strides import strides_of_indices
from dcompile.compat.patches.quiet_dumps import no_unread_latencies, no_unread_names
from dcompile.compat.patches.symbolic_views import views_as_asked
from dcompile.compat.shapes import of_context
from dcompile.compat.sizes import simplifying_once


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


def forget_backend(backend: Any) -> None:
    """Take a backend, which serves no compiled code any more, out of Dynamo's table of all backends."""
    from torch._dynamo import eval_frame

    known: dict[int, Any] = getattr(eval_frame, "cached_backends", {})
    for key, value in list(known.items()):
        if value is backend or innermost(value) is backend:
            known.pop(key, None)


def innermost(backend: Any) -> Any:
    """What the wrappers that Dynamo puts around a backend are around."""
    inside = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "_compiler_fn", None)
    return backend if inside is None else innermost(inside)


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
    """recompile_limit and the spec of shapes of a torch.compile call, where they were given."""
    found: dict[str, Any] = dict(of_context(context))
    callback = context.callback
    while callback is not None:
        found["recompile_limit"] = found.get("recompile_limit") or getattr(callback, "_recompile_limit", None)
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return {name: value for name, value in found.items() if value is not None}


def wrap_frame_callback(
    context: Any,
    around: Callable[[Any, bool], contextlib.AbstractContextManager[Any]],
    compiled: Callable[[Any, Any], None] = lambda code, guarded: None,
    late_sizes: bool = False,
    left_to_eager: Callable[[Any], bool] = lambda owner: False,
) -> None:
    """Enter `around(code, late)` whenever this context compiles a frame; cached frames do not come by here.

    With `late_sizes`, `late` is True: sizes that depend on values are to be captured. Where a frame cannot be compiled
    with such sizes, it is compiled again with `late` False.

    `compiled` is then given the code, with its guards, if it is there for all of the frame: it has no graph break, and
    is not left to eager; otherwise None. It may raise: the frame does not run then.

    `left_to_eager(owner)` says whether a frame, whose `self` is `owner`, runs eagerly this time.
    """
    inner = getattr(context, "callback", None)
    if not callable(inner) or isinstance(inner, bool):
        return  # TORCHDYNAMO_DISABLE=1: nothing will be compiled, and the context has no callback

    def callback(frame: Any, *args: Any, **kwargs: Any) -> Any:
        if left_to_eager(frame.f_locals.get("self")):
            return _eager_once()
        breaks = graph_break_count()
        try:
            with around(frame.f_code, late_sizes):
                result = inner(frame, *args, **kwargs)
        except Exception as error:
            if not (late_sizes and _is_about_late_sizes(error)):
                raise
            breaks = graph_break_count()
            with around(frame.f_code, False):
                result = inner(frame, *args, **kwargs)
        compiled(frame.f_code, getattr(result, "guarded_code", None) if graph_break_count() == breaks else None)
        return result

    # Dynamo finds the backend of a cached frame through this attribute
    callback._torchdynamo_orig_backend = getattr(inner, "_torchdynamo_orig_backend", inner)  # type: ignore[attr-defined]
    context.callback = callback


def _eager_once() -> Any:
    """What a frame callback returns for a frame that runs as it is, and comes by again next time."""
    from torch._dynamo.types import ConvertFrameReturn

    return ConvertFrameReturn(apply_to_code=False)


def _is_about_late_sizes(error: BaseException | None) -> bool:
    """Whether something could not be captured since a size depends on values: torch has many words for that."""
    while error is not None:
        text = f"{type(error).__name__} {error}".lower()
        if any(word in text for word in ("data-dependent", "datadependent", "data dependent", "unbacked")):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


@contextlib.contextmanager
def tracing_settings(
    dynamic: bool | None = None,
    sync_batch_norm: Callable[..., Any] | None = None,
    told_of_hooks: bool = False,
    group_experts: Callable[..., Any] | None = None,
    late_sizes: bool = False,
) -> Iterator[None]:
    """Settings of Dynamo while one of our frames is compiled; restored afterwards, so no other backend sees them.

    `dynamic` as torch.compile has it: sizes are symbols from the start, never, or once they have changed.
    `sync_batch_norm` is traced where the autograd Function behind torch.nn.SyncBatchNorm is applied.
    `told_of_hooks`: an argument of the frame says whether hooks for saved tensors are to be traced with it.
    `group_experts(loop, grouped)` gives what is traced in place of a loop over transformers' experts.
    `late_sizes`: operations whose results' sizes depend on values (nonzero, masks) break no graph.
    """
    import logging

    import torch
    import torch._dynamo.config as config

    # DDPOptimizer would cut the graph at bucket boundaries and hide the parameters' identity.
    # Models log in their loss (transformers' warning_once): dropping the call keeps the graph whole.
    ignored = set(getattr(config, "ignore_logging_functions", ()))
    ignored |= {logging.Logger.warning, logging.Logger.info, logging.Logger.debug, logging.Logger.error}
    ignored |= _transformers_logging()
    settings: dict[str, Any] = {"optimize_ddp": False, "ignore_logging_functions": ignored}
    if late_sizes:
        settings["capture_dynamic_output_shape_ops"] = True
    if dynamic is not None:
        settings["assume_static_by_default"] = not dynamic
    if dynamic:
        settings["fake_tensor_cache_enabled"] = False  # see sizes.remembering_numbers_alone
    if dynamic is False:
        settings["automatic_dynamic_shapes"] = False
    # torch 2.11 asks nothing of a parameter while it is the same object: not whether it was frozen, converted or
    # transposed since. Asking takes 0.1 us for each; 2.13 does so in any case.
    if hasattr(config, "skip_tensor_guards_with_matching_dict_tags"):
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    if hasattr(config, "skip_fsdp_guards"):
        settings["skip_fsdp_guards"] = False  # FSDP1: whether a module trains has to be guarded like anywhere else
    # What was traced remembers tensors by weak references, and parameters that have such cannot be swapped
    # (torch.__future__.set_swap_module_params_on_conversion). Dynamo forgets them for backends that it knows.
    if hasattr(config, "invalidate_compile_context_weakrefs"):
        settings["invalidate_compile_context_weakrefs"] = True
    # Recurrent layers become operators of ours, but under autocast, which knows torch's own alone.
    if hasattr(config, "allow_rnn") and not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu"):
        settings["allow_rnn"] = True
    if keeps_static_graphs():
        settings["automatic_dynamic_exclusion_guard"] = True
    # A mark in profiles, whether one is taken or not: 16 of 60 Python calls of a compiled call (17 to 15 us). After a
    # kernel that swept the cache, the code of every one of them comes from memory again.
    if hasattr(config, "record_runtime_overhead"):
        settings["record_runtime_overhead"] = False
    with (
        config.patch(settings),  # type: ignore[no-untyped-call, unused-ignore]
        _quiet_metrics(),
        _traced_instead(sync_batch_norm),
        _experts_grouped(group_experts),
        simplifying_once(),
        views_as_asked(),
        strides_of_indices(),
        no_unread_latencies(),
        no_unread_names(),
        short_guard_of_hooks(told_of_hooks),
        guard_methods(),
        _writes_to_scalars_kept(),
        _packed_sequences_apart(),
        optimizers_whole(),
    ):
        yield


@contextlib.contextmanager
def _packed_sequences_apart() -> Iterator[None]:
    """Break the graph where a packed sequence is padded again: torch 2.11 fails to trace that, and later ones break."""
    import torch
    from torch._dynamo import disallow_in_graph, trace_rules

    padded = getattr(torch._VF, "_pad_packed_sequence", None)
    if padded is None or not torch.__version__.startswith("2.11."):
        yield
        return
    known = id(padded) in trace_rules._disallowed_callable_ids
    disallow_in_graph(padded)
    try:
        with warnings.catch_warnings():  # it says that nobody knows how to trace it
            warnings.filterwarnings("ignore", message="(?s).*_pad_packed_sequence")
            yield
    finally:
        if not known:
            trace_rules._disallowed_callable_ids.remove(id(padded))


def keeps_static_graphs() -> bool:
    """Whether this torch can leave a shape that has a static graph to that graph once a dynamic one fits it as well.

    Without, Dynamo asks the newest graph first, so that one odd batch demotes the usual shape to the dynamic program.
    """
    import torch._dynamo.config as config

    return hasattr(config, "automatic_dynamic_exclusion_guard")


@contextlib.contextmanager
def _traced_instead(sync_batch_norm: Callable[..., Any] | None) -> Iterator[None]:
    """Trace another function where Dynamo meets `apply` of SyncBatchNorm's autograd Function."""
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch.nn.modules._functions import SyncBatchNorm

    original = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if sync_batch_norm is None or self.fn_cls is not SyncBatchNorm:
            return original(self, tx, args, kwargs)
        return UserFunctionVariable(sync_batch_norm).call_function(tx, args, kwargs)  # type: ignore[arg-type, unused-ignore]

    with unittest.mock.patch.object(AutogradFunctionVariable, "call_apply", call_apply):
        yield


@contextlib.contextmanager
def _experts_grouped(group_experts: Callable[..., Any] | None) -> Iterator[None]:
    """Where transformers chooses its loop over experts ("eager"), trace `group_experts(loop, grouped)`.

    The loop runs as often as experts are hit, and on as many rows as each has: TorchDynamo captures neither.
    """
    experts = sys.modules.get("transformers.integrations.moe")
    choose = getattr(getattr(experts, "ExpertsInterface", None), "get_interface", None)
    grouped = getattr(experts, "grouped_mm_experts_forward", None)
    if group_experts is None or choose is None or grouped is None:
        yield
        return
    from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable

    original = UserMethodVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is not choose or len(args) != 2 or not args[0].is_python_constant():
            return original(self, tx, args, kwargs)
        if args[0].as_python_constant() != "eager":
            return original(self, tx, args, kwargs)
        return UserFunctionVariable(group_experts).call_function(  # type: ignore[arg-type, unused-ignore]
            tx, [args[1], UserFunctionVariable(grouped)], {}
        )

    with unittest.mock.patch.object(UserMethodVariable, "call_function", call_function):
        yield


def _writes_to_scalars_kept() -> contextlib.AbstractContextManager[Any]:
    """Keep in-place writes to float64 tensors without dimensions on the CPU in Dynamo's graph.

    Dynamo takes out inputs that are read by `item()` alone, and takes such a write (`buffer.add_(1)`), whose
    result nobody reads, for one of them, so that the buffer stays as it was with any backend. Here it sees inputs only.
    """
    from torch._dynamo.output_graph import OutputGraph

    name = "remove_tensorify_specialized_graphargs"
    original = getattr(OutputGraph, name, None)
    if original is None:
        return contextlib.nullcontext()

    def inputs_alone(self: Any) -> None:
        others = [node for node in self.graph.nodes if node.op != "placeholder" and not node.users]
        hidden = [(node, node.meta.pop("example_value")) for node in others if "example_value" in node.meta]
        original(self)
        for node, value in hidden:
            node.meta["example_value"] = value

    return unittest.mock.patch.object(OutputGraph, name, inputs_alone)


def take_full_numbers(gm: Any, example_inputs: Sequence[Any]) -> list[Any]:
    """Let a graph take what Python's `random` draws as it is passed; returns what the graph is to be traced with.

    Dynamo traces it as a tensor of the default dtype, but passes float64: a kernel would read half of the number.
    """
    import torch
    from torch._dynamo.source import RandomValueSource

    inputs, nodes = list(example_inputs), gm.graph.find_nodes(op="placeholder")
    first = next((node for node in gm.graph.nodes if node.op != "placeholder"), None)
    for place, (node, value) in enumerate(zip(nodes, inputs, strict=False)):
        drawn = isinstance(getattr(node.meta.get("grapharg"), "source", None), RandomValueSource)
        if not drawn or not value.is_floating_point() or value.dtype == torch.float64:
            continue
        inputs[place] = value.to(torch.float64)
        with gm.graph.inserting_before(first):
            narrow = gm.graph.call_method("to", (node, value.dtype))
        narrow.meta["example_value"] = node.meta.get("example_value")
        node.replace_all_uses_with(narrow, delete_user_cb=lambda user, own=narrow: user is not own)
        node.meta["example_value"] = inputs[place]
        gm.recompile()
    return inputs


@contextlib.contextmanager
def _quiet_metrics() -> Iterator[None]:
    """Keep Dynamo's metrics from logging an error: those of torch 2.11 cannot write functions among its settings.

    Inductor's settings are left out everywhere: it has no part in our frames, and to write them takes a millisecond.
    """
    import torch._dynamo.utils as utils

    names = ["_scrubbed_inductor_config_for_logging"]
    if not _can_log_functions():
        names.append("_get_dynamo_config_for_logging")
    with contextlib.ExitStack() as stack:
        for name in names:
            if hasattr(utils, name):
                stack.enter_context(unittest.mock.patch.object(utils, name, lambda: None))
        yield


@functools.cache
def _can_log_functions() -> bool:
    import torch._dynamo.utils as utils

    own = getattr(utils, "_get_dynamo_config_for_logging", None)
    return own is None or "ignore_logging_functions" in inspect.getsource(own)


def _transformers_logging() -> set[Any]:

    module = sys.modules.get("transformers.utils.logging")
    names = ("warning_once", "warning_advice", "info_once")
    return {getattr(module, name) for name in names if hasattr(module, name)} if module else set()


def graph_break_count() -> int:
    """Graph breaks that Dynamo has counted in this process so far."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def is_off() -> bool:
    """Whether torch.compile is switched off as a whole, by a setting or by `torch.compiler.set_stance`."""
    import torch._dynamo.config as config
    from torch._dynamo import eval_frame

    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")
    return bool(getattr(config, "disable", False)) or stance in ("force_eager", "eager_on_recompile")


def is_traced_by_another() -> bool:
    """Whether a call is made to look at its operations (`torch.jit.trace`, `make_fx`), or at shapes, with fake tensors.

    Compiled code shows none, and its kernels would read memory that is not there.
    """
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    if torch._C._is_tracing() or getattr(*fx_tracing_flag(), False):
        return True
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def is_watched() -> bool:
    """Whether a mode is on that is to see each operation as eager runs it: Dynamo compiles nothing under such."""
    from torch.utils import _python_dispatch as dispatch

    asks: Any = getattr(dispatch, "is_in_any_mode_without_ignore_compile_internals", dispatch.is_in_torch_dispatch_mode)
    return bool(asks())


def fx_tracing_flag() -> tuple[Any, str]:
    """What has the attribute that says whether torch.fx traces, and its name: a thread's own since torch 2.14."""
    from torch.fx import _symbolic_trace

    own: Any = getattr(_symbolic_trace, "_is_fx_tracing_tls", None)
    return (_symbolic_trace, "_is_fx_tracing_flag") if own is None else (own, "flag")


def is_static_input(node: Any, value: Any) -> bool:
    """Whether a graph's input is a parameter, a buffer or an optimizer's state, which no caller chooses."""
    import torch

    told = node.meta.get("tensor_dict") or {}
    return isinstance(value, torch.nn.Parameter) or "_dynamo_static_input_type" in told


def have_no_data(inputs: Sequence[Any]) -> bool:
    """Whether a graph was called with fake tensors of the user's own: Dynamo hands a backend what is real as it is."""
    from torch._subclasses import FakeTensor

    return any(isinstance(value, FakeTensor) for value in inputs)


def goes_on(gm: Any) -> bool:
    """Whether other code of the same call comes behind this graph of Dynamo's, by a graph break."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


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


def registered_backend(name: str) -> Callable[..., Any]:
    """A backend by the name under which it is registered with torch. Raises torch's error for a name that is not."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


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


def aot_compile(
    context: Any, fn: Any, example_inputs: tuple[tuple[Any, ...], dict[str, Any]], backend: Callable[..., Any]
) -> Any:
    """What torch's own `aot_compile` of a compiled function does, with this backend. Raises RuntimeError as it does."""
    from torch._dynamo.aot_compile import aot_compile_fullgraph
    from torch._dynamo.eval_frame import innermost_fn

    if not context.fullgraph:
        raise RuntimeError("Graph breaks are not supported with aot compile. Please use torch.compile(fullgraph=True).")
    hooks = copy.copy(context._hooks)  # torch sets a filter of guards in them
    return aot_compile_fullgraph(
        innermost_fn(fn), example_inputs, hooks=hooks, backend=backend, dynamic=context._dynamic
    )


def serializable_callable() -> Any:
    """The base of what a backend returns to be saved by torch's container."""
    from torch._dynamo.aot_compile_types import SerializableCallable

    return SerializableCallable


def graph_module_of(function: Any) -> Any:
    """The torch.fx.GraphModule whose `__call__` this bound method is; None for all other functions.

    torch gives each such class a `__call__` of its own, which tells of the line where a call fails. Dynamo skips it.
    """
    from torch.fx import GraphModule
    from torch.nn import Module

    owner, name = getattr(function, "__self__", None), getattr(getattr(function, "__func__", None), "__name__", "")
    if not isinstance(owner, GraphModule) or name != "call_wrapped":
        return None
    own = getattr(getattr(type(owner), "_wrapped_call", None), "cls_call", None)
    inherited = getattr(super(type(owner), owner).__call__, "__func__", None)
    # a subclass that has another `__call__` is called by it
    return owner if own is None and inherited is Module.__call__ else None


def raised_by_backend(error: BaseException) -> BaseException | None:
    """What a backend raised, if this is Dynamo's error about it."""
    return getattr(error, "inner_exception", None)


def is_optimized_module(thing: Any) -> bool:
    """What torch.compile(module) returns."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(thing, OptimizedModule)


def holds_graphs(target: Any) -> bool:
    """Whether what a node calls is an operator on graphs (a checkpointed region, a condition)."""
    from torch._ops import HigherOrderOperator

    return isinstance(target, HigherOrderOperator)
