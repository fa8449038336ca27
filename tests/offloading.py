"""Models whose activations are offloaded without a planner: what a policy asks for is what the test names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from dcompile import compat
from dcompile.compiler import caching

LARGE = 256
"""Elements from which `marked` offloads a value."""
TARGETS = frozenset(("aten.addmm.default", "aten.mm.default", "aten.gelu.default", "aten.tanh.default"))


def is_large(node: Any) -> bool:
    """Whether a node of the forward is the result of a layer or of an activation, and large, or of symbolic size."""
    value = node.meta.get("val")
    of_forward = node.meta.get("partitioner_tag") != "is_backward"
    large = isinstance(value, torch.Tensor) and (not compat.sizes.is_fixed(value) or value.numel() >= LARGE)
    return of_forward and large and str(node.target) in TARGETS


@contextlib.contextmanager
def marked(asks: Callable[[Any], bool] = is_large) -> Iterator[None]:
    """Offload what `asks` says of the nodes of a joint graph, as a policy of selective checkpointing does.

    Traces are made anew: their names in the cache do not tell what `asks` says.
    """
    anew = mock.patch.object(caching.CachingCompiler, "traces", lambda compiler: None)
    with mock.patch.object(compat.aot, "asks_to_offload", asks), anew:
        yield


def layers(count: int = 3, width: int = 32) -> nn.Sequential:
    """Linear layers with activations between them, whose inputs and results are saved."""
    torch.manual_seed(0)
    made = [
        part for _ in range(count) for part in (nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    ]
    return nn.Sequential(*made, nn.Tanh())
