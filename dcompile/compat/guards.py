"""Guards of TorchDynamo: cheaper checks, and additional ones."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import unittest.mock
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._dynamo import eval_frame, guards

from dcompile.compat.hooks import saved_are_traced
from dcompile.compat.patches.torch_patch import replaced_attribute

_BEHIND_GUARDS: list[Any] = []
"""Hook that Dynamo calls after its guards, at most one: torch's, to recompile on all ranks if one has to."""


def hooks_behind_guards() -> list[Any]:
    """Hooks that observe each guard check, and may force a recompilation: torch.compiler.set_enable_guard_collectives.

    Every rank runs a collective there. A rank that checks guards in another way would leave the others waiting in it.
    torch returns the current hook only from the function that sets one, so this module records it. The list stays the
    same object.
    """
    stock: Any = getattr(eval_frame, "set_guard_complete_hook", None)
    if stock is None or hasattr(stock, "_dcompile"):
        return _BEHIND_GUARDS

    @functools.wraps(stock)
    def set_hook(hook: Any) -> Any:
        _BEHIND_GUARDS[:] = [] if hook is None else [hook]
        return stock(hook)

    set_hook._dcompile = True  # type: ignore[attr-defined]
    set_hook(stock(None))
    eval_frame.set_guard_complete_hook = set_hook
    for home in map(sys.modules.get, ("torch._dynamo.eval_frame", "torch._dynamo.decorators")):
        if hasattr(home, stock.__name__):
            setattr(home, stock.__name__, set_hook)
    return _BEHIND_GUARDS


class _Through:
    """Guard tree of a builder that shortens functions as they are added."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.root = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_lambda_guard(self, holds: Callable[[Any], bool], *texts: Any) -> None:
        self._manager.root.add_lambda_guard(_shorter(holds), *texts)


def _shorter(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap a check of saved-tensor hooks: it passes at once while none are set, if it passes now without any."""
    hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    if hooks(True) is not None or not holds(None):
        return holds
    return lambda value: hooks(True) is None or holds(value)


