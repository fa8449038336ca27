"""TorchDynamo: compilation of frames, settings, counters, and torch.compile."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import _functorch
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, _symbolic_trace
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.nn import Module
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dcompile.compat.aot_bundle import globals_saved, unread_gradients_left_out
from dcompile.compat.patches.registry import patched
from dcompile.compat.patches.torch_patch import PatchRequest
from dcompile.compat.sizes import of_context


@contextlib.contextmanager
def tracing_settings(
    dynamic: bool | None = None,
    sync_batch_norm: Callable[..., Any] | None = None,
    told_of_hooks: bool = False,
    group_experts: Callable[..., Any] | None = None,
    late_sizes: bool = False,
    sizes_alone: bool = False,
    layers_once: bool = False,
    certain_branches: bool = False,
) -> Iterator[None]:
    """Dynamo's settings while a frame is compiled with dcompile.

    They are restored afterwards, so no other backend sees them. `dynamic` as in torch.compile: sizes are symbols from
    the start, never, or once they have changed. `sync_batch_norm` is traced in place of the autograd Function of
    torch.nn.SyncBatchNorm. `told_of_hooks`: an argument of the frame tells whether hooks for saved tensors are traced
    with it. `group_experts(loop, grouped)` returns the function to trace in place of transformers' loop over experts.
    `late_sizes`: operations with data-dependent result sizes (nonzero, masks) break no graph. `sizes_alone`: with
    `dynamic`, floats of modules and arguments stay constants. `layers_once`: calls of equal layers are traced twice,
    and copied for the others. `certain_branches`: branches on random numbers that go one way break no graph.
    """
    import torch._dynamo.config as config

    settings = _settings_of_tracing(dynamic, late_sizes, sizes_alone)
    request = PatchRequest(
        sync_batch_norm=sync_batch_norm,
        told_of_hooks=told_of_hooks,
        group_experts=group_experts,
        layers_once=layers_once,
        certain_branches=certain_branches,
    )
    with config.patch(settings), patched("frame", request):  # type: ignore[no-untyped-call, unused-ignore]
        yield


def _settings_of_tracing(dynamic: bool | None, late_sizes: bool, sizes_alone: bool) -> dict[str, Any]:
    """Return the settings by name, as far as this torch has them."""
    import torch._dynamo.config as config

    # DDPOptimizer would split the graph at bucket limits and hide the identity of parameters. Models log in their loss
    # (transformers' warning_once): dropping the call keeps the graph whole.
    ignored = set(getattr(config, "ignore_logging_functions", ()))
    ignored |= {logging.Logger.warning, logging.Logger.info, logging.Logger.debug, logging.Logger.error}
    ignored |= _transformers_logging()
    settings: dict[str, Any] = {"optimize_ddp": False, "ignore_logging_functions": ignored}
    if late_sizes:
        settings["capture_dynamic_output_shape_ops"] = True
    if dynamic is not None:
        settings["assume_static_by_default"] = not dynamic
    if sizes_alone and hasattr(config, "specialize_float"):
        settings["specialize_float"] = True
    if dynamic:
        settings["fake_tensor_cache_enabled"] = False  # see sizes.remembering_numbers_alone
    if dynamic is False:
        settings["automatic_dynamic_shapes"] = False
    # torch 2.11 does not guard a parameter while it is the same object: it may have been frozen, converted or
    # transposed. A guard takes 0.1 us; 2.13 checks it in any case.
    if hasattr(config, "skip_tensor_guards_with_matching_dict_tags"):
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    if hasattr(config, "skip_fsdp_guards"):
        settings["skip_fsdp_guards"] = False  # FSDP1: guard a module's training mode like elsewhere
    # Traced code remembers tensors by weak references. Parameters that have some cannot be swapped
    # (torch.__future__.set_swap_module_params_on_conversion). Dynamo drops the references for backends that it knows.
    if hasattr(config, "invalidate_compile_context_weakrefs"):
        settings["invalidate_compile_context_weakrefs"] = True
    # Recurrent layers become dcompile's operators, except under autocast, which knows only torch's own.
    if hasattr(config, "allow_rnn") and not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu"):
        settings["allow_rnn"] = True
    if keeps_static_graphs():
        settings["automatic_dynamic_exclusion_guard"] = True
    # This marks each call for profilers, even without one: 2 of 17 us of a compiled call (docs/lab/runtime.md, R3).
    # After a kernel that evicted the cache, the code of each Python call is fetched from memory.
    if hasattr(config, "record_runtime_overhead"):
        settings["record_runtime_overhead"] = False
    return settings


def keeps_static_graphs() -> bool:
    """Whether this torch keeps a shape with a static graph on that graph when a dynamic graph fits as well.

    Otherwise Dynamo tries the newest graph first, so that one unusual batch moves the usual shape to the dynamic
    program.
    """
    import torch._dynamo.config as config

    return hasattr(config, "automatic_dynamic_exclusion_guard")


def _transformers_logging() -> set[Any]:
    module = sys.modules.get("transformers.utils.logging")
    names = ("warning_once", "warning_advice", "info_once")
    return {getattr(module, name) for name in names if hasattr(module, name)}


def shares_heads_without_mask(key: Any, value: Any) -> bool:
    """Whether the imported transformers gives attention keys and values with fewer heads if there is no mask."""
    shares = getattr(sys.modules.get("transformers.integrations.sdpa_attention"), "use_gqa_in_sdpa", None)
    if shares is None:
        return False
    given = (None, key, value)[: len(inspect.signature(shares).parameters)]  # the value's width counts in newer ones
    return bool(shares(*given))


def optimize(
    backend: Callable[..., Any],
    *,
    fullgraph: bool,
    guard_filter_fn: Callable[..., Any] | None,
    limits: Mapping[str, Any],
) -> Any:
    """Context that compiles a function with `backend`: `context(function)` is the compiled function.

    torch.compile's `dynamic` is for `tracing_settings`: this context would change settings at every call.
    """
    import torch._dynamo

    # Frames after a graph break belong to code that all models of a class share, with one limit on recompilations.
    # Where torch can, give each model its own cache.
    more = {"isolate_recompiles": True} if isolates_recompiles() else {}
    _skip_disabled_functions()
    return torch._dynamo.optimize(  # type: ignore[no-untyped-call, unused-ignore]
        backend=backend, nopython=fullgraph, guard_filter_fn=guard_filter_fn, **more, **limits
    )


def _skip_disabled_functions() -> None:
    """Mark the code of functions that Dynamo leaves out as skipped. `torch._dynamo.reset()` may remove the mark.

    Every compiled graph is called through this code. Otherwise Dynamo is asked about it for each model, which two
    threads must not do at once: one frees what the other writes to (torch 2.13, `isolate_recompiles`).
    """
    from torch._dynamo.eval_frame import skip_code

    disabled: Any = torch._dynamo.disable(lambda: None)  # type: ignore[no-untyped-call, unused-ignore]
    skip_code(disabled.__code__)


def forget_backend(backend: Any) -> None:
    """Remove a backend that serves no compiled code any more from Dynamo's table of all backends."""
    from torch._dynamo import eval_frame

    known: dict[int, Any] = getattr(eval_frame, "cached_backends", {})
    for key, value in list(known.items()):
        if value is backend or innermost(value) is backend:
            known.pop(key, None)


