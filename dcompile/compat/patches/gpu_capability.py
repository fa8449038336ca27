"""Compile for a GPU that is not in this machine: torch reports its compute capability."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator


@contextlib.contextmanager
def gpu_capability_as(capability: tuple[int, int]) -> Iterator[None]:
    """Let torch report this compute capability for every GPU."""
    import torch

    with unittest.mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability):
        yield
