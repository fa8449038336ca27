"""FSDP2: the state that `fully_shard` keeps of a module, its groups of parameters, and its hooks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def states_in(module: torch.nn.Module) -> list[Any]:
    """State of each `fully_shard` call on `module` or modules inside it, each once, outer ones first."""
    found = {id(state): state for m in module.modules() if (state := state_of(m)) is not None}
    return list(found.values())


def state_of(module: torch.nn.Module) -> Any:
    """State of `fully_shard` on `module` itself, or None."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    return _get_module_fsdp_state(module)


def outermost_in_forward(module: torch.nn.Module) -> torch.nn.Module | None:
    """Outermost `fully_shard` module around `module`, or itself, while a forward of it runs; else None."""
    state = state_of(module)
    root = None if state is None else getattr(state._state_ctx, "iter_forward_root", None)
    return None if root is None else next(iter(root._modules), None)


def initialize(states: list[Any]) -> None:
    """Run FSDP's lazy initialization, which finds roots, as its first forward would."""
    for state in states:
        if state._is_root is None:
            state._lazy_init()


def groups_of(state: Any) -> list[Any]:
    """Groups of parameters that communicate together."""
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    if several is not None:
        return list(several)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def reshards_partly(group: Any) -> bool:
    """Whether the forward leaves parameters sharded over fewer ranks (reshard_after_forward=N)."""
    return bool(getattr(group, "_use_post_forward_mesh", False))


def part_group(group: Any) -> Any:
    """Process group of those fewer ranks, or None."""
    return group.post_forward_mesh_info.shard_process_group if reshards_partly(group) else None


def is_sharded(mesh_info: Any) -> bool:
    """Whether parameters are sharded; `replicate` of FSDP2's machinery leaves all of them on each rank."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    return isinstance(mesh_info, FSDPMeshInfo)


def gather_group(group: Any) -> Any:
    """Process group over which parameters are gathered; None where each rank has all of them."""
    return group._all_gather_process_group if is_sharded(group.mesh_info) else None


def scatter_group(group: Any) -> Any:
    """Process group over which gradients are reduced to shards; None where each rank has all of them."""
    return group._reduce_scatter_process_group if is_sharded(group.mesh_info) else None


def reshards(group: Any) -> Any:
    """The setting reshard_after_forward."""
    return group._reshard_after_forward


def reductions(group: Any) -> int:
    """Number of copies of gradients that may be in flight (set_reduce_scatter_max_input_buffers)."""
    return int(getattr(group, "reduce_scatter_max_input_buffers", 1))


def is_root(state: Any) -> bool:
    """Whether no other `fully_shard` module contains this one."""
    return bool(state._is_root)


def to_sharded(group: Any) -> None:
    """Make modules show the sharded parameters."""
    group._to_sharded()


def to_unsharded(group: Any) -> None:
    """Make modules show the gathered parameters, until FSDP shards them again."""
    group._to_unsharded()


@contextlib.contextmanager
def forward_undone(module: Any) -> Iterator[None]:
    """Undo the state that forwards in this context leave for a backward: gathered parameters, and order of modules.

    `module` may be None. Otherwise a backward on this rank would gather other groups, or gather in another order.
    """
    groups = [] if module is None else [group for state in states_in(module) for group in groups_of(state)]
    kept = [(group, group.is_sharded, [(order, list(order)) for order in _orders(group)]) for group in groups]
    try:
        yield
    finally:
        for group, was_sharded, orders in kept:
            if was_sharded and not group.is_sharded:
                to_sharded(group)
            known = {id(order) for order, _ in orders}
            for order in _orders(group):
                if id(order) not in known:  # made in this context
                    order.clear()
            for order, before in orders:
                order[:] = before


def _orders(group: Any) -> list[list[Any]]:
    """Lists to which forwards append: positions of a group, and all groups of its root."""
    found = (getattr(group, "_post_forward_indices", None),
             getattr(getattr(group, "comm_ctx", None), "post_forward_order", None))  # fmt: skip
    return [order for order in found if isinstance(order, list)]


def gather_under_way(group: Any) -> tuple[bool, int]:
    """Whether modules show sharded parameters, and the identity of the gather in flight."""
    return bool(group.is_sharded), id(getattr(group, "_all_gather_result", None))


def replica_group(group: Any) -> Any:
    """Process group of ranks that hold the same shards, or None."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

    return group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None


def sums_only(group: Any) -> bool:
    """Whether reductions are plain sums (set_force_sum_reduction_for_comms)."""
    return bool(getattr(group, "force_sum_reduction_for_comms", False))


# --- hooks ------------------------------------------------------------------------------------------------------------

Place = tuple[dict[int, Any], int]
"""Place of a hook: the module's table, and the key there."""


def hook_places(state: Any) -> tuple[list[Place], list[Place]]:
    """Places of FSDP's hooks before and after the forward of this state's modules."""
    before = [module._forward_pre_hooks for module in state._modules]
    after = [module._forward_hooks for module in state._modules]
    handles: list[Any] = []
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handles += getattr(handle, "handles", None) or [handle]  # one handle may represent several modules' hooks
    places = [(handle.hooks_dict_ref(), handle.id) for handle in {id(handle): handle for handle in handles}.values()]
    for table, _ in places:
        _say_order(table)
    return (
        [(table, key) for table, key in places if any(table is other for other in before)],
        [(table, key) for table, key in places if any(table is other for other in after)],
    )


def _say_order(table: dict[int, Any]) -> None:
    """Register the hooks of an OrderedDict again, in the order in which they run.

    FSDP moves its hook before others (`prepend=True`). For a guard on one of them, torch 2.11 looks it up by its
    position in `dict.keys(table)`, which still has the order of registration.
    """
    if list(dict.keys(table)) != list(table):
        hooks = list(table.items())
        table.clear()
        table.update(hooks)


def input_cast(state: Any) -> torch.dtype | None:
    """Dtype to which floating-point inputs of the modules are converted; None for no conversion."""
    dtype: torch.dtype | None = state._mp_policy.param_dtype if state._mp_policy.cast_forward_inputs else None
    return dtype


def output_cast(state: Any) -> torch.dtype | None:
    """Dtype to which floating-point outputs of the modules are converted; None for no conversion."""
    dtype: torch.dtype | None = state._mp_policy.output_dtype
    return dtype


def inputs_to_device(state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Move inputs of a forward to the parameters' device, as FSDP's root does."""
    if state._device.type == "cpu" or not (args or kwargs):
        return args, kwargs
    from torch.distributed.utils import _to_kwargs

    moved, named = _to_kwargs(args, kwargs, state._device, False)
    return moved[0], named[0]


def wait_for_optimizer(state: Any) -> None:
    """Wait for the event that the user has set (set_post_optim_event)."""
    import torch

    context = state._state_ctx
    event = getattr(context, "post_optim_event", None)
    if event is not None:
        torch.get_device_module(state._device).current_stream().wait_event(event)
        context.post_optim_event = None
