"""FSDP2: what `fully_shard` keeps of a module, its groups, parameters and hooks, and whether these can be taken over.

Modules and groups come first. Parameters follow: their shards, their dtypes, stand-ins for gathered ones, and the
gradients added to them. The last part finds private names that this torch lacks, and features that only FSDP2's own
hooks support.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.utils import _to_kwargs
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcompile.compat import shard_extensions
from dcompile.compat.autograd import backward_task
from dcompile.compat.dispatch_watch import STANDS_IN
from dcompile.compat.dynamo import is_optimized_module
from dcompile.compat.patches.on_demand import FORWARD


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


COMPILED = "_dcompile_compiled"
"""Attribute of a root's context while a compiled forward of the root runs."""


def context_of(state: Any) -> Any:
    """What all states of a root have in common."""
    return state._state_ctx


def current_pass(context: Any) -> Any:
    """Identity of the backward, or else of the root's forward, that runs now; None outside.

    Forwards are told apart by `on_demand.tell_forwards_apart`; the one in which that begins is the first.
    """
    if (task := backward_task()) >= 0:
        return task
    outside = context.iter_forward_root is None and COMPILED not in vars(context)
    return None if outside else vars(context).setdefault(FORWARD, object())


@contextlib.contextmanager
def compiled_forward(state: Any) -> Iterator[None]:
    """Tell a forward of a root apart whose own hooks are replaced; a part's has its root's around."""
    context = vars(state._state_ctx)
    if not is_root(state) or COMPILED in context:
        yield
        return
    context[FORWARD] = context[COMPILED] = object()
    try:
        yield
    finally:
        del context[COMPILED]


def let_wrappers_be_traced(modules: Iterable[torch.nn.Module]) -> None:
    """Let Dynamo trace through torch.compile's modules among these that `fully_shard` has sharded.

    Dynamo knows their class, but not the one that `fully_shard` derives from it, whose call it skips.
    """
    for module in modules:
        kind, call = type(module), torch.nn.Module.__call__
        if is_optimized_module(module) and state_of(module) is not None and kind.__call__ is not call:
            module.__class__ = type(kind.__name__, (kind,), {"__call__": call})


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


def end_gather(group: Any) -> bool:
    """Make modules show the sharded parameters, and wait for a gather in flight; return whether there was anything.

    FSDP's next gather would take the result of one in flight, whose parameters may be old by then.
    """
    in_flight = getattr(group, "_all_gather_result", None) is not None
    if in_flight:
        group.wait_for_unshard()
    if group.is_sharded:
        return in_flight
    to_sharded(group)
    return True


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


def superseded(states: list[Any]) -> Iterator[str]:
    """Settings in use that say when FSDP's own hooks gather, which has no meaning for programs that gather."""
    prefetches = {
        f"set_modules_to_{kind}_prefetch"
        for kind in ("forward", "backward")
        if any(getattr(state, f"_states_to_{kind}_prefetch", ()) for state in states)
    }
    if prefetches:
        yield f"{', '.join(sorted(prefetches))}: compiled programs start their gathers by their own schedule"
    if not all(getattr(group, "reshard_after_backward", True) for state in states for group in groups_of(state)):
        yield "set_reshard_after_backward(False): each forward gathers parameters again"


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
    moved, named = _to_kwargs(args, kwargs, state._device, False)
    return moved[0], named[0]


def wait_for_optimizer(state: Any) -> None:
    """Wait for the event that the user has set (set_post_optim_event)."""
    context = state._state_ctx
    event = getattr(context, "post_optim_event", None)
    if event is not None:
        torch.get_device_module(state._device).current_stream().wait_event(event)
        context.post_optim_event = None


# --- parameters -------------------------------------------------------------------------------------------------------


