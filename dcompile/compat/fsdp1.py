"""FSDP1: FullyShardedDataParallel's state of flat parameters, and its arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

_STATE = ("_is_root", "_handle", "_use_orig_params", "_comm_hook", "_sync_gradients", "_gradient_predivide_factor",
          "_gradient_postdivide_factor", "_fsdp_wrapped_module", "mixed_precision", "process_group")  # fmt: skip
_HANDLE = ("flat_param", "_sharding_strategy", "_offload_params", "_keep_low_precision_grads", "_fwd_bwd_param_dtype",
           "_reduce_dtype", "_use_full_prec_in_eval", "uses_sharded_strategy", "_use_sharded_grad_views",
           "_reset_flat_param_grad_info_if_needed")  # fmt: skip
_FLAT = ("_param_infos", "_shared_param_infos", "_shapes", "_contiguities", "_fqns", "_param_extensions",
         "_numels_with_padding", "_is_padding_mask", "_params", "_is_grad_none_mask", "_sharded_size")  # fmt: skip


def instances_in(module: torch.nn.Module) -> list[Any]:
    """FullyShardedDataParallel modules in `module`, itself included, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is None:
        return []
    return [each for each in module.modules() if isinstance(each, fsdp.FullyShardedDataParallel)]


def initialize(root: Any) -> None:
    """Run FSDP's lazy initialization, which finds the root, as its first forward would."""
    from torch.distributed.fsdp._runtime_utils import _lazy_init

    _lazy_init(root, root)


def missing_names(instances: list[Any]) -> list[str]:
    """Private names that a takeover needs and this torch lacks."""
    found: dict[str, None] = {}
    for instance in instances:
        found |= dict.fromkeys(name for name in _STATE if not hasattr(instance, name))
        handle = getattr(instance, "_handle", None)
        if handle is not None:
            found |= dict.fromkeys(name for name in _HANDLE if not hasattr(handle, name))
            found |= dict.fromkeys(name for name in _FLAT if not hasattr(handle.flat_param, name))
    return list(found)


def objections(root: Any, instances: list[Any]) -> list[str]:
    """Features in use by these modules that only FSDP itself supports.

    If `root` is one of them, they are initialized.
    """
    if root is not instances[0] or not root._is_root:
        return ["FullyShardedDataParallel is not the compiled module itself, or not the outermost"]
    return list(dict.fromkeys(reason for instance in instances for reason in _objections(instance)))


def _objections(instance: Any) -> Iterator[str]:
    if not instance._use_orig_params:
        yield "FullyShardedDataParallel has use_orig_params=False"
        return
    if instance._comm_hook is not None:
        yield "a communication hook is registered"
    handle = instance._handle
    if handle is None:
        return
    if handle._offload_params:
        yield "parameters are kept in CPU memory (CPUOffload)"
    if handle._keep_low_precision_grads:
        yield "gradients are kept in low precision (keep_low_precision_grads)"
    if handle._use_full_prec_in_eval:
        yield "evaluation is in full precision (FSDP_USE_FULL_PREC_IN_EVAL)"
    flat = handle.flat_param
    if not flat.is_floating_point():
        yield f"parameters have dtype {flat.dtype}"
    if not all(flat._contiguities):
        yield "a parameter is not contiguous"
    if any(extension is not None for extension in flat._param_extensions):
        yield "parameters are DTensors already (tensor parallelism)"
    if any(hasattr(param, "_in_backward_optimizers") for param in flat._params):
        yield "an optimizer runs inside the backward"


# --- flat parameters --------------------------------------------------------------------------------------------------


def handle_of(instance: Any) -> Any:
    """Handle of a module's flat parameter, or None if it has none."""
    return instance._handle


def wrapped_module(instance: Any) -> Any:
    """The user's module."""
    return instance._fsdp_wrapped_module


def syncs(instance: Any) -> bool:
    """Whether a backward that runs now reduces gradients."""
    return bool(instance._sync_gradients)


def divisors(instance: Any) -> tuple[float, float]:
    """Divisors of gradients before and after the sum."""
    return instance._gradient_predivide_factor, instance._gradient_postdivide_factor


def names(handle: Any) -> list[str]:
    """Names of the original parameters."""
    return list(handle.flat_param._fqns)


