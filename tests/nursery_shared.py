"""One server of `tests.nursery` for all workers of a run: what it imports and traces takes ten seconds of CPU time.

The process that starts the workers starts it, and outlives them. It is not to import torch for that.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

IMPORTED = ["tests.nursery_imports"]


def started() -> str:
    """Start it here; its address, or "" where each worker has to start its own, if any."""
    server: Any = forkserver._forkserver
    if not _can_be_joined(server) or not _forks():
        return ""
    os.environ["OMP_NUM_THREADS"], before = "1", os.environ.get("OMP_NUM_THREADS")
    try:
        forkserver.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    return str(server._forkserver_address)


def join(address: str) -> None:
    """Let the server at this address, another process's, make this one's forks."""
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # what a fork of one's own server would close
    server.ensure_running = lambda: None


def _can_be_joined(server: Any) -> bool:
    """Python 3.14's asks for a key that it hands to nobody else."""
    names = ("_forkserver_address", "_forkserver_alive_fd", "ensure_running")
    return all(hasattr(server, name) for name in names) and not hasattr(server, "_forkserver_authkey")


def _forks() -> bool:
    """Whether torch is one without CUDA, which does not survive a fork."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] is None
