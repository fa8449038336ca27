"""Where tests run: on the CPU, or with `pytest --device cuda` on a GPU; TEST_DEVICE says so to processes they start."""

from __future__ import annotations

import os
from typing import TypeVar

import torch

Value = TypeVar("Value")


def device() -> str:
    """The type of the device that inputs and models are on."""
    return os.environ.get("TEST_DEVICE", "cpu")


def there(value: Value) -> Value:
    """The value with each of its tensors on that device; drawn on the CPU, they are the same on each."""
    if device() == "cpu":
        return value
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device()), value)


def seed_cpu_alone() -> None:
    """Let `torch.manual_seed` leave out devices that this torch is not built for: it keeps the caller's stack for each.

    Formatting the stacks takes a millisecond a call, and tests seed thousands of times.
    """
    if torch.version.cuda is None:
        for module in (torch.cuda, torch.xpu, torch.mtia):
            module.manual_seed_all = _seed_nothing


def _seed_nothing(seed: int) -> None:
    """Stand for `manual_seed_all` of a device that is not there."""


def compute_exactly() -> None:
    """float32 means float32: cuDNN would round to 10 bits, and differently in each algorithm that it may choose.

    Without a GPU nothing changes: precision is part of keys, and other processes of a test have torch's default.
    """
    if not torch.cuda.is_available():
        return
    with torch.backends.__allow_nonbracketed_mutation():  # torch's own test utilities freeze its flags for the process
        torch.backends.cudnn.allow_tf32 = False
