"""FSDP2's parameters: their shards, their dtypes, stand-ins for gathered ones, and the gradients added to them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dcompile.compat.dispatch_watch import STANDS_IN
from dcompile.compat.fsdp2 import groups_of, is_sharded

if TYPE_CHECKING:
    import torch


def keep_versions(states: list[Any]) -> None:
    """Keep version counters of a gathered parameter's parts unchanged where all-gather extensions write them.

    FSDP does the same for the parts that it writes. The backward gathers the same values again. For a tensor subclass,
    eager saves the whole, whose counter then does not change. A compiled graph saves the parts, which autograd would
    take for modified.
    """
    for param in (param for state in states for group in groups_of(state) for param in group.fsdp_params):
        extended = hasattr(getattr(param, "_sharded_local_tensor", None), "fsdp_post_all_gather")
        if extended and hasattr(param, "init_unsharded_param") and "init_unsharded_param" not in vars(param):
            param.init_unsharded_param = _uncounted(weakref.ref(param))


def _uncounted(reference: Callable[[], Any]) -> Callable[[], None]:
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    def init_unsharded_param() -> None:
        param = reference()
        parts = tuple(_parts(getattr(param, "_unsharded_param", None)))
        with _unsafe_preserve_version_counter(parts) if parts else contextlib.nullcontext():
            type(param).init_unsharded_param(param)

    return init_unsharded_param


def _parts(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside a tensor subclass, at any depth; none for plain tensors."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(value):
        return
    for name in value.__tensor_flatten__()[0]:
        part = getattr(value, name)
        if is_traceable_wrapper_subclass(part):
            yield from _parts(part)
        elif not part.is_inference():
            yield part


def compute_dtype(param: Any) -> torch.dtype:
    """Dtype in which the gathered parameter is used."""
    dtype: torch.dtype = param.param_dtype or param.orig_dtype
    return dtype


def reduce_dtype(param: Any) -> torch.dtype:
    """Dtype in which its gradients are reduced. The default is their own; since torch 2.15, that of .grad."""
    own: torch.dtype | None = getattr(param, "unsharded_grad_dtype", None)
    return param.reduce_dtype or own or compute_dtype(param)


def full_name(param: Any, number: int) -> str:
    """Name within the root module, which FSDP finds when it is initialized."""
    return param._param_fqn or f"{param._module_info.param_name}#{number}"


def virtual_parameter(param: Any) -> torch.nn.Parameter:
    """Parameter like the gathered one, but without memory, for tracing. Its elements must not be read."""
    size = _shard_sizes(param)
    gathered = param._orig_size if size is None else (size[0] * size[1][0], *size[1][1:])
    return _empty(param, gathered)


def _empty(param: Any, size: Any) -> torch.nn.Parameter:
    import torch

    tensor = torch.empty(size, dtype=compute_dtype(param), device=param.device)
    tensor.untyped_storage().resize_(0)
    made = torch.nn.Parameter(tensor, requires_grad=param.sharded_param.requires_grad)
    made.untyped_storage().resize_(0)  # of a fake tensor it is another storage
    setattr(made, STANDS_IN, True)
    return made


def is_stand_in(parameter: Any) -> bool:
    """Whether a compiled model has made this in a parameter's place."""
    return hasattr(parameter, STANDS_IN)


def _shard_count(param: Any) -> int:
    """Number of ranks over which the parameter is sharded."""
    return int(param.mesh_info.shard_mesh_size) if is_sharded(param.mesh_info) else 1


def _shard_sizes(param: Any) -> tuple[int, tuple[int, ...]] | None:
    """Number and size of shards where gathering them end to end does not give the parameter yet; else None."""
    shards = _shard_count(param)
    return None if param.fsdp_placement.dim == 0 or shards == 1 else (shards, tuple(param.padded_sharded_param_size))


def dtensor_spec(param: Any) -> Any:
    """Placement of the gathered parameter on a mesh of other ranks (tensor parallelism); None if there is none."""
    return getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)  # until torch 2.12


def dtensor_of(param: Any) -> Callable[[Any], Any] | None:
    """Function that makes a DTensor for modules to compute with from a gathered parameter; None for plain tensors.

    The gradient arrives in the parameter's own placements, as FSDP reduces it.
    """
    if not param.is_dtensor:
        return None
    from torch.distributed.tensor import DTensor

    spec = dtensor_spec(param)
    shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride

    def parallel(local: Any) -> Any:
        return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)

    return parallel


def made_of_gathered(param: Any) -> Callable[[Any], Any] | None:
    """Function that makes the parameter from the gathered one; None if they are the same.

    Shards of another dimension than the first are concatenated along it. For tensor parallelism, a DTensor is made.
    """
    unpermuted, parallel = _concatenation(param), dtensor_of(param)
    if unpermuted is None or parallel is None:
        return unpermuted or parallel
    return lambda gathered: parallel(unpermuted(gathered))


def _concatenation(param: Any) -> Callable[[Any], Any] | None:
    sizes, dim, whole = _shard_sizes(param), param.fsdp_placement.dim, param._orig_size
    if sizes is None:
        return None
    shards, shard = sizes

    def unpermuted(gathered: Any) -> Any:
        return gathered.view(shards, *shard).movedim(0, dim).reshape(whole)

    return unpermuted


