"""torch.distributed._composable: `replicate`, a DDP that a module gets in its first forward, and `checkpoint`.

Both work by hooks of modules. `replicate`'s run around a compiled call, as in DDP's forward.

`checkpoint` has two hooks for each module, of layers that the backward recomputes. TorchDynamo cannot trace these
hooks. It compiles the code between them in pieces, but the recomputation runs eagerly, and so saves other tensors than
the pieces did. In compiled calls, each region is therefore a call of `torch.utils.checkpoint.checkpoint` in the
module's forward. The call becomes part of the graph, or runs eagerly as a whole.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

_HOME = "torch.distributed._composable.checkpoint_activation"
_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks")


def replicate_state(module: Any) -> Any:
    """State that `replicate` of torch.distributed._composable keeps of a module, or None."""
    composable = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None or not isinstance(module, composable.DDP):
        return None
    return composable.replicate.state(module)


def replicate_ddp(module: Any) -> Any:
    """DDP that `replicate` creates for a module's parameters in its first forward; None if there is none."""
    return getattr(replicate_state(module), "_ddp", None)


def is_replicate(ddp: Any, module: Any) -> bool:
    """Whether `replicate` has created this DDP for the module's parameters."""
    return replicate_ddp(module) is ddp


def _skip_before(module: Any, args: Any, kwargs: Any) -> None:
    """Replacement of a forward pre-hook: `replicate`'s has run already, and a checkpointed region needs none."""


def _skip_after(module: Any, args: Any, output: Any) -> None:
    """Replacement of a forward hook: `replicate`'s will run later."""


@contextlib.contextmanager
def hooks_resting(module: Any) -> Iterator[None]:
    """Disable replicate's hooks while the module's forward is traced, since they would end the graph."""
    state = replicate_state(module)
    tables = () if state is None else ((module._forward_pre_hooks, _skip_before), (module._forward_hooks, _skip_after))
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
    with hooks_resting(module):
        try:
            args, kwargs = state.forward_pre_hook(module, args, kwargs)
            return state.forward_post_hook(module, args, forward(args, kwargs))
        finally:
            DistributedDataParallel._active_ddp_module = None


@dataclass(frozen=True, eq=False)
class _Region:
    """One checkpointed module: the places of its two hooks, and its forward as one region."""

    module: Any
    places: tuple[tuple[dict[int, Any], int], ...]
    forward: Callable[..., Any]


class CheckpointedLayers:
    """Modules below one root that have such hooks. The search is repeated after any registration of a hook."""

    def __init__(self, root: Module) -> None:
        self._root = weakref.ref(root)  # compiled code belongs to the module, and must not keep it alive
        self._counter = RemovableHandle
        self._last_id = -1
        self._found: list[_Region] = []

    def as_regions(self) -> contextlib.AbstractContextManager[None]:
        """Context of a compiled call: regions replace the hooks."""
        if self._counter.next_id != self._last_id:
            self._last_id = self._counter.next_id
            root = self._root()
            self._found = [] if root is None or _HOME not in sys.modules else list(_regions(root))
        return self._scope() if self._found else contextlib.nullcontext()

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        hooks = [[table.get(key) for table, key in region.places] for region in self._found]
        forwards = [region.module.__dict__.get("forward") for region in self._found]
        try:
            for region in self._found:
                (before, first), (behind, last) = region.places
                before[first], behind[last] = _skip_before, _skip_after
                region.module.__dict__["forward"] = region.forward.__get__(region.module)
            yield
        finally:
            for region, found, forward in zip(self._found, hooks, forwards, strict=True):
                for (table, key), hook in zip(region.places, found, strict=True):
                    table[key] = hook
                if forward is None:
                    del region.module.__dict__["forward"]
                else:
                    region.module.__dict__["forward"] = forward


def _regions(root: Module) -> Iterator[_Region]:
    for module in root.modules():
        places = [place for table in _HOOK_TABLES for place in _hooks_in(getattr(module, table))]
        if len(places) == len(_HOOK_TABLES):
            before, key = places[0]
            yield _Region(module, tuple(places), _region_of(module, _settings(before[key])))


def _hooks_in(table: dict[int, Any]) -> Iterator[tuple[dict[int, Any], int]]:
    for key, hook in table.items():
        if getattr(hook, "__module__", "") == _HOME:
            yield table, key


def _settings(hook: Any) -> dict[str, Any]:
    """Arguments with which `checkpoint` was called, without defaults."""
    known = {
        name: cell.cell_contents
        for name, cell in zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
        if name != "module"
    }
    usual: dict[str, Any] = {"preserve_rng_state": True, "user_context_fns": None, "debug": False, "early_stop": True}
    usual["determinism_check"] = "default"
    named = {"user_context_fns": "context_fn"}
    return {named.get(name, name): known[name] for name in usual if known.get(name, usual[name]) != usual[name]}


def _region_of(module: Any, settings: dict[str, Any]) -> Callable[..., Any]:
    own = module.__dict__.get("forward")
    forward = type(module).forward

    def region(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **settings, **kwargs)

    return region
