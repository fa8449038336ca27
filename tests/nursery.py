"""Processes that are born with everything imported: forks of a server that has run nothing.

Importing torch, Dynamo and transformers takes seconds of CPU time, and the first trace one more. What is forked from
the server is as good as a process that has just done so: it has compiled nothing with dcompile, loaded none of its
kernels, and is in no process group. CUDA does not survive a fork: where torch is built for it, processes start from
nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.context import BaseContext

import torch


def context() -> BaseContext:
    """To start processes with; `born` is to come first in them."""
    if torch.version.cuda is not None:
        return get_context("spawn")
    found = get_context("forkserver")
    found.set_forkserver_preload(["tests.nursery_imports"])
    return found


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around `Process.start`: the server, too, has one thread and no settings."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def born(environment: dict[str, str]) -> None:
    """In a new process: let it have this environment."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