def shown_parameter(param: Any, virtual: torch.nn.Parameter) -> torch.nn.Parameter:
    """Parameter that modules show during tracing: `virtual`, or a stand-in for the tensor made of it."""
    import torch

    parallel = dtensor_of(param)
    if parallel is None and _shard_sizes(param) is None:
        return virtual
    whole = _empty(param, param._orig_size)
    if parallel is None:
        return whole
    return torch.nn.Parameter(parallel(whole.detach()), requires_grad=virtual.requires_grad)


def visible_parameter(param: Any) -> torch.nn.Parameter:
    """Parameter that the module currently shows."""
    found: torch.nn.Parameter = getattr(param._module_info.module, param._module_info.param_name)
    return found


def owners(param: Any) -> list[torch.nn.Module]:
    """Modules that hold the parameter."""
    return [param._module_info.module, *param._module_info.shared_modules]


def show(param: Any, instead: torch.nn.Parameter) -> None:
    """Show another tensor in its place, in all modules that share it."""
    param._setattr_on_modules(instead)


def lend_memory(param: Any, virtual: torch.nn.Parameter, gathered: torch.Tensor) -> None:
    """Make the virtual parameter FSDP's unsharded one, with real values, until FSDP frees that."""
    empty, own = virtual.detach(), vars(param).pop("_unsharded_param", None)

    def free_unsharded_param() -> None:
        del param.free_unsharded_param, param._unsharded_param
        if own is not None:
            param._unsharded_param = own
        virtual.data = empty
        setattr(virtual, STANDS_IN, True)
        param.free_unsharded_param()

    delattr(virtual, STANDS_IN)
    virtual.data = gathered
    param._unsharded_param, param.free_unsharded_param = virtual, free_unsharded_param


def has_lent_memory(param: Any) -> bool:
    """Whether FSDP's unsharded parameter is a virtual one."""
    return "free_unsharded_param" in vars(param)


def shard_data(param: Any) -> torch.Tensor:
    """This rank's shard, flat and padded, in the compute dtype. An offloaded shard is copied to the device."""
    data: torch.Tensor = param._sharded_param_data
    if param.offload_to_cpu:
        data = data.to(param.device, non_blocking=True)
    dtype = compute_dtype(param)
    return data if data.dtype == dtype else data.to(dtype)


def stored_shard(param: Any) -> torch.Tensor:
    """This rank's shard where it is stored, in its own dtype."""
    data: torch.Tensor = param._sharded_param_data
    return data


def shard_address(param: Any) -> int:
    """Address of this rank's shard."""
    return int(param._sharded_param_data.data_ptr())


def is_offloaded(param: Any) -> bool:
    """Whether the shard and its gradient are stored in CPU memory."""
    return bool(param.offload_to_cpu)


def add_gradient(param: Any, shard: torch.Tensor) -> Any:
    """Set or add to the sharded parameter's .grad, and run its hooks, as FSDP does after a reduction.

    If the gradient is copied to CPU memory, and nothing reads it during the backward, the copy is asynchronous. The
    result is then an event to wait for before the backward ends, otherwise None.
    """
    shard = shard.to(param.orig_dtype)
    new = shard.as_strided(param.sharded_size, param.contiguous_sharded_stride, shard.storage_offset())
    sharded, arrival = param.sharded_param, None
    hooks = (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values()
    if param.offload_to_cpu and new.device.type != "cpu":
        new, arrival = _to_cpu(new, param.pin_memory and sharded.grad is None and not hooks)
    if sharded.grad is None:
        sharded.grad = param.to_sharded_dtensor(new)
    else:
        sharded.grad._local_tensor += new
    for hook in hooks:
        hook(sharded)
    return arrival


def keep_gradient(param: Any, gathered: torch.Tensor) -> None:
    """Pass a gathered gradient to FSDP, from backwards that did not reduce it."""
    unpermuted = _concatenation(param)
    if param.is_dtensor:
        from dcompile.errors import DcompileError

        name = param._param_fqn
        raise DcompileError(f"dcompile: gradients of {name} of a step without synchronisation are left over")
    whole = gathered if unpermuted is None else unpermuted(gathered)
    if isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):
        leaf = _gathered_leaf(param)
        leaf.grad = whole if leaf.grad is None else leaf.grad + whole
    elif param.unsharded_accumulated_grad is None:
        param.unsharded_accumulated_grad = whole
    else:
        param.unsharded_accumulated_grad += whole


def _gathered_leaf(param: Any) -> Any:
    """Gathered parameter, in whose .grad FSDP accumulates since torch 2.15; created without memory if missing."""
    if not hasattr(param, "_unsharded_param"):
        data, dtype = param._sharded_param_data, compute_dtype(param)
        param.init_all_gather_outputs([data.numel()], [dtype], _shard_count(param), param.device)
        param.init_unsharded_param()
        param.free_unsharded_param()
    return param._unsharded_param


def _to_cpu(tensor: torch.Tensor, later: bool) -> tuple[torch.Tensor, Any]:
    """Copy to CPU memory.

    `later`: to pinned memory on the current stream; the copy is complete after the returned event.
    """
    import torch

    copy = tensor.to("cpu", non_blocking=later)
    return copy, torch.get_device_module(tensor.device).current_stream().record_event() if later else None
