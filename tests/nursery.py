"""Processes that are born with everything imported: forks of a server that has run next to nothing.

Importing torch, Dynamo and transformers takes seconds of CPU time, and the first trace one more. What is forked from
the server is as good as a process that has just done so. It has compiled one linear layer with ATen's kernels, loaded
no kernel of dcompile's, and is in no process group. Workers of pytest, and scripts that tests start with
`sys.executable`, compile first without that. CUDA does not survive a fork: where torch is built for it, processes start
from nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch

from tests import nursery_shared


def context() -> BaseContext:
    """To start processes with; `born` is to come first in them."""
    if torch.version.cuda is not None:
        return get_context("spawn")
    found = get_context("forkserver")
    found.set_forkserver_preload(nursery_shared.IMPORTED)
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


@functools.cache
def python() -> str:
    """A command to use in place of `sys.executable`: what it starts is a fork, too."""
    if context().get_start_method() == "spawn" or not hasattr(os, "pidfd_open"):
        return sys.executable
    from tests import nursery_python  # imports this module

    folder = tempfile.TemporaryDirectory(prefix="nursery")
    address, command = f"{folder.name}/server", Path(folder.name) / "python"
    client = Path(__file__).parent / "nursery_client.py"
    words = [sys.executable, "-IS", str(client), address, str(command), sys.executable]
    command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    command.chmod(0o700)
    here, there = context().Pipe()
    server: Any = context().Process(target=nursery_python.serve, args=(address, there), daemon=True)
    with starting():
        server.start()
    there.close()
    here.recv()  # it listens
    atexit.register(folder.cleanup)
    atexit.register(here.close)  # ends the server
    return str(command)
