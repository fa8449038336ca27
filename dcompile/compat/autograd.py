"""Autograd: what runs inside, after and beside a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from dcompile.errors import DcompileError


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the backward that runs now."""
    Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def record_autograd() -> Iterator[None]:
    """Record autograd information, also inside an operator, where recording is disabled."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    kinds = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
    for kind in kinds:
        exclude = exclude.remove(kind)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.inference_mode(False), torch.enable_grad():
        yield


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks may change its gradient."""
    return bool(tensor._backward_hooks)


def set_only_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register a hook on the gradient of a new leaf, which nobody removes.

    A removable one has a number: `compat.hooks` would look at all modules again because numbers have gone on.
    """
    from collections import OrderedDict

    import torch

    with torch._C.DisableTorchFunctionSubclass():
        tensor._backward_hooks = OrderedDict([(0, hook)])


def have_leaf_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether hooks look at gradients of these parameters before or after they are added to `.grad`."""
    hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(map(any, map(hooks, parameters)))


def accumulator(parameter: torch.Tensor) -> Any:
    """Return the node of autograd that adds to a parameter's `.grad`; the same one as long as somebody holds it."""
    return get_gradient_edge(parameter).node


def will_run(nodes: Iterable[Any]) -> bool:
    """Inside a backward: will it run all of these nodes? torch.autograd.grad runs none that adds to `.grad`."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # see `_will_execute`
        return False


def on_gradient(tensor: torch.Tensor, callback: Callable[[], None]) -> None:
    """Run `callback` inside each backward that reaches this result."""
    tensor.register_hook(lambda _: callback())  # type: ignore[no-untyped-call, unused-ignore]


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the current backward will add to this parameter's .grad (torch.autograd.grad does not)."""
    return bool(_will_execute(parameter))


def is_result(parameter: torch.Tensor) -> bool:
    """Whether this parameter's gradient goes to the caller: of torch.autograd.grad, or of a node called by hand."""
    return _will_execute(parameter) is None


def _will_execute(parameter: torch.Tensor) -> bool | None:
    """Whether the current backward reaches the node that adds to .grad; None if the gradient itself is asked for."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:
        return None  # torch raises it for a leaf that torch.autograd.grad was asked for, and outside of backwards


def keep_for_backward(result: Any, thing: Any) -> None:
    """Keep `thing` alive as long as a backward from `result`, or from a tensor computed from it, is possible."""
    for leaf in tree_leaves(result):
        node = getattr(leaf, "grad_fn", None)
        if node is not None:
            node.metadata["dcompile"] = thing


def backward_task() -> int:
    """Number of the backward that runs now; -1 outside."""
    return int(torch._C._current_graph_task_id())


def is_compiled_backward(node: Any) -> bool:
    """Whether this node of the autograd graph runs a backward that AOTAutograd compiled."""
    return bool(type(node).__name__ == "CompiledFunctionBackward")


def quick_grad_mode() -> Callable[[bool], None]:
    """Setter of this thread's grad mode. torch.no_grad() takes five calls."""
    set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
    return set_grad_enabled


def without_autocast() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return the class of contexts in which operators cast nothing by themselves."""
    import torch

    disabled: Any = torch._C._DisableAutocast
    return disabled  # type: ignore[no-any-return]


def forward_derivatives() -> Any:
    """Return torch's module whose `_current_level` is above -1 while forward-mode derivatives are computed."""
    return forward_ad


def forward_level() -> Callable[[], int]:
    """Return a function for how deep in forward-mode derivatives the caller is: below 0 if it computes none.

    It is no Python call, since programs ask in each call.
    """
    return partial(attrgetter("_current_level"), forward_derivatives())


def refuse_tangents(args: Iterable[Any]) -> None:
    """Raise an error if an argument has a forward-mode derivative, which kernels would drop without a word."""
    unpack: Any = forward_derivatives().unpack_dual
    if any(unpack(x).tangent is not None for x in args if isinstance(x, torch.Tensor)):
        raise DcompileError(
            "dcompile: an input has a forward-mode derivative (torch.autograd.forward_ad), which compiled code drops. "
            "Run this call inside torch.compiler.set_stance('force_eager')."
        )
