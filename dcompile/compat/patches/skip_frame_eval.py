"""Frames that TorchDynamo has compiled whole, run as soon as their guards hold, without Dynamo's evaluation of frames.

Dynamo replaces the interpreter's evaluation of frames for each call, which takes some thirty calls of its own to switch
on and off. Code without a graph break needs no such thing once its guards hold: nothing is left in it to be compiled.
The guards are all asked, by the same tree of Dynamo's. torch's own `aot_compile` runs compiled frames in this way.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcompile.compat.dynamo import fx_tracing_flag
from dcompile.compat.guards import hooks_behind_guards
from dcompile.compat.hooks import active_hook_kinds

if TYPE_CHECKING:
    from dcompile.compat.hooks import Hooks

GRAPH, REST = "__compiled_fn", "__resume_at"
"""How Dynamo's code calls graphs, and functions for what comes behind a graph break."""
HELPERS = "__import_torch_dot__dynamo_dot_utils"
"""How it calls the module that has functions for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _CompiledCode:
    """Compiled code as a function of its own, and its guards."""

    run: Callable[..., Any]
    again: Callable[..., Any]
    """The same where it was this one that ran last: its graph notes nothing, and asks nothing that is known by now."""
    holds: Callable[[Mapping[str, Any]], bool]
    guards: Any
    """Dynamo takes its entry in the cache out of here when it drops that: at a reset, or since what it guards died."""


class CallTarget:
    """What compiled calls are of: a function, or a module; weakly, if what is to be called belongs to the module."""

    __slots__ = ("kept", "ref")

    def __init__(self, thing: Any, *, weakly: bool = False) -> None:
        self.kept = None if weakly else thing
        self.ref: Callable[[], Any] = weakref.ref(thing) if weakly else lambda: None

    def weaken(self) -> None:
        """Hold it weakly from now on."""
        if self.kept is not None:
            self.ref, self.kept = weakref.ref(self.kept), None

    def thing(self) -> Any:
        """The function or module; None if that has gone."""
        return self.ref() if self.kept is None else self.kept


def forget_code(code: types.CodeType) -> None:
    """Drop all that Dynamo has compiled for this code, which nobody runs any more.

    Its table of original code, by compiled code, otherwise keeps the one alive for the other, and so both for ever.
    """
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(code)


class Frames:
    """The compiled code of one function, the last used first, as Dynamo itself keeps it."""

    def __init__(self) -> None:
        self.ways: tuple[_CompiledCode, ...] = ()
        self.stance: Any = None
        """The stance of Dynamo's in which they serve."""
        self.last: _CompiledCode | None = None
        """What the last call ran, if it was one of them."""
        self._function: types.FunctionType | None = None
        self._waiting: list[_CompiledCode] = []

    def begin(self, function: types.FunctionType | None) -> None:
        """Hold the code of this function from now on, of no other; or of none at all."""
        self._function, self.ways, self._waiting, self.last = function, (), [], None
        self.stance = None if function is None else _usual_stance()

    def add(self, code: types.CodeType, guarded: Any) -> None:
        """What Dynamo has just compiled for the function that has this code. It serves from the next `settle` on."""
        if self._function is not None and self._function.__code__ is code:
            way = _way(guarded, self._function)
            self._waiting += [] if way is None else [way]

    def settle(self) -> None:
        """A call is through whose frames Dynamo saw itself."""
        self.last = None
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self.ways = (*reversed(waiting), *(way for way in self.ways if way.guards.cache_entry is not None))

    def prefer(self, way: _CompiledCode) -> None:
        """This one runs now, after another: ask it first from now on."""
        self.last = way
        if way is not self.ways[0]:
            self.ways = (way, *(other for other in self.ways if other is not way))


