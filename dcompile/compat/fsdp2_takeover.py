"""Whether FSDP2's hooks can be taken over: private names that this torch lacks, and features that only they support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dcompile.compat.fsdp2 import gather_group, groups_of, replica_group
from dcompile.compat.fsdp2_params import dtensor_spec, reduce_dtype

_STATE = ("_is_root", "_state_ctx", "_lazy_init", "_modules", "_device", "_mp_policy", "_pre_forward_hook_handle",
          "_post_forward_hook_handle")  # fmt: skip
_GROUP = ("fsdp_params", "mesh_info", "post_forward_mesh_info", "reduce_grads", "all_reduce_grads", "is_sharded",
          "_to_sharded", "_to_unsharded", "_reshard_after_forward", "_all_gather_process_group",
          "_reduce_scatter_process_group", "gradient_divide_factor")  # fmt: skip
_PARAM = ("sharded_param", "_sharded_param_data", "sharded_size", "contiguous_sharded_stride", "to_sharded_dtensor",
          "_setattr_on_modules", "_module_info", "init_dtype_attrs", "_orig_size", "fsdp_placement", "is_dtensor",
          "offload_to_cpu", "pin_memory", "padded_sharded_param_size", "mesh_info", "free_unsharded_param")  # fmt: skip


def missing_names(states: list[Any]) -> list[str]:
    """Private names that a takeover needs and this torch lacks."""
    found: dict[str, None] = {}
    for state in states:
        found |= dict.fromkeys(name for name in _STATE if not hasattr(state, name))
        for group in groups_of(state):
            known = {*dir(type(group)), *vars(group)}  # some are properties that raise before the first forward
            found |= dict.fromkeys(name for name in _GROUP if name not in known)
            for param in group.fsdp_params:
                found |= dict.fromkeys(name for name in _PARAM if not hasattr(param, name))
    return list(found)


def runs_in_threads(states: list[Any]) -> bool:
    """Whether ranks are threads of one process, as in torch.testing's threaded process group.

    A compiler changes what all threads share, such as `torch.compiler.is_compiling()`, while other ranks run eagerly.
    """
    return any(_is_threaded(group) for state in states for group in groups_of(state))


def _is_threaded(group: Any) -> bool:
    import torch.distributed as dist

    ranks = gather_group(group) or replica_group(group)
    return isinstance(ranks, dist.ProcessGroup) and dist.get_backend(ranks) == "threaded"


def objections(states: list[Any]) -> list[str]:
    """Features in use by these modules that only FSDP's own hooks support. The modules are initialized."""
    found = dict.fromkeys(asked_for(states))
    for state in states:
        for group in groups_of(state):
            found |= dict.fromkeys(_objections(group))
    return list(found)


def asked_for(states: list[Any]) -> list[str]:
    """Those of `objections` that depend on settings, which may change at any time.

    They are checked before each call.
    """
    found: dict[str, None] = {}
    for state in states:
        if getattr(state._state_ctx, "manual_backward_finalization", False):  # since torch 2.15
            found["backwards are ended by hand (set_manual_backward_finalization)"] = None
        for group in groups_of(state):
            found |= dict.fromkeys(_asked_for(group))
    return list(found)


def _asked_for(group: Any) -> Iterator[str]:
    if type(getattr(group, "_all_gather_comm", None)).__name__ not in ("DefaultAllGather", "NoneType"):
        yield "all-gathers are the user's own, or use memory of their own"
    if type(getattr(group, "_reduce_scatter_comm", None)).__name__ not in ("DefaultReduceScatter", "NoneType"):
        yield "reduce-scatters are the user's own, or use memory of their own"
    if getattr(group, "_all_reduce_hook", None) is not None:
        yield "an all-reduce hook is set"
    if getattr(group, "reduce_scatter_unused_params", False):
        yield "unused parameters take part in reductions (set_reduce_scatter_unused_params)"


def _objections(group: Any) -> Iterator[str]:
    if _is_threaded(group):
        yield "ranks are threads of one process (torch.testing's threaded process group)"
    if len({reduce_dtype(param) for param in group.fsdp_params if param.sharded_param.requires_grad}) > 1:
        yield "gradients reduced together are of several dtypes; MixedPrecisionPolicy(reduce_dtype=...) makes them one"
    for param in group.fsdp_params:
        if param.is_dtensor and dtensor_spec(param) is None:
            yield "this torch keeps the spec of a DTensor parameter elsewhere"
        if getattr(group.mesh_info, "is_spmd_mesh", False):
            yield "parameters are DTensors on a mesh that FSDP's ranks are part of (dp_mesh_dims)"
        # under its second name since torch 2.15
        if getattr(param, "_explicit_grad_dtype", None) or getattr(param, "_has_sharded_grad_dtype_override", False):
            yield "a parameter asks for gradients of a dtype of their own (grad_dtype)"
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            yield "parameters bring all-gather extensions (fsdp_pre_all_gather)"
        if not param.orig_dtype.is_floating_point:
            yield f"a parameter has dtype {param.orig_dtype}"
