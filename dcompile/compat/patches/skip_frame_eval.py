"""Run fully compiled frames as soon as their guards hold, without Dynamo's frame evaluation.

Dynamo replaces the interpreter's frame evaluation for each call, which takes some thirty calls of its own. Code without
a graph break does not need that once its guards hold, since nothing in it is left to compile. All guards are checked,
in Dynamo's own guard tree. torch's `aot_compile` runs compiled frames in the same way.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    reset_code,
    set_code_exec_strategy,
)
from torch.nn.parallel import DistributedDataParallel as Ddp

from dcompile.compat.autograd import forward_derivatives
from dcompile.compat.dynamo import fx_tracing_flag
from dcompile.compat.guards import hooks_behind_guards
from dcompile.compat.hooks import Hooks, active_hook_kinds

GRAPH, REST = "__compiled_fn", "__resume_at"
"""Prefixes by which Dynamo's code names graphs, and functions for code after a graph break."""
HELPERS = "__import_torch_dot__dynamo_dot_utils"
"""Name by which it calls Dynamo's module of helpers."""


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledCode:
    """Compiled code as a separate function, and its guards."""

    run: Callable[..., Any]
    repeated: Callable[..., Any]
    """Variant for a call whose predecessor ran the same code: its graph skips bookkeeping and checks that are known to
    hold.
    """
    holds: Callable[[Mapping[str, Any]], bool]
    guards: Any
    """Dynamo clears its cache entry in here when it drops the code: at a reset, or when a guarded object has died."""
    owner: Any
    """Whatever the code was compiled for."""

    def fits(self, scope: Mapping[str, Any]) -> bool:
        """Whether Dynamo still has the code, and all guards hold."""
        return self.guards.cache_entry is not None and self.holds(scope)


class CallTarget:
    """Target of compiled calls: a function or a module.

    The reference is weak if the caller's code belongs to the module.
    """

    __slots__ = ("kept", "ref")

    def __init__(self, thing: Any, *, weakly: bool = False) -> None:
        self.kept = None if weakly else thing
        self.ref: Callable[[], Any] = weakref.ref(thing) if weakly else lambda: None

    def weaken(self) -> None:
        """Hold the target by a weak reference from now on."""
        if self.kept is not None:
            self.ref, self.kept = weakref.ref(self.kept), None

    def thing(self) -> Any:
        """The function or module; None if it no longer exists."""
        return self.ref() if self.kept is None else self.kept


def forget_code(code: types.CodeType) -> None:
    """Drop everything that Dynamo has compiled for this code, which is not run any more.

    Otherwise Dynamo's table from compiled to original code keeps both alive forever.
    """
    reset_code(code)


class Frames:
    """Compiled code of one function, most recently used first, as in Dynamo's own cache."""

    def __init__(self) -> None:
        self.ways: tuple[_CompiledCode, ...] = ()
        self.stance: Any = None
        """Dynamo's stance for which the code is valid."""
        self.last: _CompiledCode | None = None
        """Code that the last call ran, if it was one of these."""
        self._function: types.FunctionType | None = None
        self._owner: Any = None
        self._usual: Any = None
        self._waiting: list[_CompiledCode] = []

    def begin(self, function: types.FunctionType, owner: Any, *, direct: bool) -> None:
        """Start to hold the code of this function only. `direct`: whether calls may enter it by themselves."""
        self._function, self.ways, self._waiting, self.last = function, (), [], None
        self._owner, self._usual = owner, _usual_stance()
        self.stance = self._usual if direct else None

    def drop(self) -> None:
        """Enter no code by itself until another call has run."""
        self.ways, self.last, self._waiting = (), None, []

    def add(self, code: types.CodeType, guarded: Any) -> None:
        """Add code that Dynamo has just compiled for this code object. It is used from the next `settle` on."""
        if self._function is not None and self._function.__code__ is code:
            way = _way(guarded, self._function, self._owner)
            self._waiting += [] if way is None else [way]

    def fitting(self, scope: Mapping[str, Any], others: Iterable[Frames]) -> _CompiledCode | None:
        """Code whose guards hold for a call, of this function or of `others`, which is checked first from then on.

        None where Dynamo must see the call itself: see `entrance`.
        """
        if self._usual is None or not _runs_by_itself(self._usual):
            return None
        for frames in (self, *others):
            for way in frames.ways:
                if way.fits(scope):
                    self.prefer(way)
                    return way
        return None

    def settle(self) -> None:
        """End a call whose frames Dynamo has seen itself."""
        self.last = None
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self.ways = (*reversed(waiting), *(way for way in self.ways if way.guards.cache_entry is not None))

    def prefer(self, way: _CompiledCode) -> None:
        """Note that another one of them runs now, and check it first from now on."""
        self.last = way
        if self.ways[:1] != (way,):
            self.ways = (way, *(other for other in self.ways if other is not way))


