"""Wrapper functions for a user's module or function, and the modules and functions inside wrappers."""

from __future__ import annotations

import functools
import itertools
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dcompile import compat

_SERIAL = itertools.count()


def fresh_function(of_module: bool, method: Callable[..., Any] | None = None, label: str = "") -> types.FunctionType:
    """Return a function with its own code object that calls its second argument; the first one, `hooked`, names hooks.

    Dynamo keeps compiled code, the recompilation limit and dynamic shapes for each code object. A plain function is
    traced as a whole, with the module's hooks. A bound `_call_impl`, which Module.compile() uses, is not, and for bare
    torch.nn classes it would not be traced at all. `label` begins the function's name in Dynamo's recompile warnings.
    """

    # Dynamo guards on `hooked`. Of hooks themselves, it guards on each that it has traced, never on there being none.

    def call_module(hooked: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        if hooked:
            return target._call_impl(*args, **kwargs)
        return target._call_impl(*args, **kwargs)

    def call(hooked: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        if hooked:
            return target(*args, **kwargs)
        return target(*args, **kwargs)

    def call_method(hooked: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        if hooked:
            return method(target, *args, **kwargs)  # type: ignore[misc]
        return method(target, *args, **kwargs)  # type: ignore[misc]

    entry = call_method if method is not None else call_module if of_module else call
    name = f"{label}_dcompile_entry_{next(_SERIAL)}" if label else f"dcompile_entry_{next(_SERIAL)}"
    code = entry.__code__.replace(co_name=name)
    return types.FunctionType(code, entry.__globals__, name, None, entry.__closure__)


def label_of(thing: Any, method: Callable[..., Any] | None = None) -> str:
    """Return the name of a compiled module, its `method` or a function as an identifier."""
    return re.sub(r"\W+", "_", name_of(thing, method))


def name_of(thing: Any, method: Callable[..., Any] | None = None) -> str:
    """Return the name of a compiled module, its `method` or a function for people: `Llama`, `Llama.loss`, `step`.

    `fully_shard` and `replicate` give the module a class of its own; its base is the user's class.
    """
    if not isinstance(thing, torch.nn.Module):
        return str(getattr(thing, "__qualname__", type(thing).__name__)).rpartition("<locals>.")[2]
    kind, *bases = type(thing).__mro__
    own = next((base for base in bases if kind.__name__ in (f"FSDP{base.__name__}", f"DDP{base.__name__}")), kind)
    return own.__name__ if method is None else f"{own.__name__}.{method.__name__}"


def unwrap_module(module: Any) -> Any:
    """Return the module inside the results of torch.compile."""
    while compat.dynamo.is_optimized_module(module):
        module = module._orig_mod
    return module


def compiled_part(module: torch.nn.Module) -> Any:
    """Return the module to compile: the wrapped one of a DDP module or a DeepSpeed engine, else the module itself."""
    root = unwrap_module(module)
    wraps = isinstance(root, DistributedDataParallel) or compat.deepspeed.is_engine(root)
    return unwrap_module(root.module) if wraps else root


def with_owner(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled bound method as a function that takes, and ignores, its owner first."""

    def method(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return functools.update_wrapper(method, call, updated=())


def twin_of(function: Any) -> Any:
    """Copy a function with its attributes."""
    twin: Any = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, function.__closure__
    )
    functools.update_wrapper(twin, function)
    twin.__dict__["__wrapped__"] = function.__wrapped__
    return twin


def original_function(function: Any) -> Any:
    """Return the function inside dcompile's wrappers."""
    while getattr(function, "_torchdynamo_wrapper_id", None) == id(function) and hasattr(function, "_dcompile_entry"):
        function = function.__wrapped__
    return _without_wrapper_marks(function)


def _without_wrapper_marks(function: Any) -> Any:
    """Return a copy without a wrapper's attributes if `functools.wraps` has copied them, else `function` itself.

    Dynamo would trace the function in these attributes instead.
    """
    if not isinstance(function, types.FunctionType) or "_dcompile_entry" not in function.__dict__:
        return function
    clean = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    clean.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(clean, function)
    for mark in ("_dcompile_entry", "_torchdynamo_inline", "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id"):
        clean.__dict__.pop(mark, None)
    return clean
