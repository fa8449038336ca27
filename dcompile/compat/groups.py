"""Process groups: their stores, time limits and end, and collectives of their backends.

A collective's function starts it and returns a torch.distributed.Work. `limit_s`: seconds after which it fails; None
leaves that to the backend. `op` is a torch.distributed.ReduceOp.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from dcompile.ir.collective_kinds import HOST_LINK

COLLECTIVE_NAMESPACES = ("_c10d_functional", "_dtensor")
"""Namespaces of ops that take the name of a process group."""

_WATCHERS: list[Callable[[Any], None]] = []
_HOLDERS: list[Callable[[], Callable[[], None] | None]] = []
"""Weak references to methods that release process groups' resources."""


def before_groups_end(callback: Callable[[], None], *, first: bool = False) -> None:
    """Call a bound method before process groups end, by destroy_process_group or `abort`, if its object is still alive.

    When a communicator ends, NCCL waits for every CUDA graph that contains its collectives. Dropping a graph waits for
    its kernels. So methods that end waiting kernels come `first`.
    """
    _HOLDERS.insert(0 if first else len(_HOLDERS), weakref.WeakMethod(callback))
    hear_of_destroyed_groups()


def on_destroy(watcher: Callable[[Any], None]) -> None:
    """Call `watcher` with a process group (None: all of them) before it is destroyed."""
    _WATCHERS.append(watcher)
    hear_of_destroyed_groups()


def let_go() -> None:
    """Call the registered methods before process groups end."""
    _HOLDERS[:] = [holder for holder in _HOLDERS if holder() is not None]
    for holder in _HOLDERS:
        if (alive := holder()) is not None:
            alive()


def hear_of_destroyed_groups() -> None:
    """Wrap torch.distributed.destroy_process_group, once."""
    stock: Any = c10d.destroy_process_group
    if getattr(stock, "tells_dcompile", False):
        return

    @functools.wraps(stock)
    def destroy(*args: Any, **kwargs: Any) -> Any:
        group = next(iter((*args, *kwargs.values())), None)
        for tell in _WATCHERS:
            tell(None if group is c10d.GroupMember.WORLD else group)
        let_go()
        return stock(*args, **kwargs)

    destroy.tells_dcompile = True  # type: ignore[attr-defined]
    dist.destroy_process_group = c10d.destroy_process_group = destroy


def exists(group: Any) -> bool:
    """Whether a process group has not been destroyed."""
    return group in c10d._world.pg_map


def can_abort(group: Any) -> bool:
    """Whether pending collectives can be aborted on this rank. Gloo's cannot."""
    kinds = {type(group._get_backend(device)).__name__ for device in getattr(group, "_device_types", ())}
    return hasattr(group, "abort") and kinds != {"ProcessGroupGloo"}


def own_store(store: Any, prefix: str) -> Any:
    """Store with a key prefix and its own connection: a client serves one call at a time, and some calls wait long."""
    try:
        return PrefixStore(prefix, store.clone())
    except (AttributeError, RuntimeError):  # this store cannot be cloned: calls then take turns
        return PrefixStore(prefix, store)


def time_limit(group: Any, device: str) -> float:
    """Seconds after which a collective of this group has failed."""
    options = getattr(group._get_backend(_device(device)), "options", None)
    limit = getattr(options, "_timeout", None) or c10d.default_pg_timeout
    return float(limit.total_seconds())


def functional_sum() -> tuple[Any, Any]:
    """Operators that start a sum over a process group, (tensor, "sum", name), and that wait for its result."""
    return torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default


_GLOO: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()
"""Process group -> type of device -> whether it is Gloo's. The group itself takes 20 us to answer."""


def is_gloo(group: Any, device: str) -> bool:
    """Whether collectives of tensors on this device are Gloo's, for which the CPU waits."""
    known = _GLOO.setdefault(group, {})
    if device not in known:
        known[device] = type(group._get_backend(_device(device))).__name__ == "ProcessGroupGloo"
    return known[device]


@contextlib.contextmanager
def patient(group: Any, device: str, limit_s: float, patience_s: float) -> Iterator[None]:
    """Make Gloo's collectives in this context fail after `patience_s` instead of the group's own limit, `limit_s`.

    Not every collective uses the limit among its options: an all-gather of several tensors does not.
    """
    backend: Any = group._get_backend(_device(device))
    change = getattr(backend, "_set_default_timeout", None)
    if change is None:
        yield
        return
    change(timedelta(seconds=patience_s))
    try:
        yield
    finally:
        change(timedelta(seconds=limit_s))


def _device(name: str) -> Any:
    return torch.device(name)


def abort(group: Any) -> None:
    """Abort the pending collectives on this rank."""
    group.abort()


def group_store(group: Any) -> Any:
    """Key-value store through which this process group was set up. It works while collectives do not."""
    return c10d._get_process_group_store(group)