def entrance(
    frames: Frames,
    held: CallTarget,
    whole: Callable[..., Any],
    calls: Collection[Any],
    hooks: Hooks | None,
) -> Callable[..., Any]:
    """Make a callable for the target `held`, with the `hooks` of a module. It runs compiled code whose guards hold.

    It calls `whole` where Dynamo must see the call itself:

    - while something else traces (its modes see what runs, or frame evaluation is another's);
    - after `torch.compiler.set_stance`;
    - while forward-mode derivatives are computed;
    - while a thread is in one of `calls`, of which the code is then a part;
    - inside DDP, and where something else must observe each guard check.

    One function checks all of that. Where a kernel has evicted the caches, a Python call takes 2 us, a hundredth of
    that kernel's time (Zen 5).
    """
    from torch._dynamo import eval_frame

    guarded = hooks_behind_guards()
    modes, is_jit_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
    saving, callback = torch._C._autograd._top_saved_tensors_default_hooks, get_eval_frame_callback
    tracer, traces = fx_tracing_flag()
    dynamo: Any = eval_frame
    compiler: Any = torch.compiler
    derivatives = forward_derivatives()

    # one tuple: with evicted caches, each closure variable is a separate read from memory
    looks = modes, is_jit_tracing, saving, tracer, traces
    asked = dynamo, frames, callback, calls, guarded, looks, compiler, derivatives, hooks, held

    def call(*args: Any, **kwargs: Any) -> Any:
        dynamo, frames, callback, calls, guarded, looks, compiler, derivatives, hooks, held = asked
        modes, is_jit_tracing, saving, tracer, traces = looks
        if (
            dynamo._stance is frames.stance
            and callback() is None
            and not (
                calls
                or guarded
                or modes()
                or is_jit_tracing()
                or getattr(tracer, traces, False)
                or compiler._is_compiling_flag
                or derivatives._current_level >= 0
            )
            and (hooks is None or Ddp._active_ddp_module is None)
        ):
            hooked = ("" if hooks is None else hooks.kinds()) if saving(True) is None else active_hook_kinds(hooks)
            target = held.kept
            if target is None:
                target = held.ref()
            scope = {"hooked": hooked, "target": target, "args": args, "kwargs": kwargs}
            for way in frames.ways:
                if way.guards.cache_entry is not None and way.holds(scope):  # `fits` would be a call more
                    if way is frames.last:
                        return way.repeated(hooked, target, *args, **kwargs)
                    frames.prefer(way)
                    return way.run(hooked, target, *args, **kwargs)
        return whole(*args, **kwargs)

    _pass_over(call.__code__)
    return call


def _runs_by_itself(stance: Any) -> bool:
    """Whether nothing has to see a call that is made now but what is compiled for it: the conditions of `entrance`."""
    from torch._dynamo import eval_frame

    tracer, traces = fx_tracing_flag()
    return (
        eval_frame._stance is stance
        and get_eval_frame_callback() is None
        and not hooks_behind_guards()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_tracing()
        and not getattr(tracer, traces, False)
        and not torch.compiler._is_compiling_flag
        and forward_derivatives()._current_level < 0
    )


def _way(guarded: Any, function: types.FunctionType, owner: Any) -> _CompiledCode | None:
    """`function` with the code that Dynamo has compiled for all of it; None if it cannot be run directly."""
    root: Any = getattr(guarded.guard_manager, "root", None)
    names = set(_names(guarded.code))
    if not hasattr(root, "check") or not hasattr(guarded.guard_manager, "cache_entry"):
        return None
    if any(name.startswith(REST) for name in names) or guarded.code.co_freevars != function.__code__.co_freevars:
        return None
    known = function.__globals__
    scope = {name: known[name] for name in names if name in known} | {"__builtins__": known["__builtins__"]}
    if HELPERS in scope:
        scope[HELPERS] = _Helpers(scope[HELPERS])
    graphs = {name: _innermost(scope[name]) for name in names if name.startswith(GRAPH)}
    direct = {name: getattr(graph, "repeated", None) or graph for name, graph in graphs.items()}
    run, repeated = (
        types.FunctionType(guarded.code, scope | called, function.__name__, None, function.__closure__)
        for called in (graphs, direct)
    )
    return _CompiledCode(run, repeated, root.check, guarded.guard_manager, owner)


class _Helpers:
    """Dynamo's helpers for compiled code, with a tensor's own methods for sizes and strides.

    Dynamo's functions for these switch its frame evaluation off and on; here it is off anyway.
    """

    def __init__(self, helpers: Any) -> None:
        self._helpers = helpers
        self.call_size, self.call_stride = torch.Tensor.size, torch.Tensor.stride
        self.call_storage_offset = torch.Tensor.storage_offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._helpers, name)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that code uses, including those of functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _innermost(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Function inside Dynamo's wrapper that switches frame evaluation off, where it is off already."""
    from torch._dynamo.eval_frame import innermost_fn

    return innermost_fn(graph)


def _usual_stance() -> Any:
    """Current stance of `torch.compiler.set_stance`, if it is the default and all conditions can be checked."""
    import torch._dynamo.config as config
    from torch._dynamo import eval_frame

    now = eval_frame._stance
    usual = (now.stance, now.skip_guard_eval_unsafe, now.backend) == ("default", False, None)
    tracer, traces = fx_tracing_flag()  # a thread-local exists once its thread has traced
    told = traces == "flag" or hasattr(tracer, traces)
    flags = told and hasattr(torch.compiler, "_is_compiling_flag")
    return now if usual and flags and not config.compiled_autograd else None


def _pass_over(code: types.CodeType) -> None:
    """Make Dynamo skip frames of this code, and leave everything below them to what compiled them."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