def innermost(backend: Any) -> Any:
    """Backend inside the wrappers that Dynamo puts around it."""
    inside = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "_compiler_fn", None)
    return backend if inside is None else innermost(inside)


def isolates_recompiles() -> bool:
    """Whether this torch can keep compiled code separate for each torch.compile call (2.11 cannot)."""
    from torch._dynamo.eval_frame import _optimize

    return "isolate_recompiles" in inspect.signature(_optimize).parameters


def limits(**given: Any) -> dict[str, Any]:
    """Arguments of torch.compile that are not None. Raises TypeError for one that this torch lacks."""
    asked = {name: value for name, value in given.items() if value is not None}
    known = inspect.signature(torch.compile).parameters
    for name in asked:
        if name not in known:
            raise TypeError(f"dcompile: torch {torch.__version__} has no {name} in torch.compile; leave it out")
    return asked


def context_limits(context: Any) -> dict[str, Any]:
    """recompile_limit, the spec of shapes and the hooks on guards of a torch.compile call, if they were given."""
    hooks = getattr(context, "_hooks", None)
    found = {name: getattr(hooks, name, None) for name in ("guard_export_fn", "guard_fail_fn")}
    found.update(of_context(context))
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
    skipped: Callable[[Any, Any], bool] = lambda code, error: False,
) -> None:
    """Enter `around(code, late)` whenever this context compiles a frame; cached frames do not come here.

    With `late_sizes`, `late` is True: data-dependent sizes are captured. A frame that cannot be compiled with such
    sizes is compiled again with `late` False.

    `compiled` is then called with the code, and with its guards if the whole frame was compiled. After a graph break,
    or for an eager frame, it gets None. It may raise: the frame does not run then.

    `left_to_eager(owner)`: whether a frame, whose `self` is `owner`, runs eagerly this time.
    `skipped(code, error)`: whether a frame that Dynamo cannot capture runs eagerly from now on. The frames that it
    calls are compiled, then.
    """
    inner = getattr(context, "callback", None)
    if not callable(inner) or isinstance(inner, bool):
        return  # TORCHDYNAMO_DISABLE=1: nothing will be compiled, and the context has no callback

    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.types import ConvertFrameReturn

    def callback(frame: Any, *args: Any, **kwargs: Any) -> Any:
        if left_to_eager(frame.f_locals.get("self")):
            return _eager_once()
        with compile_lock:  # `around` changes settings of all threads, whose frames Dynamo compiles under this lock
            breaks = graph_break_count()
            try:
                with around(frame.f_code, late_sizes):
                    result = inner(frame, *args, **kwargs)
            except Exception as error:
                if late_sizes and _is_about_late_sizes(error):
                    breaks = graph_break_count()
                    with around(frame.f_code, False):
                        result = inner(frame, *args, **kwargs)
                elif isinstance(error, Unsupported) and skipped(frame.f_code, error):
                    result = ConvertFrameReturn()
                else:
                    raise
            whole = graph_break_count() == breaks
        compiled(frame.f_code, getattr(result, "guarded_code", None) if whole else None)
        return result

    # Dynamo finds the backend of a cached frame through this attribute
    callback._torchdynamo_orig_backend = getattr(inner, "_torchdynamo_orig_backend", inner)  # type: ignore[attr-defined]
    context.callback = callback