def keep_versions(states: list[Any]) -> None:
    """Keep version counters of a gathered parameter's parts unchanged where all-gather extensions write them.

    FSDP does the same for the parts that it writes. The backward gathers the same values again. For a tensor subclass,
    eager saves the whole, whose counter then does not change. A compiled graph saves the parts, which autograd would
    take for modified.
    """
    for param in (param for state in states for group in groups_of(state) for param in group.fsdp_params):
        known = not hasattr(param, "init_unsharded_param") or "init_unsharded_param" in vars(param)
        if not known and shard_extensions.is_extended(param):
            param.init_unsharded_param = _uncounted(weakref.ref(param))


def _uncounted(reference: Callable[[], Any]) -> Callable[[], None]:
    def init_unsharded_param() -> None:
        param = reference()
        parts = tuple(_parts(getattr(param, "_unsharded_param", None)))
        with _unsafe_preserve_version_counter(parts) if parts else contextlib.nullcontext():
            type(param).init_unsharded_param(param)

    return init_unsharded_param


def _parts(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside a tensor subclass, at any depth; none for plain tensors."""
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


def arriving_parameter(param: Any) -> torch.nn.Parameter | None:
    """Parameter like what arrives for one with an all-gather extension, without memory; None for others."""
    gather = shard_extensions.scaled_gather(param)
    return None if gather is None else _empty(param, param._orig_size, gather.dtype)


def _empty(param: Any, size: Any, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    """Parameter without memory. `dtype`: of one that gets no gradient."""
    tensor = torch.empty(size, dtype=dtype or compute_dtype(param), device=param.device)
    tensor.untyped_storage().resize_(0)
    made = torch.nn.Parameter(tensor, requires_grad=dtype is None and param.sharded_param.requires_grad)
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


def made_of_gathered(param: Any) -> Callable[..., Any] | None:
    """Function that makes the parameter from the gathered one; None if they are the same.

    Shards of another dimension than the first are concatenated along it. For tensor parallelism, a DTensor is made. A
    parameter with an all-gather extension is made of two more tensors: what arrives, and its scale.
    """
    if shard_extensions.is_extended(param):
        return _made_of_bytes(param)
    unpermuted, parallel = _concatenation(param), dtensor_of(param)
    if unpermuted is None or parallel is None:
        return unpermuted or parallel
    return lambda gathered: parallel(unpermuted(gathered))


def _made_of_bytes(param: Any) -> Callable[..., Any]:
    reference, dtype, extension = weakref.ref(param), compute_dtype(param), type(param._sharded_local_tensor)

    class Received(torch.autograd.Function):
        """What the extension makes of what arrived; the gradient is that of the parameter in the compute dtype."""

        @staticmethod
        def forward(ctx: Any, virtual: Any, data: Any, scale: Any) -> Any:
            return shard_extensions.received(reference(), data, scale, dtype)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0], None, None

    # what the receipt says of traces that are not kept
    Received.__module__, Received.__qualname__ = extension.__module__, f"{extension.__qualname__}.fsdp_post_all_gather"

    def made_of_bytes(virtual: Any, data: Any, scale: Any) -> Any:
        return Received.apply(virtual, data, scale)  # type: ignore[no-untyped-call, unused-ignore]

    return made_of_bytes


def _concatenation(param: Any) -> Callable[[Any], Any] | None:
    sizes, dim, whole = _shard_sizes(param), param.fsdp_placement.dim, param._orig_size
    if sizes is None:
        return None
    shards, shard = sizes

    def unpermuted(gathered: Any) -> Any:
        return gathered.view(shards, *shard).movedim(0, dim).reshape(whole)

    return unpermuted


def shown_parameter(param: Any, virtual: torch.nn.Parameter, sent: Sequence[Any] = ()) -> torch.nn.Parameter:
    """Parameter that modules show during tracing: `virtual`, or a stand-in for the tensor made of it and `sent`."""
    if sent:
        data, scale = (tensor.detach() for tensor in sent)
        made = shard_extensions.received(param, data, scale, compute_dtype(param))
        return torch.nn.Parameter(made, requires_grad=virtual.requires_grad)
    parallel = dtensor_of(param)
    if parallel is None and _shard_sizes(param) is None:
        return virtual
    whole = _empty(param, param._orig_size)
    if parallel is None:
        return whole
    return torch.nn.Parameter(parallel(whole.detach()), requires_grad=virtual.requires_grad)


def visible_parameter(param: Any) -> torch.nn.Parameter:
    """Parameter that the module currently shows."""
    info = param._module_info
    found: torch.nn.Parameter | None = info.module._parameters.get(info.param_name)
    return getattr(info.module, info.param_name) if found is None else found


def owners(param: Any) -> list[torch.nn.Module]:
    """Modules that hold the parameter."""
    return [param._module_info.module, *param._module_info.shared_modules]


def show(param: Any, instead: torch.nn.Parameter) -> None:
    """Show another tensor in its place, in all modules that share it.

    FSDP's own function takes twice as long: it asks how each module sets attributes.
    """
    info, usual = param._module_info, torch.nn.Module
    kind: Any = type(info.module)
    if info.shared_modules or kind.__setattr__ is not usual.__setattr__:
        param._setattr_on_modules(instead)
    else:
        info.module._parameters[info.param_name] = instead


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
    data = stored_shard(param)
    if param.offload_to_cpu:
        data = data.to(param.device, non_blocking=True)
    dtype = compute_dtype(param)
    return data if data.dtype == dtype else data.to(dtype)


def stored_shard(param: Any) -> torch.Tensor:
    """This rank's shard where it is stored, in its own dtype."""
    return shard_extensions.plain(param._sharded_param_data)


def shard_address(param: Any) -> int:
    """Address of this rank's shard."""
    return stored_shard(param).data_ptr()


@contextlib.contextmanager
def reducing(groups: Sequence[Any]) -> Iterator[None]:
    """Reduce gradients of these groups in this context, whatever is set for later backwards."""
    kept = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = True
    try:
        yield
    finally:
        for group, reduces, all_reduces in kept:
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


def is_offloaded(param: Any) -> bool:
    """Whether the shard and its gradient are stored in CPU memory."""
    return bool(param.offload_to_cpu)


def add_gradient(param: Any, shard: torch.Tensor) -> Any:
    """Set or add to the sharded parameter's .grad, and run its hooks, as FSDP does after a reduction.

    If the gradient is copied to CPU memory, and nothing reads it during the backward, the copy is asynchronous. The
    result is then an event to wait for before the backward ends, otherwise None.
    """
    if shard.dtype != param.orig_dtype:
        shard = shard.to(param.orig_dtype)
    new = shard.as_strided(param.sharded_size, param.contiguous_sharded_stride, shard.storage_offset())
    sharded, arrival = param.sharded_param, None
    hooks = (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values()
    if param.offload_to_cpu and new.device.type != "cpu":
        new, arrival = _to_cpu(new, param.pin_memory and sharded.grad is None and not hooks)
    if sharded.grad is None:
        sharded.grad = _sharded_dtensor(param, new)
    else:
        sharded.grad._local_tensor += new
    for hook in hooks:
        hook(sharded)
    return arrival


def _sharded_dtensor(param: Any, local: torch.Tensor) -> Any:
    """Make `param.to_sharded_dtensor(local)` without DTensor's __init__, whose wrappers take 12 of its 20 us."""
    kind = _dtensor()
    return kind.__new__(kind, local, param._sharding_spec, requires_grad=False)


@functools.cache
def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor  # importing it for each gradient takes a fifth of its time

    return DTensor


def take_gradient(param: Any) -> torch.Tensor | None:
    """Take a gradient of the gathered parameter from FSDP, from backwards that did not reduce it; None if it has none.

    The opposite of `keep_gradient`.
    """
    leaf, kept = vars(param).get("_unsharded_param"), vars(param).get("unsharded_accumulated_grad")
    if kept is not None:
        param.unsharded_accumulated_grad = None
    elif leaf is not None:
        kept, leaf.grad = leaf.grad, None
    if kept is None:
        return None
    whole: torch.Tensor = param._get_grad_inner_tensor(kept)
    sizes = _shard_sizes(param)
    return whole if sizes is None else torch.cat(whole.chunk(sizes[0], param.fsdp_placement.dim))


def keeps_partial_sums(group: Any) -> bool:
    """Whether FSDP keeps gradients that are summed up among some ranks only (set_requires_all_reduce)."""
    return getattr(group, "_partial_reduce_output", None) is not None


def keep_gradient(param: Any, gathered: torch.Tensor) -> None:
    """Pass a gathered gradient to FSDP, from backwards that did not reduce it."""
    made = None if shard_extensions.is_extended(param) else made_of_gathered(param)
    whole = gathered if made is None else made(gathered)
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
        data, gather = param._sharded_param_data, shard_extensions.scaled_gather(param)
        dtype = compute_dtype(param) if gather is None else gather.dtype
        param.init_all_gather_outputs([data.numel()], [dtype], _shard_count(param), param.device)
        if gather is not None:
            shard_extensions.describe_gather(param, gather)
        param.init_unsharded_param()
        param.free_unsharded_param()
    return param._unsharded_param


def _to_cpu(tensor: torch.Tensor, later: bool) -> tuple[torch.Tensor, Any]:
    """Copy to CPU memory.

    `later`: to pinned memory on the current stream; the copy is complete after the returned event.
    """
    copy = tensor.to("cpu", non_blocking=later)
    return copy, torch.get_device_module(tensor.device).current_stream().record_event() if later else None


# --- takeover ---------------------------------------------------------------------------------------------------------

_STATE = ("_is_root", "_state_ctx", "_lazy_init", "_modules", "_device", "_mp_policy", "_pre_forward_hook_handle",
          "_post_forward_hook_handle")  # fmt: skip
_GROUP = ("fsdp_params", "mesh_info", "post_forward_mesh_info", "reduce_grads", "all_reduce_grads", "is_sharded",
          "_to_sharded", "_to_unsharded", "wait_for_unshard", "_reshard_after_forward", "_all_gather_process_group",
          "_reduce_scatter_process_group", "gradient_divide_factor")  # fmt: skip
_PARAM = ("sharded_param", "_sharded_param_data", "sharded_size", "contiguous_sharded_stride", "_sharding_spec",
          "_setattr_on_modules", "_module_info", "init_dtype_attrs", "_orig_size", "fsdp_placement", "is_dtensor",
          "offload_to_cpu", "pin_memory", "padded_sharded_param_size", "mesh_info", "free_unsharded_param",
          "_get_grad_inner_tensor")  # fmt: skip


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
    ranks = gather_group(group) or replica_group(group)
    return isinstance(ranks, dist.ProcessGroup) and dist.get_backend(ranks) == "threaded"


def objections(states: list[Any]) -> list[str]:
    """Features in use by these modules that only FSDP's own hooks support. The modules are initialized."""
    found = dict.fromkeys(asked_for(states))
    if _are_pipelined(states):
        found["torch.distributed.pipelining reduces gradients itself, after the last microbatch"] = None
    for state in states:
        for group in groups_of(state):
            found |= dict.fromkeys(_objections(group))
    return list(found)


def _are_pipelined(states: list[Any]) -> bool:
    """Are modules of these states a stage of a pipeline? It calls FSDP's functions by hand when its backwards end."""
    base = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    if base is None:
        return False
    inside = {id(module) for state in states for module in state._modules}
    stages = (thing.submod for thing in gc.get_objects() if issubclass(type(thing), base))
    return any(id(module) in inside for stage in stages for module in stage.modules())


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
        if shard_extensions.is_extended(param):
            reason = shard_extensions.objection(param)
            if reshards_partly(group):
                reason = reason or "reshard_after_forward=N with all-gather extensions (fsdp_pre_all_gather)"
            if reason:
                yield reason
        if not param.orig_dtype.is_floating_point:
            yield f"a parameter has dtype {param.orig_dtype}"
