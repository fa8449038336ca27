"""Hooks of modules, which TorchDynamo traces but whose absence it does not guard, and hooks of gradients."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._functorch._aot_autograd.utils import saved_tensors_hooks_are_inlineable
from torch.nn import Module
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from dcompile.compat.autograd import has_hooks
from dcompile.compat.dispatch_watch import saved_tensor_hooks

OWN = "dcompile_own"
"""Attribute of dcompile's own hooks of an optimizer's step."""
_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""Tables of how hooks are called, by numbers of their own: code of one module would take another's for absent."""


class Hooks:
    """Kinds of hooks that the modules of one root have, checked before each call.

    All registrations share one counter. While it does not change, hooks can only have been removed. Then it suffices to
    check the few tables that held any, instead of four per module.
    """

    def __init__(self, root: Module) -> None:
        self._root = weakref.ref(root)
        self._counter = RemovableHandle
        self._last_id = -1
        self._held: list[tuple[str, Any]] = []

    def kinds(self) -> str:
        """Text to guard on; "" if there are no hooks at all."""
        if self._counter.next_id != self._last_id:
            self._last_id = self._counter.next_id
            root = self._root()
            self._held = [*_held_for_all(), *(() if root is None else _held(root))]
        if not self._held:
            return ""
        return " ".join(name for name, table in self._held if table)


def active_hook_kinds(hooks: Hooks | None) -> str:
    """Text that a call's function receives: kinds of a module's hooks, and what programs do for saved-tensor hooks."""
    kinds = "" if hooks is None else hooks.kinds()
    if saves_on_cpu():
        return f"{kinds} save on cpu"
    return f"{kinds} saved tensors" if saved_are_traced() else kinds


def saves_on_cpu() -> bool:
    """Whether the innermost saved-tensor hooks are those of `torch.autograd.graph.save_on_cpu`."""
    found = saved_tensor_hooks()
    pack = None if found is None else found[0]
    names = getattr(pack, "__module__", ""), getattr(pack, "__qualname__", "").partition(".")[0]
    return names == ("torch.autograd.graph", "save_on_cpu")


def saved_hooks_run() -> bool:
    """Whether hooks run on what autograd saves now, by code that may read it on the host."""
    import torch

    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextlib.contextmanager
def no_saved_hooks() -> Iterator[None]:
    """Save tensors as they are, whatever hooks are on; what autograd saves inside has none."""
    import torch

    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def saved_are_traced() -> bool:
    """Whether there are saved-tensor hooks that are graphs, which become part of a program."""
    return saved_tensors_hooks_are_inlineable(saved_tensor_hooks())


def has_hooks_around(module: Module) -> bool:
    """Whether a call of a module runs hooks before or after its forward, its own or those for all modules."""
    return bool(_held_for_all()) or any(module.__dict__.get(kind) for kind in _KINDS)


def outermost_caller(module: Module) -> Module:
    """Outermost module in whose call this one is called now, and which contains it; else itself."""
    code, frame, found = type(module)._wrapped_call_impl.__code__, sys._getframe(1), module
    while frame is not None:
        if frame.f_code is code:
            found = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return found if any(part is module for part in found.modules()) else module


class GradientHooks:
    """Parameters with hooks on their gradients, checked in each backward.

    Their registrations use the same counter. While it does not change, only parameters that had hooks may have some.
    """

    def __init__(self, parameters: Mapping[int, Callable[[], Any]]) -> None:
        self._parameters = parameters
        self._counter = RemovableHandle
        self._last_id = -1
        self._held: list[int] = []

    def numbers(self, ours: Mapping[int, Any]) -> list[int]:
        """Numbers of the parameters with hooks. `ours`: parameters on which dcompile has one hook."""
        asked: Iterable[int] = self._held
        if self._counter.next_id != self._last_id:
            self._last_id, asked = self._counter.next_id, self._parameters
        self._held = [number for number in asked if self._has_hooks(number, int(number in ours))]
        return self._held

    def _has_hooks(self, number: int, ours: int) -> bool:
        parameter = self._parameters[number]()
        if parameter is None:
            return False
        behind = parameter._post_accumulate_grad_hooks
        return has_hooks(parameter) or (behind is not None and len(behind) > ours)


def _held_for_all() -> list[tuple[str, Any]]:
    """Nonempty tables of hooks for all modules."""
    tables = ((f"all{kind}", getattr(torch_module, f"_global{kind}")) for kind in _KINDS)
    return [(name, table) for name, table in tables if table]


def _held(root: Module) -> list[tuple[str, Any]]:
    """Nonempty tables of the modules below `root`, named by the order of traversal. 2.5 us a module."""
    found: list[tuple[str, Any]] = []
    modules, seen = [root], {id(root)}
    for number, module in enumerate(modules):
        known = module.__dict__
        found += [(f"{number}{kind}", known[kind]) for kind in _KINDS + _FLAGS if known.get(kind)]
        for child in known.get("_modules", {}).values():  # a traced TorchScript module has none of its own
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return found


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of the user run before an optimizer's step, those of all optimizers included."""
    found = (*optimizer._optimizer_step_pre_hooks.values(), *torch_optimizer._global_optimizer_pre_hooks.values())
    return any(not hasattr(hook, OWN) for hook in found)


def are_steps_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether others than torch's schedulers see each call of an optimizer's step: hooks after it, or a wrapper."""
    found = (*optimizer._optimizer_step_post_hooks.values(), *torch_optimizer._global_optimizer_post_hooks.values())
    wrapper = optimizer.__dict__.get("step")
    is_other = wrapper is not None and not hasattr(wrapper, "_wrapped_by_lr_sched")
    return is_other or any(not hasattr(hook, OWN) for hook in found)


def own_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return the function of an optimizer's class that makes a step, without what torch wraps around it."""
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def stand_in(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer of the same class with the same attributes, but without hooks, and without a GradScaler."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
    for name in ("grad_scale", "found_inf"):
        made.__dict__.pop(name, None)
    return made


def mark_own(hook: Any) -> Any:
    """Mark a hook of an optimizer's step as dcompile's own, which changes no gradient."""
    setattr(hook, OWN, True)
    return hook