def _eager_once() -> Any:
    """Result of a frame callback for a frame that runs eagerly now, and is offered again next time."""
    from torch._dynamo.types import ConvertFrameReturn

    return ConvertFrameReturn(apply_to_code=False)


def _is_about_late_sizes(error: BaseException) -> bool:
    """Whether capture failed because a size depends on data, which torch's errors say in many ways."""
    text = " ".join(f"{type(error).__name__} {error}" for error in causes(error)).lower()
    return any(word in text for word in ("data-dependent", "datadependent", "data dependent", "unbacked"))


def take_full_numbers(gm: Any, example_inputs: Sequence[Any]) -> list[Any]:
    """Make a graph accept numbers from Python's `random` as they are passed. Return the inputs to trace it with.

    Dynamo traces such a number as a tensor of the default dtype, but passes float64: a kernel would read half of it.
    """
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


def graph_break_count() -> int:
    """Number of graph breaks that Dynamo has counted in this process so far."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def is_off() -> bool:
    """Whether torch.compile is disabled as a whole, by a setting or by `torch.compiler.set_stance`."""
    import torch._dynamo.config as config
    from torch._dynamo import eval_frame

    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")
    return bool(getattr(config, "disable", False)) or stance in ("force_eager", "eager_on_recompile")


def is_traced_by_another() -> bool:
    """Whether a call only records operations (`torch.jit.trace`, `make_fx`), or runs on shapes with fake tensors.

    Compiled code shows no operations, and its kernels would read memory that does not exist. Where torch refuses to
    trace compiled functions with `torch.fx.symbolic_trace`, the answer is False: the call goes to Dynamo, which raises
    the error.
    """
    from torch._dynamo import config

    modes = _get_current_dispatch_mode_stack()
    if torch._C._is_tracing() or any(isinstance(mode, FakeTensorMode | ProxyTorchDispatchMode) for mode in modes):
        return True
    refused = getattr(config, "error_on_nested_fx_trace", True) and not torch.compiler.is_compiling()
    return bool(getattr(*fx_tracing_flag(), False)) and not refused


def is_watched() -> bool:
    """Whether a mode is active that must see each operation of eager code: Dynamo compiles nothing under such modes."""
    asks: Any = getattr(dispatch, "is_in_any_mode_without_ignore_compile_internals", dispatch.is_in_torch_dispatch_mode)
    return bool(asks())


def fx_tracing_flag() -> tuple[Any, str]:
    """Object and name of the attribute that says whether torch.fx traces. Since torch 2.14 it is thread-local."""
    own: Any = getattr(_symbolic_trace, "_is_fx_tracing_tls", None)
    return (_symbolic_trace, "_is_fx_tracing_flag") if own is None else (own, "flag")


def is_static_input(node: Any, value: Any) -> bool:
    """Whether a graph's input is a parameter, a buffer or an optimizer's state, which no caller chooses."""
    told = node.meta.get("tensor_dict") or {}
    return isinstance(value, torch.nn.Parameter) or "_dynamo_static_input_type" in told


def have_no_data(inputs: Sequence[Any]) -> bool:
    """Whether a graph was called with the user's fake tensors. Dynamo passes real tensors to a backend unchanged."""
    return any(isinstance(value, FakeTensor) for value in inputs)


