"""torch.compile's entry point for backend="dcompile", which prepares like dcompile.compile.

torch.compile(..., backend="dcompile") loads this module. From then on it sees every torch.compile call. It handles
those for this backend, and passes all others through unchanged.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from dcompile import compat
from dcompile.api import make_services
from dcompile.capture.compiled_model import CompiledModel, Settings
from dcompile.capture.dynamo_backend import Backend
from dcompile.capture.entry import compile_function, compile_module, compiled_call
from dcompile.config import Config
from dcompile.logs import own_dump

_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")


def dcompile_backend(
    gm: Any, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph alone, as any TorchDynamo backend, for callers that bypass the interception."""
    config = own_dump(Config.make(mode, options))
    model = CompiledModel(Settings(config), make_services(config))
    return Backend(model)(gm, example_inputs)


def handle_compile(context: Any, fn: Any) -> Any:
    """Handle torch.compile(fn): return the compiled callable, or NotImplemented for other backends."""
    if not compat.dynamo.is_compile_context(context):
        return NotImplemented
    backend = compat.dynamo.innermost_backend(context)
    if getattr(backend, "compiler_fn", backend) is not dcompile_backend:
        return NotImplemented
    given = getattr(backend, "kwargs", {})
    config = Config.make(given.get("mode"), given.get("options"))
    if isinstance(fn, Module) and config.in_place:
        return _in_place(fn, config, context)
    if isinstance(fn, Module) or inspect.isclass(fn):
        return NotImplemented  # torch creates its OptimizedModule, and calls again with that module's call
    config = own_dump(config)
    module, limits = _module_of(fn), compat.dynamo.context_limits(context)
    if module is not None and compat.sizes.argument() not in limits:  # Module.compile() passes no module to torch
        limits = dict(compat.sizes.with_attached(module, limits))
    settings = Settings(config, *compat.dynamo.context_settings(context), limits)
    compiled: Any
    if module is not None:
        compiled = compiled_call(module, settings, make_services(config))
    else:
        compiled = compile_function(fn, settings, make_services(config))
    # a module compiled in place holds its compiled call, which must not hold the module in turn
    compiled.aot_compile = _ahead_of_time(
        context, weakref.WeakMethod(fn) if module is not None and inspect.ismethod(fn) else fn, config
    )
    return compiled


def _ahead_of_time(context: Any, fn: Any, config: Config) -> Callable[..., Any]:
    """Method `aot_compile` for the result of torch.compile. `fn` may be a weak reference to a module's method."""

    def aot_compile(example_inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """Compile `fn` for arguments like these. Return an object that can be called and saved.

        It has a backward if gradients are on and an argument, or a parameter of the module, requires one.

        Raises ExportError for programs that cannot be written, and Dynamo's errors for code that it cannot capture.
        """
        from dcompile.aot.aot_compile import AheadOfTimeBackend  # late: few programs are compiled so

        called = fn() if isinstance(fn, weakref.WeakMethod) else fn
        if called is None:
            raise ReferenceError("dcompile: the module of this compiled call is gone; keep it, and compile it again")
        backend = AheadOfTimeBackend(config, make_services(config))
        return compat.dynamo.aot_compile(context, called, example_inputs, backend)

    return aot_compile


def _in_place(module: Module, config: Config, context: Any) -> Module:
    """Handle torch.compile(module) with option in_place: compile the module in place, and return it."""
    config = own_dump(config)
    limits = compat.sizes.with_attached(module, compat.dynamo.context_limits(context))
    settings = Settings(config, *compat.dynamo.context_settings(context), limits)
    compile_module(module, settings, make_services(config))
    return module


def _module_of(fn: Any) -> Module | None:
    """Module that `fn` calls, if it is one of torch's ways to call modules."""
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, Module) and fn.__func__.__name__ in _MODULE_CALLS:
        return owner
    graph_module = compat.dynamo.graph_module_of(fn)
    if isinstance(graph_module, Module):
        return graph_module
    wrapped = getattr(fn, "__wrapped__", None)  # torch wraps bare torch.nn classes in a function first
    return wrapped if isinstance(wrapped, Module) else None


compat.on_demand.intercept_compile(handle_compile)
