"""Collectives of a process group's backend. Each function starts one and returns a torch.distributed.Work.

`limit_s`: seconds after which it fails; None leaves that to the backend. `op` is a torch.distributed.ReduceOp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcompile.compat.groups import limit


def reduce_op(name: str) -> Any:
    """Reduction by its name in functional collectives: "sum", "avg", ..."""
    import torch.distributed as dist

    return getattr(dist.ReduceOp, name.upper())


def _options(name: str, limit_s: float | None, **values: Any) -> Any:
    import torch.distributed.distributed_c10d as c10d

    options = getattr(c10d, name)()
    for field, value in {"asyncOp": True, **values}.items():  # on a GPU: on the backend's stream, not on this one
        if field != "asyncOp" or hasattr(options, field):
            setattr(options, field, value)
    limit(options, limit_s)
    return options


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