def shapes(handle: Any) -> list[tuple[str, Any]]:
    """(name, shape) of each original parameter."""
    return list(zip(handle.flat_param._fqns, handle.flat_param._shapes, strict=True))


def originals(handle: Any) -> list[Any]:
    """The original parameters."""
    return list(handle.flat_param._params)


def offsets(handle: Any) -> list[int]:
    """Offset of each parameter in the flat one, in elements."""
    found, end = [], 0
    for numel, padding in zip(handle.flat_param._numels_with_padding, handle.flat_param._is_padding_mask, strict=True):
        if not padding:
            found.append(end)
        end += numel
    return found


def places(handle: Any) -> list[list[tuple[torch.nn.Module, str]]]:
    """Modules that hold each parameter, with its name there."""
    flat = handle.flat_param
    found = [[(info.module, info.param_name)] for info in flat._param_infos]
    first = {(id(module), name): index for index, [(module, name)] in enumerate(found)}
    for info in flat._shared_param_infos:
        found[first[id(info.prim_module), info.prim_param_name]].append((info.module, info.param_name))
    return found


def whole_numel(handle: Any, ranks: int) -> int:
    """Elements of the gathered flat parameter, with its padding."""
    return int(handle.flat_param.numel()) * (ranks if handle.uses_sharded_strategy else 1)


def compute_dtype(handle: Any) -> torch.dtype:
    dtype: torch.dtype = handle._fwd_bwd_param_dtype
    return dtype


def reduce_dtype(handle: Any) -> torch.dtype:
    dtype: torch.dtype = handle._reduce_dtype
    return dtype


def shard_data(handle: Any) -> torch.Tensor:
    """This rank's padded shard of the flat parameter, in the compute dtype."""
    data = stored_shard(handle)
    return data if data.dtype == compute_dtype(handle) else data.to(compute_dtype(handle))


def stored_shard(handle: Any) -> torch.Tensor:
    """This rank's padded shard of the flat parameter, in its own dtype."""
    data: torch.Tensor = handle.flat_param.data
    return data


def frees_after_forward(instance: Any) -> bool:
    """Whether the backward gathers parameters again."""
    from torch.distributed.fsdp.api import ShardingStrategy as Strategy

    strategy = getattr(Strategy, instance._handle._sharding_strategy.name)
    return strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD) and not instance._is_root


def replica_group(instance: Any) -> Any:
    """Process group of ranks that hold the same shards, or None."""
    if not instance._handle.uses_sharded_strategy:
        return instance.process_group
    return instance._inter_node_pg if "HYBRID" in instance._handle._sharding_strategy.name else None


def keeps_whole_gradient(handle: Any) -> bool:
    """Whether FSDP keeps a gradient of backwards that did not reduce it (no_sync)."""
    handle._reset_flat_param_grad_info_if_needed()
    flat = handle.flat_param
    return handle.uses_sharded_strategy and flat.grad is not None and flat.grad.size() != flat._sharded_size


def add_gradient(handle: Any, shard: torch.Tensor) -> None:
    """Set or add to the flat parameter's gradient, whose parts become gradients of the original parameters."""
    flat = handle.flat_param
    handle._reset_flat_param_grad_info_if_needed()  # zero_grad sets the original parameters' to None, not this one
    shard = shard.to(flat.dtype)
    if flat.grad is None:
        flat.grad = shard
    else:
        flat.grad += shard
    for index, param in enumerate(flat._params):
        if param.requires_grad:
            flat._is_grad_none_mask[index] = False
    handle._use_sharded_grad_views()


# --- forwards ---------------------------------------------------------------------------------------------------------


def before_forward(root: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Run the root's preparation of a forward: streams, moves and casts of inputs, casts of buffers."""
    from torch.distributed.fsdp._runtime_utils import _root_pre_forward

    moved, named = _root_pre_forward(root, root, args, kwargs)
    return moved, named


def input_cast(instance: Any) -> torch.dtype | None:
    """Dtype to which floating-point inputs of this module are converted; None for no conversion."""
    precision = instance.mixed_precision
    dtype: torch.dtype | None = precision.param_dtype if instance._handle and precision.cast_forward_inputs else None
    return dtype
