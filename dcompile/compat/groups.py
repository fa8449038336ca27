"""Process groups."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


def before_groups_end(callback: Callable[[], None]) -> None:
    """Call a bound method before torch.distributed.destroy_process_group does its work, if its object still lives.

    NCCL waits, when a communicator ends, for every CUDA graph that has collectives of it.
    """
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    stock, weakly = c10d.destroy_process_group, weakref.WeakMethod(callback)

    @functools.wraps(stock)
    def destroy(*args: Any, **kwargs: Any) -> Any:
        alive = weakly()
        if alive is not None:
            alive()
        return stock(*args, **kwargs)

    dist.destroy_process_group = c10d.destroy_process_group = destroy


def group_store(group: Any) -> Any:
    """The key-value store through which this process group was set up: works while collectives do not."""
    import torch.distributed.distributed_c10d as c10d

    return c10d._get_process_group_store(group)


def gathered(tensor: Any, group: Any) -> Any:
    """This tensor of every rank, one behind the other along the first dimension: traced, an operation of the graph."""
    import torch.distributed._functional_collectives as functional

    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # renamed in torch 2.13
    return gather(tensor, 0, group)


def summed(tensor: Any, group: Any) -> Any:
    """The sum of this tensor over the ranks: traced, an operation of the graph."""
    import torch.distributed._functional_collectives as functional

    return functional.all_reduce(tensor, "sum", group)


def weak(thing: Any) -> Callable[[], Any]:
    """A weak reference, or None as a function."""
    return weakref.ref(thing) if thing is not None else (lambda: None)