def named_groups(gm: Any) -> dict[str, str]:
    """Process groups that a graph's collectives name, in order of appearance -> their names in plans.

    torch's names count the groups that a rank has created. Another rank's group of the same kind may have another name.
    """
    names: dict[str, None] = {}
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        if schema is not None and schema.name.partition("::")[0] in COLLECTIVE_NAMESPACES:
            given = zip(schema.arguments, node.args, strict=False)
            names |= dict.fromkeys(v for a, v in given if a.name == "group_name" and isinstance(v, str))
    return {name: f"own{number}" for number, name in enumerate(names)}


def size_of(name: str) -> int:
    """Number of ranks of a process group that an operation of a graph names."""
    resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
    size: int = resolve(name).size()
    return size


def group_by_name(name: str) -> Any:
    """Process group that an operation of a graph names; None if it does not exist any more."""
    resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        return resolve(name)
    except (LookupError, RuntimeError):
        return None


def describe_group(name: str) -> str:
    """Description of a process group for people: its mesh dimension, if any, and its name."""
    if name == HOST_LINK:
        return "the link to host memory"
    said = getattr(group_by_name(name), "group_desc", "") or ""
    if said in ("", "undefined", "default_pg"):
        return f"group {name}"
    return f"{said.removeprefix('mesh_')} (group {name})"


def traced_all_gather(tensor: Any, group: Any) -> Any:
    """All ranks' tensors, concatenated along the first dimension. When traced, an operation of the graph."""
    import torch.distributed._functional_collectives as functional

    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # renamed in torch 2.13
    return gather(tensor, 0, group)


def traced_all_reduce(tensor: Any, group: Any) -> Any:
    """Sum of a tensor over the ranks. When traced, an operation of the graph."""
    import torch.distributed._functional_collectives as functional

    return functional.all_reduce(tensor, "sum", group)


def weak(thing: Any) -> Callable[[], Any]:
    """Weak reference to an object; for None, a function that returns None."""
    return weakref.ref(thing) if thing is not None else (lambda: None)


def reduce_op(name: str) -> Any:
    """Reduction by its name in functional collectives: "sum", "avg", ..."""
    return getattr(dist.ReduceOp, name.upper())


# --- collectives of backends ------------------------------------------------------------------------------------------


def _options(name: str, limit_s: float | None, **values: Any) -> Any:
    options = getattr(c10d, name)()
    for field, value in values.items():
        setattr(options, field, value)
    if limit_s is not None:
        options.timeout = timedelta(seconds=limit_s)
    return options


def start_gather(group: Any, full: Sequence[Any], shards: Sequence[Any], limit_s: float | None) -> Any:
    """Gather each tensor of `shards` from every rank, end to end into those of `full`, in one call."""
    options = _options("AllgatherOptions", limit_s)
    return group.allgather_into_tensor_coalesced(list(full), list(shards), options)


def start_gather_of_one(group: Any, full: Any, shard: Any, limit_s: float | None) -> Any:
    """Gather a flat tensor from every rank, end to end."""
    return group._allgather_base(full, shard, _options("AllgatherOptions", limit_s))


def start_reduce(group: Any, tensor: Any, root: int, op: Any, limit_s: float | None) -> Any:
    """Reduce a tensor to the rank `root` of a group, in place. The other ranks' tensors become undefined."""
    return group.reduce([tensor], _options("ReduceOptions", limit_s, reduceOp=op, rootRank=root))


def start_all_reduce(group: Any, tensors: Sequence[Any], op: Any, limit_s: float | None) -> Any:
    """Reduce tensors over the ranks, in place."""
    if len(tensors) == 1:
        return group.allreduce(list(tensors), _options("AllreduceOptions", limit_s, reduceOp=op))
    return group.allreduce_coalesced(list(tensors), _options("AllreduceCoalescedOptions", limit_s, reduceOp=op))


def start_reduce_scatter(
    group: Any, parts: Sequence[Any], tensors: Sequence[Any], op: Any, limit_s: float | None
) -> Any:
    """Reduce tensors over the ranks, each of which gets its part along the first dimension."""
    options = _options("ReduceScatterOptions", limit_s, reduceOp=op)
    return group.reduce_scatter_tensor_coalesced(list(parts), list(tensors), options)


def start_all_to_all(
    group: Any,
    received: Any,
    sent: Any,
    received_rows: Sequence[int],
    sent_rows: Sequence[int],
    limit_s: float | None,
) -> Any:
    """Exchange rows with each rank: `sent_rows` to each, `received_rows` from each; equal numbers if they are empty."""
    options = _options("AllToAllOptions", limit_s)
    return group.alltoall_base(received, sent, list(received_rows), list(sent_rows), options)


def start_broadcast(group: Any, tensor: Any, source: int, limit_s: float | None) -> Any:
    """Overwrite a tensor with that of one rank of the group."""
    return group.broadcast([tensor], _options("BroadcastOptions", limit_s, rootRank=source))


def multiplied_sum(factor: float) -> Any:
    """Reduction that multiplies each summand by `factor` first; torch 2.11 has no public way to make one."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined, unused-ignore]
