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


def weak(thing: Any) -> Callable[[], Any]:
    """A weak reference, or None as a function."""
    return weakref.ref(thing) if thing is not None else (lambda: None)