def entrance(
    frames: Frames,
    held: CallTarget,
    whole: Callable[..., Any],
    calls: Collection[Any],
    hooks: Hooks | None,
) -> Callable[..., Any]:
    """A stand-in for what is `held`, with the `hooks` of a module: compiled code once its guards hold.

    `whole` is called where Dynamo has to see the call itself: while something else traces (its modes see what runs, or
    the evaluation of frames is another's), after `torch.compiler.set_stance`, while some thread is in one of `calls`
    (what runs is then a part of these), inside DDP, and where something else is to hear of each look at guards. All of
    it is asked in one function: where a kernel has swept the caches, a call of Python's takes 2 us, as long as a
    hundredth of that kernel (Zen 5).
    """
    import torch
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as callback
    from torch._dynamo import eval_frame
    from torch.nn.parallel import DistributedDataParallel as Ddp

    guarded = hooks_behind_guards()
    modes, is_jit_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
    saving = torch._C._autograd._top_saved_tensors_default_hooks
    tracer, traces = fx_tracing_flag()
    dynamo: Any = eval_frame
    compiler: Any = torch.compiler

    # in one tuple: each variable of this function's would be read from memory of its own, where caches were swept
    looks = modes, is_jit_tracing, saving, tracer, traces
    asked = dynamo, frames, callback, calls, guarded, looks, compiler, hooks, held

    def call(*args: Any, **kwargs: Any) -> Any:
        dynamo, frames, callback, calls, guarded, looks, compiler, hooks, held = asked
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
            )
            and (hooks is None or Ddp._active_ddp_module is None)
        ):
            hooked = ("" if hooks is None else hooks.kinds()) if saving(True) is None else active_hook_kinds(hooks)
            target = held.kept
            if target is None:
                target = held.ref()
            scope = {"hooked": hooked, "target": target, "args": args, "kwargs": kwargs}
            for way in frames.ways:
                if way.guards.cache_entry is not None and way.holds(scope):
                    if way is frames.last:
                        return way.again(hooked, target, *args, **kwargs)
                    frames.prefer(way)
                    return way.run(hooked, target, *args, **kwargs)
        return whole(*args, **kwargs)

    _pass_over(call.__code__)
    return call


def _way(guarded: Any, function: types.FunctionType) -> _CompiledCode | None:
    """`function` with the code that Dynamo has made of all of it."""
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
    direct = {name: getattr(graph, "again", None) or graph for name, graph in graphs.items()}
    run, again = (
        types.FunctionType(guarded.code, scope | called, function.__name__, None, function.__closure__)
        for called in (graphs, direct)
    )
    return _CompiledCode(run, again, root.check, guarded.guard_manager)


class _Helpers:
    """What compiled code calls of Dynamo's, but for sizes and strides, which are a tensor's own methods here.

    Dynamo's functions for them switch its evaluation of frames off and on again; here it is off anyway.
    """

    def __init__(self, helpers: Any) -> None:
        import torch

        self._helpers = helpers
        self.call_size, self.call_stride = torch.Tensor.size, torch.Tensor.stride
        self.call_storage_offset = torch.Tensor.storage_offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._helpers, name)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that code uses, and the functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _innermost(graph: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo switches its evaluation of frames off for, where it is off."""
    from torch._dynamo.eval_frame import innermost_fn

    return innermost_fn(graph)


def _usual_stance() -> Any:
    """What `torch.compiler.set_stance` has set, if it is the usual, and all can be asked that a call depends on."""
    import torch
    import torch._dynamo.config as config
    from torch._dynamo import eval_frame

    now = eval_frame._stance
    usual = (now.stance, now.skip_guard_eval_unsafe, now.backend) == ("default", False, None)
    tracer, traces = fx_tracing_flag()  # a thread's own is there once that thread has traced
    told = traces == "flag" or hasattr(tracer, traces)
    flags = told and hasattr(torch.compiler, "_is_compiling_flag")
    return now if usual and flags and not config.compiled_autograd else None


def _pass_over(code: types.CodeType) -> None:
    """Where Dynamo meets a frame of this code by itself, leave it and all below it to what they are compiled with."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
