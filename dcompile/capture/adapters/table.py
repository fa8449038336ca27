"""ADAPTERS: how models are distributed, a row for each way; the first row that detects its wrapper has the model.

Compiling and planning alike choose by this table. A model that no row detects has the plain adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from dcompile import compat
from dcompile.capture.adapters.ddp import DdpAdapter
from dcompile.capture.adapters.ddp_sync import DdpSync
from dcompile.capture.adapters.fsdp1 import Fsdp1Adapter
from dcompile.capture.adapters.fsdp2 import Fsdp2Adapter
from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.adapters.sharded_sync import ShardedSync
from dcompile.capture.adapters.zero import zero_sync
from dcompile.config import Config


@dataclass(frozen=True, slots=True)
class WrappedModule:
    """A module with the wrappers that are known around it."""

    module: Module
    config: Config
    ddp: Any = None
    """The DDP module in whose forward it runs."""
    engine: Any = None
    """The DeepSpeed engine whose hooks on it are taken over."""

    @property
    def stock(self) -> bool:
        """Whether the user leaves synchronization to the wrapper."""
        return self.config.distributed == "stock"


@dataclass(frozen=True, slots=True)
class AdapterRow:
    """One way to distribute a model."""

    name: str
    detect: Callable[[WrappedModule], Any]
    """What the adapter is made for, such as the wrapper or its state; None if there is none."""
    make: Callable[[Any, WrappedModule], GradientSync]
    """Function from what was detected to the strategy, with its adapter."""


def _ddp(ddp: Any, wrapped: WrappedModule) -> GradientSync:
    replicated = wrapped.module if compat.composable.is_replicate(ddp, wrapped.module) else None
    return DdpSync(DdpAdapter(ddp, wrapped.stock, module=replicated))


def _fsdp2(states: Any, wrapped: WrappedModule) -> GradientSync:
    # a replay keeps no partly gathered parameters, so with CUDA graphs backwards gather over all ranks
    config = wrapped.config
    parts, bitwise = not config.triton_cudagraphs, config.numerics == "bitwise"
    return ShardedSync(Fsdp2Adapter(states, wrapped.stock, parts=parts, bitwise=bitwise))


def _fsdp1(instances: Any, wrapped: WrappedModule) -> GradientSync:
    return ShardedSync(Fsdp1Adapter(wrapped.module, instances, wrapped.stock))


ADAPTERS = (
    AdapterRow("zero", lambda at: at.engine, lambda engine, at: zero_sync(engine, at.config.zero, at.stock)),
    AdapterRow("ddp", lambda at: at.ddp, _ddp),
    AdapterRow("fsdp2", lambda at: compat.fsdp2.states_in(at.module) or None, _fsdp2),
    AdapterRow("fsdp1", lambda at: compat.fsdp1.instances_in(at.module) or None, _fsdp1),
)


def sync_for(wrapped: WrappedModule) -> GradientSync | None:
    """Return the strategy of a module by the first row that detects a wrapper; None if none does."""
    for row in ADAPTERS:
        if (found := row.detect(wrapped)) is not None:
            return row.make(found, wrapped)
    return None