def like_these(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Check whether tensors have the dtypes, shapes, strides and devices of these: 0.3 us for 3, 19 for 300.

    It may also return False for other reasons, such as `requires_grad`. None if torch has no such function.
    """
    made = getattr(guards, "TensorGuards", None)
    if made is None:
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    check: Callable[..., bool] = made(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def short_guard_of_hooks(told: bool) -> contextlib.AbstractContextManager[Any]:
    """Make every frame's guard on saved-tensor hooks test first whether there are any.

    torch's guard takes 12 of the 109 us of a small kernel's call with cold caches (docs/lab/runtime.md, R4). With
    `told`, an argument of the frame tells whether it is traced with hooks. If there are none, there is no such guard.
    """
    from torch._dynamo.guards import GuardBuilder

    def shortening(own: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        @functools.wraps(own)
        def guard_hooks(self: Any, guard: Any) -> None:
            if told and not saved_are_traced():
                return
            with unittest.mock.patch.object(self, "guard_manager", _Through(self.guard_manager)):
                own(self, guard)

        return guard_hooks

    return replaced_attribute(GuardBuilder, "AUTOGRAD_SAVED_TENSORS_HOOKS", shortening)


@contextlib.contextmanager
def collect_finalizers(found: list[Any]) -> Iterator[None]:
    """Append the finalizers of guards made in this context to `found`, to be detached once the guards are unused.

    They wait for the end of objects that are compared by identity, often functions that never end, and keep the guards.
    """
    from torch._dynamo import guards

    with unittest.mock.patch.object(guards, "weakref", _Weakref(found)):
        yield


class _Weakref:
    """Module weakref whose finalizers are appended to `found`."""

    def __init__(self, found: list[Any]) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    def finalize(self, *args: Any, **kwargs: Any) -> Any:
        finalizer = weakref.finalize(*args, **kwargs)
        self._found.append(finalizer)
        return finalizer


@contextlib.contextmanager
def guard_tensor_identity(is_kept: Callable[[Any], bool]) -> Iterator[None]:
    """Restrict code that was compiled with a parameter that `is_kept` to the module that has this parameter.

    Dynamo guards properties of parameters, so code after a graph break serves all layers of a class. With this guard,
    it counts recompilations for each module separately.
    """
    from torch._dynamo.guards import GuardBuilder

    own = GuardBuilder.TENSOR_MATCH

    @functools.wraps(own)
    def guard_owner(self: Any, guard: Any, value: Any = None) -> None:
        own(self, guard, value)
        if not is_kept(self.get(guard)):
            return
        source, owner = guard.originating_source, None
        while source is not None:
            asked = source.make_guard(GuardBuilder.ID_MATCH)
            base = getattr(source, "base", None)
            # guard its owner, and the argument that led to it; a parameter passed without an owner is guarded itself
            if isinstance(self.get(asked), torch.nn.Module) and (owner is None or base is None):
                owner = source
                _once(self, asked)
            source = base
        if owner is None:
            _once(self, guard.originating_source.make_guard(GuardBuilder.ID_MATCH))

    with unittest.mock.patch.object(GuardBuilder, "TENSOR_MATCH", guard_owner):
        yield


@contextlib.contextmanager
def guard_methods() -> Iterator[None]:
    """Make every frame guard that the methods it traces are still those of their classes.

    Dynamo compiles a module's `forward` as a separate frame, so a new one is new code. It does not guard methods that
    it traces inside a frame, but kernel and adapter libraries replace `forward` in classes. A guard is one comparison
    of identities, 50 ns, for each class and method.
    """
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator as Inlining

    own: Any = Inlining.inline_call

    def inline_call(parent: Any, func: Any, args: Any, *more: Any, **keywords: Any) -> Any:
        _guard_method(parent, getattr(func, "fn", None), args)
        return own(parent, func, args, *more, **keywords)

    with unittest.mock.patch.object(Inlining, "inline_call", inline_call):
        yield


def _guard_method(translator: Any, function: Any, args: Sequence[Any]) -> None:
    """Guard on a method of the first argument's class, if `function` is one."""
    if not args or not isinstance(function, types.FunctionType):
        return
    value, source = _traced(args[0])
    name = None if source is None else _method_name(type(value), function)
    if name is None:
        return
    _install(translator, type(value), name, source)
    if name == "forward" and isinstance(value, torch.nn.Module):
        _install(translator, type(value), "__call__", source)  # Dynamo skips Module's own


def _install(translator: Any, owner: type, name: str, source: Any) -> None:
    """Guard on a class attribute, once for all objects of the class."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, TypeSource

    known: dict[tuple[type, str], Any] = translator.output.__dict__.setdefault("_dcompile_methods", {})
    guard = known.get((owner, name))  # of the first such object; guards are needed again where tracing restarts
    if guard is None:
        method = AttrSource(TypeSource(source), name)
        known[owner, name] = guard = method.make_guard(GuardBuilder.ID_MATCH)
    install_guard(guard)


def _traced(variable: Any) -> tuple[Any, Any]:
    """Object that Dynamo knows an argument to be, and its source for guards, None for objects made while tracing."""
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():  # read without realizing it, which would add a guard
            found = getattr(variable, "_cache", None)
            return getattr(found, "value", None), getattr(found, "source", None)
        variable = variable.realize()
    if not isinstance(variable, UserDefinedObjectVariable):  # modules included
        return None, None
    return variable.value, variable.source


def _method_name(owner: type, function: types.FunctionType) -> str | None:
    """Name under which a class has this function as a method, or as the getter of a property; None if it has not."""
    for parent in owner.__mro__:
        for name in (function.__name__, *vars(parent)):
            found = vars(parent).get(name)
            if found is function or (isinstance(found, property) and found.fget is function):
                return name if getattr(owner, name, None) is found else None
    return None


def _once(builder: Any, guard: Any) -> None:
    """Guard on an identity, unless this builder has done so before."""
    asked: set[str] = builder.__dict__.setdefault("_dcompile_asked", set())
    if guard.name not in asked:
        asked.add(guard.name)
        builder.ID_MATCH(guard)
