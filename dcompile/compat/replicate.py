"""torch.distributed._composable.replicate: a DDP that a module gets in its first forward, and its hooks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def state_of(module: Any) -> Any:
    """State that `replicate` of torch.distributed._composable keeps of a module, or None."""
    composable = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None or not isinstance(module, composable.DDP):
        return None
    return composable.replicate.state(module)


def ddp_of(module: Any) -> Any:
    """DDP that `replicate` creates for a module's parameters in its first forward; None if there is none."""
    return getattr(state_of(module), "_ddp", None)


def has_made(ddp: Any, module: Any) -> bool:
    """Whether `replicate` has created this DDP for the module's parameters."""
    return ddp_of(module) is ddp


def _rest_before(module: Any, args: Any, kwargs: Any) -> None:
    """Replacement of replicate's forward pre-hook, which has run already."""


def _rest_after(module: Any, args: Any, output: Any) -> None:
    """Replacement of replicate's forward hook, which will run later."""


@contextlib.contextmanager
def hooks_resting(module: Any) -> Iterator[None]:
    """Disable replicate's hooks while the module's forward is traced, since they would end the graph."""
    state = state_of(module)
    tables = () if state is None else ((module._forward_pre_hooks, _rest_before), (module._forward_hooks, _rest_after))
    places = [
        (table, key, hook, rest)
        for table, rest in tables
        for key, hook in table.items()
        if getattr(hook, "__self__", None) is state
    ]
    for table, key, _, rest in places:
        table[key] = rest
    try:
        yield
    finally:
        for table, key, hook, _ in places:
            table[key] = hook


def run_between_hooks(
    module: Any, state: Any, forward: Callable[[Any, Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `forward(args, kwargs)` between replicate's hooks, as DDP's forward does."""
    from torch.nn.parallel import DistributedDataParallel

    with hooks_resting(module):
        try:
            args, kwargs = state.forward_pre_hook(module, args, kwargs)
            return state.forward_post_hook(module, args, forward(args, kwargs))
        finally:
            DistributedDataParallel._active_ddp_module = None
