"""Run as one rank of a job without the other ranks: process group, environment, and clear errors."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import torch

from dcompile.api import SERVICES
from dcompile.compat import absent_ranks
from dcompile.errors import PrecompileError
from dcompile.explain.sources import source_of_frames
from dcompile.precompile.build_only import BuildLog, services

NEEDS_GPU = (
    "programs for GPUs depend on the GPU that they run on (its operators, its memory, the build of torch): precompile "
    "them on a host with one GPU of the job's kind"
)


class ValueReadError(PrecompileError):
    """Raised where the value of a tensor without memory is read."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"dcompile: {where} reads the value of a tensor, or makes a size of one, and tensors have no memory here; "
            "leave it out of the step that is precompiled, or give fake=False (no --fake), which runs the step"
        )
        self.where = where


@contextlib.contextmanager
def rank_of_job(world_size: int, rank: int, *, fake: bool, path: str | None, log: BuildLog) -> Iterator[None]:
    """Make this process `rank` of a job of `world_size` ranks. Compiled code fills the cache, or the folder `path`.

    With `fake`, tensors have no memory. `log` records the programs. Raises PrecompileError where code needs values or
    another rank.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        stack.enter_context(_environment(world_size, rank))
        stack.enter_context(absent_ranks.process_group(rank, world_size))
        stack.enter_context(absent_ranks.for_all_groups(_refuse_objects))
        if fake:
            stack.enter_context(absent_ranks.without_data())
        stack.callback(SERVICES.reset, SERVICES.set(functools.partial(services, log, not fake, path)))
        try:
            yield
        except Exception as error:
            _explain(error)
            raise
        finally:
            log.seconds = time.perf_counter() - began


def _forget() -> None:
    """Drop compiled code: it refers to a destroyed process group and to tensors without memory."""
    torch.compiler.reset()
    gc.collect()


@contextlib.contextmanager
def _environment(world_size: int, rank: int) -> Iterator[None]:
    """Set torchrun's variables, as for the only rank of a host."""
    ours = {
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _refuse_objects(name: str) -> NoReturn:
    where = source_of_frames(traceback.extract_stack())
    raise PrecompileError(
        f"dcompile: {name} at {where} asks other ranks for objects, and they are not there: what they would say cannot "
        "be precompiled; leave it out where WORLD_SIZE ranks are not there, or start the job without precompiling"
    )


def _explain(error: BaseException) -> None:
    """Replace torch's error about a missing value or GPU by a PrecompileError."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, PrecompileError):
        return
    where = source_of_frames(traceback.extract_tb(error.__traceback__))
    if any(map(absent_ranks.is_value_read, chain)):
        raise ValueReadError(str(where)) from error
    if any(map(absent_ranks.is_gpu_missing, chain)):
        raise PrecompileError(f"dcompile: {where} uses a GPU; {NEEDS_GPU}") from error