def goes_on(gm: Any) -> bool:
    """Whether other code of the same call follows this graph of Dynamo's, after a graph break."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def graph_breaks(begin: int = 0) -> list[tuple[str, list[Any]]]:
    """Graph breaks of this process from the `begin`-th on: the reason, and the user's frames (innermost last)."""
    import torch._dynamo.output_graph as output_graph

    found = getattr(output_graph, "graph_break_reasons", [])[begin:]
    return [(str(entry.reason), list(entry.user_stack)) for entry in found]


def no_dynamo(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Disable Dynamo for `function`."""
    return torch._dynamo.disable(function, reason=reason)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def is_compile_context(context: Any) -> bool:
    """Whether `context` compiles the function that it is called with, as torch.compile's does."""
    from torch._dynamo.eval_frame import OptimizeContext

    return isinstance(context, OptimizeContext)


def innermost_backend(context: Any) -> Any:
    """Backend that the user passed to the torch.compile call of `context`."""
    from torch._dynamo.eval_frame import innermost_backend as innermost

    return innermost(context.callback) if callable(context.callback) else None


def registered_backend(name: str) -> Callable[..., Any]:
    """Backend by its name in torch's registry. Raises torch's error for an unknown name."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def context_settings(context: Any) -> tuple[bool, bool | None, Callable[..., Any] | None]:
    """fullgraph, dynamic and guard_filter_fn of a torch.compile call."""
    hooks = getattr(context, "_hooks", None)
    return bool(context.fullgraph), context._dynamic, getattr(hooks, "guard_filter_fn", None)


def aot_compile(
    context: Any, fn: Any, example_inputs: tuple[tuple[Any, ...], dict[str, Any]], backend: Callable[..., Any]
) -> Any:
    """Run torch's `aot_compile` of a compiled function with another backend. Raises RuntimeError without fullgraph."""
    from torch._dynamo.aot_compile import aot_compile_fullgraph
    from torch._dynamo.eval_frame import innermost_fn

    if not context.fullgraph:
        raise RuntimeError("Graph breaks are not supported with aot compile. Please use torch.compile(fullgraph=True).")
    hooks = copy.copy(context._hooks)
    if getattr(hooks, "guard_filter_fn", None) is None:
        hooks.guard_filter_fn = _can_be_saved
    with tracing_settings(context._dynamic), unread_gradients_left_out(), globals_saved():
        return aot_compile_fullgraph(
            innermost_fn(fn), example_inputs, hooks=hooks, backend=backend, dynamic=context._dynamic
        )


def _can_be_saved(entries: Sequence[Any]) -> list[bool]:
    """Which guards are saved with a function: torch's choice, without guards on the code of a decorated method.

    torch compares such code by its address, which means nothing in another process, and refuses to save that.
    """
    from torch._dynamo.guards import CheckFunctionManager

    unsaved = CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES
    return [
        not (
            entry.is_global
            or entry.guard_type in unsaved
            or (entry.guard_type == "CONSTANT_MATCH" and isinstance(entry.value, types.CodeType))
        )
        for entry in entries
    ]


def serializable_callable() -> Any:
    """Base class of backends' results that torch's container can save."""
    from torch._dynamo.aot_compile_types import SerializableCallable

    return SerializableCallable


def graph_module_of(function: Any) -> Any:
    """torch.fx.GraphModule whose `__call__` is this bound method; None for all other functions.

    torch gives each such class its own `__call__`, which reports the line of a failing call. Dynamo skips it.
    """
    owner, name = getattr(function, "__self__", None), getattr(getattr(function, "__func__", None), "__name__", "")
    if not isinstance(owner, GraphModule) or name != "call_wrapped":
        return None
    own = getattr(getattr(type(owner), "_wrapped_call", None), "cls_call", None)
    inherited = getattr(super(type(owner), owner).__call__, "__func__", None)
    # a subclass with another `__call__` is called by that
    return owner if own is None and inherited is Module.__call__ else None


def raised_by_backend(error: BaseException) -> BaseException | None:
    """Exception of a backend, if this is Dynamo's error about it."""
    return getattr(error, "inner_exception", None)


def causes(error: BaseException) -> list[BaseException]:
    """An exception and its causes, the innermost last. Dynamo's error about a backend holds that of the backend."""
    found = [error]
    while (cause := raised_by_backend(found[-1]) or found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def is_optimized_module(thing: Any) -> bool:
    """Whether this is the result of torch.compile(module)."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(thing, OptimizedModule)


def leave_vmap(levels: int) -> None:
    """End levels of `torch.vmap` that were entered by nodes of a captured graph."""
    for _ in range(levels):
        _functorch._vmap_decrement_nesting()


def holds_graphs(target: Any) -> bool:
    """Whether a node's target is an operator on graphs (a checkpointed region, a condition)."""
    return isinstance(target, HigherOrderOperator)
