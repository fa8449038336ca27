"""torch.compile's spec of argument sizes: `dynamic_shapes`, called `shapes_spec` until torch 2.14.

A spec names parameters of the user's function. Dynamo looks them up among the locals of the traced frame. The frame
that we give it has only `*args` and `**kwargs`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module

NAMES = ("dynamic_shapes", "shapes_spec")
"""Names of the argument, newest first."""


def argument() -> str | None:
    """Name of the argument in this torch; None if it has none."""
    known = inspect.signature(torch.compile).parameters
    return next((name for name in NAMES if name in known), None)


def requested_spec(given: Mapping[str, Any]) -> dict[str, Any]:
    """Spec that was given under one of its names, under this torch's name.

    Raises TypeError if torch has no such argument, or if it was given under both names.
    """
    found = {name: value for name, value in given.items() if value is not None}
    if not found:
        return {}
    if len(found) > 1:
        raise TypeError("dcompile: shapes_spec and dynamic_shapes are names of one argument; give one of them")
    (name, spec), known = next(iter(found.items())), argument()
    if known is None:
        raise TypeError(f"dcompile: torch {torch.__version__} has no {name} in torch.compile; leave it out")
    return {known: spec}


def of_context(context: Any) -> dict[str, Any]:
    """Spec of a torch.compile call, if one was given."""
    known = argument()
    spec = None if known is None else getattr(context, f"_{known}", None)
    return {} if spec is None or known is None else {known: spec}


def with_attached(target: Any, limits: Mapping[str, Any]) -> Mapping[str, Any]:
    """`limits`, with the spec that `@dynamic_spec` has attached to a function or a module's forward.

    Raises ValueError, as torch does, if a spec was given as well.
    """
    known = argument()
    if known is None:
        return limits
    from torch.fx.experimental import dynamic_spec

    resolve = getattr(dynamic_spec, "_resolve_dynamic_shapes", None)  # since torch 2.15
    spec = None if resolve is None else resolve(target, limits.get(known))
    return limits if spec is None else {**limits, known: spec}


def for_entry(limits: Mapping[str, Any], function: Callable[..., Any]) -> Any:
    """Spec for a frame that passes `*args` and `**kwargs` on to `function`; None without one."""
    spec = next((limits[name] for name in NAMES if limits.get(name) is not None), None)
    if spec is None:
        return None
    from torch.fx.experimental.dynamic_spec import ParamsSpec, ShapesSpec

    whole: Any = spec if isinstance(spec, ShapesSpec) else ShapesSpec(spec)
    params = whole._params
    if params is None:
        return whole
    by_place: list[Any] = []
    for name, parameter in inspect.signature(_named(function), follow_wrapped=False).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            by_place.append(params._named_args.get(name))
    by_place += params._varargs or []
    by_name = {**params._named_args, **(params._varkw or {})}
    moved = ParamsSpec()
    moved._varargs, moved._varkw = by_place, by_name
    return ShapesSpec(moved, assumptions=whole.assumptions)


def _named(function: Any) -> Callable[..., Any]:
    """Function whose parameters a spec names: for a module, and for the methods that call it, its forward."""
    owner = getattr(function, "__self__", function)
    calls_it = function is owner or getattr(function, "__name__", "") in ("_call_impl", "_wrapped_call_impl")
    forward: Callable[..., Any] = owner.forward if isinstance(owner, Module) and calls_it else function
    return forward


def in_entry(spec: Any) -> contextlib.AbstractContextManager[Any]:
    """Settings of Dynamo while it traces the frame for which `for_entry` made a spec."""
    if spec is None:
        return contextlib.nullcontext()
    import torch._dynamo.config as config

    name = next(name for name in ("_dynamic_shapes_spec", "_shapes_spec") if hasattr(config, name))
    return config.patch({name: spec})  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
