"""Compile methods and functions, and a module for torch.compile: the callables that take their place."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from dcompile import compat
from dcompile.capture.callables import original_function, twin_of, with_owner
from dcompile.capture.compiled_model import Settings
from dcompile.capture.entry import Entry, compile_module, module_call
from dcompile.capture.services import Services


def compile_method(module: Module, name: str, settings: Settings, services: Services) -> Callable[..., Any]:
    """Return a compiled replacement for a method that does a part of `module`'s forward; the caller installs it.

    DDP and FSDP around the module, or inside it, are taken over as for its forward. The replacement has a weak
    reference to the module.
    """
    bound: Any = getattr(module, name)
    entry = Entry(bound, module, settings, services, in_place=True, method=bound.__func__)
    owner: Callable[[], Any] = weakref.ref(module)
    apart = compat.dynamo.no_dynamo(entry.__call__, "a module whose parameters dcompile keeps in step")

    def traced(*args: Any, **kwargs: Any) -> Any:
        return apart(*args, **kwargs) if entry.has_taken_over else bound.__func__(owner(), *args, **kwargs)

    return functools.update_wrapper(entry.entrance(traced), bound, updated=())


def compiled_call(module: Module, settings: Settings, services: Services) -> Callable[..., Any]:
    """Return the callable that torch.compile calls for `module`; of a DDP module, compile the wrapped one in place."""
    if isinstance(module, DistributedDataParallel):
        compile_module(module, settings, services)

        eager: Callable[..., Any] = module._call_impl

        def call_ddp(*args: Any, **kwargs: Any) -> Any:
            return eager(*args, **kwargs)

        return call_ddp
    return module_call(module, settings, services)


def compile_function(function: Callable[..., Any], settings: Settings, services: Services) -> Any:
    """Return a compiled replacement for a function; the function itself does not change."""
    function = original_function(function)
    inner = Entry(function, None, settings, services).entrance(function)
    # another object than the one that `__func__` calls: a reference cycle would live until garbage collection
    call: Any = twin_of(inner)
    # torch.compile and torch._dynamo.disable find the function itself through these two
    call._torchdynamo_orig_callable = function
    call._torchdynamo_wrapper_id = id(call)
    if isinstance(function, types.MethodType):
        # a learning rate scheduler calls an optimizer's `step.__func__`, also of a compiled one put in its place
        call.__self__, call.__func__ = function.__self__, with_owner(inner)
    compiled: Callable[..., Any] = call
    return compiled
