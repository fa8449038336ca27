"""Frames that TorchDynamo has compiled whole, run as soon as their guards hold, without Dynamo's evaluation of frames.

Dynamo replaces the interpreter's evaluation of frames for each call, which takes some thirty calls of its own to switch
on and off. Code without a graph break needs no such thing once its guards hold: nothing is left in it to be compiled.
The guards are all asked, by the same tree of Dynamo's. torch's own `aot_compile` runs compiled frames in this way.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

GRAPH, REST = "__compiled_fn", "__resume_at"
"""How Dynamo's code calls graphs, and functions for what comes behind a graph break."""


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """Compiled code as a function of its own, and its guards."""

    run: Callable[..., Any]
    holds: Callable[[Mapping[str, Any]], bool]
    guards: Any
    """Dynamo takes its entry in the cache out of here when it drops that: at a reset, or since what it guards died."""


class Frames:
    """The compiled code of one function, the last used first, as Dynamo itself keeps it."""

    def __init__(self, function: types.FunctionType) -> None:
        self.ways: tuple[_Way, ...] = ()
        self._function = function
        self._waiting: list[_Way] = []
        self._state = _State()

    def add(self, guarded: Any) -> None:
        """What Dynamo has just compiled for the function. It serves from the next `settle` on."""
        way = _way(guarded, self._function)
        if way is not None:
            self._waiting.append(way)

    def settle(self) -> None:
        """A call is through whose frames Dynamo saw itself."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self.ways = (*reversed(waiting), *(way for way in self.ways if way.guards.cache_entry is not None))

    def find(self, scope: dict[str, Any]) -> Callable[..., Any] | None:
        """The code whose guards hold for these arguments, by name; None where Dynamo has to see the call itself.

        That is so while something else traces (its modes see what runs, or the evaluation of frames is another's), and
        after `torch.compiler.set_stance`. Asked here, for a call of Python's takes as long as some kernels.
        """
        state = self._state
        if (
            state.dynamo._stance is not state.stance
            or state.callback() is not None
            or state.modes()
            or state.is_jit_tracing()
            or state.fx._is_fx_tracing_flag
        ):
            return None
        for way in self.ways:
            if way.guards.cache_entry is not None and way.holds(scope):
                if way is not self.ways[0]:
                    self.ways = (way, *(other for other in self.ways if other is not way))
                return way.run
        return None


def _way(guarded: Any, function: types.FunctionType) -> _Way | None:
    """`function` with the code that Dynamo has made of all of it."""
    root: Any = getattr(guarded.guard_manager, "root", None)
    names = set(_names(guarded.code))
    if not hasattr(root, "check") or not hasattr(guarded.guard_manager, "cache_entry"):
        return None
    if any(name.startswith(REST) for name in names) or guarded.code.co_freevars != function.__code__.co_freevars:
        return None
    known = function.__globals__
    scope = {name: known[name] for name in names if name in known} | {"__builtins__": known["__builtins__"]}
    for name in names:
        if name.startswith(GRAPH):
            scope[name] = _innermost(scope[name])
    run = types.FunctionType(guarded.code, scope, function.__name__, None, function.__closure__)
    return _Way(run, root.check, guarded.guard_manager)


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


class _State:
    """Where to ask whether a call just now means what Dynamo's callback would make of it."""

    def __init__(self) -> None:
        import torch
        import torch._dynamo.config as config
        from torch._C._dynamo.eval_frame import get_eval_frame_callback
        from torch._dynamo import eval_frame
        from torch.fx import _symbolic_trace

        self.dynamo: Any = eval_frame
        self.fx: Any = _symbolic_trace
        self.callback = get_eval_frame_callback
        self.modes, self.is_jit_tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
        now = eval_frame._stance
        usual = (now.stance, now.skip_guard_eval_unsafe, now.backend) == ("default", False, None)
        known = usual and not config.compiled_autograd and hasattr(_symbolic_trace, "_is_fx_tracing_flag")
        self.stance = now if known else None
        """The stance to find; none is, where this one is not the usual."""
